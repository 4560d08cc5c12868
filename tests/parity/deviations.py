"""The list of what golden files show and we do not reproduce, each with its reason (deviations.yaml)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from frameloom.config.loading.yaml_values import parse_document
from frameloom.core.errors import ConfigError

PUBLISHED_LIST = Path(__file__).with_name("deviations.yaml")


@dataclass(frozen=True)
class Deviation:
    """`cases` and `outputs` are patterns with `*`; without outputs the runner of a case decides where it applies."""

    name: str
    cases: tuple[str, ...]
    outputs: tuple[str, ...]
    reason: str

    def covers_case(self, kind: str) -> bool:
        """Whether the whole file is not run."""
        return self.outputs == ("*",) and self._is_of(kind)

    def covers_output(self, kind: str, output: str) -> bool:
        return self._is_of(kind) and any(fnmatchcase(output, pattern) for pattern in self.outputs)

    def _is_of(self, kind: str) -> bool:
        return any(fnmatchcase(kind, pattern) for pattern in self.cases)


def read_deviations(path: Path = PUBLISHED_LIST) -> list[Deviation]:
    entries, _ = parse_document(path.read_text(encoding="utf-8"), where=str(path))
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: holds {type(entries).__name__}, expected a list of deviations")
    return [_read_entry(entry, f"{path}: entry {number}") for number, entry in enumerate(entries, start=1)]


def _read_entry(entry: Any, where: str) -> Deviation:
    allowed = {"name", "cases", "outputs", "reason"}
    if not isinstance(entry, dict) or not {"name", "cases", "reason"} <= entry.keys() or entry.keys() - allowed:
        raise ConfigError(f"{where}: expected the keys name, cases, reason and maybe outputs, found {entry!r}")
    texts = [entry["name"], entry["reason"], *entry["cases"], *entry.get("outputs", [])]
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{where}: names, patterns and the reason are texts that say something; found {entry!r}")
    return Deviation(entry["name"], tuple(entry["cases"]), tuple(entry.get("outputs", [])), entry["reason"])


def find_by_name(deviations: Sequence[Deviation], name: str, kind: str) -> Deviation:
    """The entry that a runner calls; ConfigError when the list has none of that name for this kind of case."""
    for deviation in deviations:
        if deviation.name == name and deviation._is_of(kind):
            return deviation
    raise ConfigError(f"{PUBLISHED_LIST}: has no entry '{name}' for cases like '{kind}'; write its reason there")
