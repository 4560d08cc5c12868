"""Every argument that the five documents name has a home here, and each home is real."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.cli.lazy import build_command
from frameloom.cli.main import _SWITCHES, _WITH_VALUE, ROOT
from frameloom.config.loading.schema_tree import kind_at
from frameloom.interop.importers.arguments import COMMAND, SYSTEMS, Argument, load_system, render_arguments
from frameloom.models.registry import DENOISERS, VAES

LISTS = Path(__file__).parent / "arguments"
DOCS = Path(__file__).parents[3] / "docs"


def read_names(system: str) -> list[tuple[str, str]]:
    """(program, argument) of each line of the list that was made from a system's document."""
    lines = (LISTS / f"{system}.txt").read_text().splitlines()
    return [(program, name) for program, _, name in (line.partition(": ") for line in lines)]


def list_arguments() -> list[tuple[str, str, Argument]]:
    return [
        (system, program, argument)
        for system in SYSTEMS
        for program, arguments in load_system(system).programs.items()
        for argument in arguments.values()
    ]


def is_command(key: str) -> bool:
    """Whether a command exists, with the option or the place on its line that follows it."""
    entry, words = ROOT, key.split()[1:]
    while words and words[0] in entry.commands:
        entry = entry.commands[words.pop(0)]
    if entry.commands:
        return False
    known = {*_SWITCHES, *_WITH_VALUE}
    for parameter in build_command("x", entry).params:
        known |= {*parameter.opts, (parameter.metavar or parameter.name).upper()}
    return all(word in known for word in words)


def is_key(key: str) -> bool:
    path = tuple(key.split("."))
    if path[1:2] == ("overrides",):
        specs = (DENOISERS if path[0] == "model" else VAES).values()
        return any(path[2] in spec.fields for spec in specs)
    return kind_at(path) is not None


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_name_of_the_document_has_a_row(system: str) -> None:
    programs = load_system(system).programs
    names = read_names(system)
    assert len(set(names)) == len(names) > 30
    missing = [f"{program}: {name}" for program, name in names if name not in programs.get(program, {})]
    assert not missing


def test_the_documents_name_more_than_190_arguments() -> None:
    assert sum(len(read_names(system)) for system in SYSTEMS) > 190


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_row_that_is_not_in_the_document_says_so(system: str) -> None:
    told = set(read_names(system))
    for program, arguments in load_system(system).programs.items():
        for name, argument in arguments.items():
            assert ((program, name) in told) == (not argument.undocumented), f"{program}: {name}"


def test_every_argument_has_a_key_or_says_why_not() -> None:
    for system, program, argument in list_arguments():
        place = f"{system}, {program}: {argument.name}"
        assert bool(argument.keys) != bool(argument.none), place
        assert argument.means and len(argument.none or "long enough") > 10, place


def test_every_home_is_real() -> None:
    homes = {key for _, _, argument in list_arguments() for key in argument.keys}
    commands = {key for key in homes if key.startswith(COMMAND)}
    keys = homes - commands
    assert len(keys) > 100 and len(commands) > 20
    assert [key for key in sorted(keys) if not is_key(key)] == []
    assert [command for command in sorted(commands) if not is_command(command)] == []


@pytest.mark.parametrize("key", ["optim.rate", "model.overrides.colour", "optim.lr.x", "train"])
def test_a_key_that_does_not_exist_is_found(key: str) -> None:
    assert is_key(key) == (key == "train")


@pytest.mark.parametrize(
    "command",
    ["frameloom sample --stepz", "frameloom vae", "frameloom vae rebuild", "frameloom sample --steps"],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert is_command(command) == (command == "frameloom sample --steps")


def test_the_page_is_what_the_tables_say() -> None:
    assert (DOCS / "arguments.md").read_text() == render_arguments()


def test_the_page_has_a_line_for_every_argument() -> None:
    text = render_arguments()
    for system, program, argument in list_arguments():
        assert f"| `{argument.name}` |" in text, f"{system}, {program}"
