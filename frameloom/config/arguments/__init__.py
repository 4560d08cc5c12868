"""The arguments of other trainers and where each has its home here: one YAML file per system beside this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from frameloom.config.yaml_values import parse_document

SYSTEMS = ("sdxl", "latte", "opensora_plan", "cogvideox_fun", "opensora2")
COMMAND = "frameloom "


@dataclass(frozen=True)
class Argument:
    """One argument. `keys` are its homes: dotted keys of a recipe, or commands with an option; `none` says why it has
    none and what replaces it. `default` is the documented one, `program` the program's own where that differs."""

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
    file = Path(__file__).with_name(f"{name}.yaml")
    value, _ = parse_document(file.read_text(encoding="utf-8"), where=file.name)
    programs = {
        program: {argument: _read_argument(argument, row) for argument, row in rows.items()}
        for program, rows in value["programs"].items()
    }
    return System(name, value["title"], value["document"], programs)


def _read_argument(name: str, row: Mapping[str, Any]) -> Argument:
    keys = row.get("key", ())
    rest = {field: item for field, item in row.items() if field != "key"}
    return Argument(name=name, keys=(keys,) if isinstance(keys, str) else tuple(keys), **rest)
