"""A spec names its code as "module:name"; it is imported when it is first needed, and a wrong name is explained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from frameloom.models.spec import load_object


def test_a_module_is_imported_when_its_object_is_asked_for() -> None:
    sys.modules.pop("this", None)
    assert load_object("pathlib:Path") is Path
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("frameloom.models.spec:load_objekt", "'frameloom.models.spec:load_objekt': the module has no 'load_objekt'"),
        ("frameloom.core.nothing:here", "'frameloom.core.nothing:here': there is no module 'frameloom.core.nothing'"),
        ("frameloom.nothing.here:at_all", "there is no module 'frameloom.nothing'"),
    ],
)
def test_a_target_that_does_not_exist_is_named(target: str, words: str) -> None:
    with pytest.raises(ImportError) as caught:
        load_object(target)
    assert words in str(caught.value)


@pytest.mark.parametrize("target", ["frameloom.models.spec", "load_object", ":load_object", "frameloom.models.spec:"])
def test_a_target_needs_a_module_and_a_name(target: str) -> None:
    with pytest.raises(ValueError, match=r"write it as package\.module:name"):
        load_object(target)


def test_an_import_that_fails_inside_the_module_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_another.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has") as caught:
        load_object("needs_another:anything")
    assert caught.value.name == "a_package_that_nobody_has"
