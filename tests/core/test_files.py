import errno

import pytest

from frameloom.core.files import (
    PARTIAL,
    atomic_file,
    atomic_folder,
    digest_file,
    digest_value,
    remove_partial,
    write_json,
)


def test_a_failed_write_leaves_the_old_file_and_no_leftover(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    before = digest_file(path)
    with pytest.raises(RuntimeError), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert digest_file(path) == before
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_appears_only_when_complete_and_is_never_written_twice(tmp_path):
    folder = tmp_path / "step"
    with pytest.raises(RuntimeError), atomic_folder(folder) as temporary:
        (temporary / "a").write_text("x")
        assert not folder.exists()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(folder) as temporary:
        (temporary / "a").write_text("x")
    assert (folder / "a").read_text() == "x"
    with pytest.raises(FileExistsError), atomic_folder(folder):
        pass


def test_an_error_names_what_is_made_and_not_the_temporary(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(IsADirectoryError) as blocked:
        write_json(tmp_path / "data", {})
    with pytest.raises(FileNotFoundError) as absent, atomic_folder(tmp_path / "step") as temporary:
        (temporary / "no" / "file").write_text("x")
    with pytest.raises(OSError, match="no room") as full, atomic_file(tmp_path / "a.json"):
        raise OSError(errno.ENOSPC, "no room")
    for error, name in ((blocked, "data"), (absent, "step/no/file"), (full, "a.json")):
        assert error.value.filename == str(tmp_path / name) and PARTIAL not in str(error.value)


def test_leftovers_of_a_killed_writer_are_cleared(tmp_path):
    (tmp_path / f"{PARTIAL}1-step").mkdir()
    (tmp_path / f"{PARTIAL}2-file").write_text("x")
    (tmp_path / "kept").write_text("x")
    remove_partial(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["kept"]


def test_a_value_digest_ignores_key_order_only():
    assert digest_value({"a": 1, "b": 2}) == digest_value({"b": 2, "a": 1})
    assert digest_value({"a": 1, "b": 2}) != digest_value({"a": 2, "b": 1})
