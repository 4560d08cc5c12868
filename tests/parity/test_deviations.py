"""The list of deviations."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.core.errors import ConfigError
from tests.parity.deviations import Deviation, find_by_name, read_deviations


def test_every_entry_has_a_name_of_its_own_and_a_reason() -> None:
    entries = read_deviations()
    assert len({entry.name for entry in entries}) == len(entries) > 5
    assert all(len(entry.reason) > 40 and entry.cases for entry in entries)


def test_an_entry_for_files_that_are_not_there_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text('- name: absent\n  cases: ["nowhere_*"]\n  outputs: ["a*"]\n  reason: not to be found\n')
    (entry,) = read_deviations(path)
    assert not entry.covers_output("here", "a1")
    assert entry.covers_output("nowhere_1", "a1") and not entry.covers_output("nowhere_1", "b1")
    assert not entry.covers_case("nowhere_1")


@pytest.mark.parametrize(
    "text",
    [
        "name: x\n",
        "- name: x\n  cases: [a]\n",
        "- name: x\n  cases: [a]\n  reason: y\n  why: z\n",
        '- name: x\n  cases: [a]\n  reason: ""\n',
        "- name: x\n  cases: [1]\n  reason: y\n",
    ],
)
def test_a_list_with_a_mistake_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"list\.yaml"):
        read_deviations(path)


def test_a_name_counts_for_its_own_cases_only() -> None:
    entries = [Deviation("one", ("a*",), (), "because")]
    assert find_by_name(entries, "one", "a1").reason == "because"
    for name, kind in (("two", "a1"), ("one", "b1")):
        with pytest.raises(ConfigError, match="write its reason"):
            find_by_name(entries, name, kind)
