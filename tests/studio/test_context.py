"""What a place may reach: paths below the root, and nothing that leads out of it."""

from __future__ import annotations

import pytest

from frameloom.core.errors import DataError
from frameloom.studio.server.app import clean_environment
from frameloom.studio.server.context import StudioContext


@pytest.fixture
def context(tmp_path):
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    (root / "data" / ".cache").mkdir(parents=True)
    scratch.mkdir()
    (tmp_path / "outside.mp4").write_bytes(b"x")
    (root / "data" / "a b#?.mp4").write_bytes(b"x")
    (root / "data" / ".cache" / "c.mp4").write_bytes(b"x")
    (root / "out.mp4").symlink_to(tmp_path / "outside.mp4")
    (root / "alias.mp4").symlink_to(root / "data" / ".cache" / "c.mp4")
    return StudioContext(root.resolve(), scratch)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.mp4",
        "/etc/passwd",
        "out.mp4",
        "data/../../outside.mp4",
        "data/.cache/c.mp4",
        "alias.mp4",
        "",
        "a\0b",
    ],
)
def test_a_name_that_leaves_the_root_or_is_hidden_is_refused(context, name):
    with pytest.raises(DataError):
        context.resolve(name)


def test_a_plain_name_is_found_and_its_address_is_quoted(context):
    path = context.resolve("data/a b#?.mp4")
    assert path.is_file() and context.name_of(path) == "data/a b#?.mp4"
    assert context.file_url(path).startswith("/files/data/a%20b%23%3F.mp4?v=")


def test_files_are_found_without_hidden_folders_and_links(context):
    assert [context.name_of(path) for path in context.find_files(".mp4")] == ["data/a b#?.mp4"]


def test_no_variable_of_gradio_survives_but_ours(tmp_path):
    environment = {"GRADIO_SHARE": "True", "GRADIO_ALLOWED_PATHS": "/", "SPACE_ID": "x", "PATH": "/bin"}
    assert clean_environment(tmp_path, environment) == ["GRADIO_ALLOWED_PATHS", "GRADIO_SHARE", "SPACE_ID"]
    assert environment == {
        "PATH": "/bin",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "GRADIO_TEMP_DIR": str(tmp_path),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
