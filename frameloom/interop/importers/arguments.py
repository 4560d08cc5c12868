"""Arguments of other trainers and the recipe keys or commands that replace them, as tables and as a docs page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from frameloom.config.loading.yaml_values import format_value, parse_document

SYSTEMS = ("sdxl", "latte", "opensora_plan", "cogvideox_fun", "opensora2")
COMMAND = "frameloom "


@dataclass(frozen=True)
class Argument:
    """One argument, and how it is translated where no code has to look at others for that.

    `keys` replace it: dotted keys of a recipe, or commands with an option; `none` says why there is no such key and
    what replaces it. `default` is the documented one, `program` the program's own where that differs. `aliases` are
    other names for the same thing, which count if this one is not given.
    """

    name: str
    means: str
    keys: tuple[str, ...] = ()
    none: str | None = None
    note: str = ""
    kind: str = "text"
    default: Any = None
    program: Any = None
    required: bool = False
    undocumented: bool = False
    aliases: tuple[str, ...] = ()
    copy: tuple[str, ...] = ()
    """keys of the recipe that get the value, or its default; in a table true stands for `keys`"""
    values: Mapping[Any, Any] | str | None = None
    """what each word becomes, or the name of a shared table; other words are refused"""
    convert: Literal["", "keep", "memory"] = ""
    if_given: bool = False
    """a default changes nothing"""
    if_set: bool = False
    """False, 0 and nothing change nothing"""
    when: str = ""
    """`name`, `not name` or `name=value`: without it the argument has no effect in the original, and `otherwise` says
    why"""
    otherwise: str = ""
    unsupported: str = ""
    """said where it is given"""
    is_implied: bool = False
    """follows from other arguments"""

    @property
    def is_unused(self) -> bool:
        """Whether the original reads it and then does nothing with it."""
        return bool(self.none and self.none.startswith("the original reads it and never uses it"))


@dataclass(frozen=True)
class System:
    """A trainer: `programs` are its programs with their arguments, by name."""

    name: str
    title: str
    document: str
    programs: Mapping[str, Mapping[str, Argument]]


@cache
def load_system(name: str) -> System:
    """The arguments of one system of `SYSTEMS`."""
    file = Path(__file__).parent / "tables" / f"{name}.yaml"
    value, _ = parse_document(file.read_text(encoding="utf-8"), where=file.name)
    programs = {
        program: {argument: _read_row(argument, row) for argument, row in rows.items()}
        for program, rows in value["programs"].items()
    }
    return System(name, value["title"], value["document"], programs)


def _read_row(name: str, row: Mapping[str, Any]) -> Argument:
    keys, copy = row.get("key", ()), row.get("copy", ())
    keys = (keys,) if isinstance(keys, str) else tuple(keys)
    copy = keys if copy is True else (copy,) if isinstance(copy, str) else tuple(copy)
    rest = {field: item for field, item in row.items() if field not in ("key", "copy", "aliases")}
    return Argument(name=name, keys=keys, copy=copy, aliases=tuple(row.get("aliases", ())), **rest)


_INTRODUCTION = """\
# Arguments of other trainers

Where the arguments, configuration keys and variables of five published systems live here. `frameloom import FILE`
turns a whole command or configuration of theirs into a recipe ([how](import.md)). This page is printed by
`frameloom recipe arguments`; a test checks that each key and each option named here exists.

A dotted name is a key of the recipe ([reference](recipe.md)); `frameloom ...` is a command, with an option or a
place on its line. "None" says why there is no such key and what replaces it.
"""


def render_arguments() -> str:
    """The whole page: a count, then a section for each system with a table for each of its programs."""
    rows = ["| system | in its document | also known | without a key here |", "|---|---|---|---|"]
    for name in SYSTEMS:
        system = load_system(name)
        everything = [argument for arguments in system.programs.values() for argument in arguments.values()]
        known = sum(argument.undocumented for argument in everything)
        without = sum(argument.none is not None for argument in everything)
        rows.append(f"| [{system.title}](#{name}) | {len(everything) - known} | {known} | {without} |")
    return "\n".join([_INTRODUCTION, *rows, "", *(_render_system(name) for name in SYSTEMS)]).rstrip("\n") + "\n"


def _render_system(name: str) -> str:
    system = load_system(name)
    parts = [f'<a id="{name}"></a>\n', f"## {system.title}\n", f"Source: {system.document}.\n"]
    for program, arguments in system.programs.items():
        told = {key: item for key, item in arguments.items() if not item.undocumented}
        more = {key: item for key, item in arguments.items() if item.undocumented}
        if told:
            parts += [f"### `{program}`\n", *_render_table(told)]
        if more:
            title = (
                f"Not in the document, but known to `{program}`:" if told else f"### `{program}`, not in the document"
            )
            parts += [f"{title}\n", *_render_table(more)]
    return "\n".join(parts)


def _render_table(arguments: Mapping[str, Argument]) -> Iterator[str]:
    yield "| argument | meaning | default | here |"
    yield "|---|---|---|---|"
    for argument in arguments.values():
        default = ""
        if argument.required:
            default = "required"
        elif argument.default is not None:
            own = "" if argument.program is None else f" (the program's own: `{format_value(argument.program)}`)"
            default = f"`{format_value(argument.default)}`{own}"
        here = f"None: {argument.none}"
        if argument.none is None:
            here = ", ".join(f"`{key}`" for key in argument.keys) + (f": {argument.note}" if argument.note else "")
        cells = (f"`{argument.name}`", argument.means, default, here)
        escaped = (cell.replace("|", "\\|").replace("<", "\\<") for cell in cells)
        yield f"| {' | '.join(escaped)} |"
    yield ""
