"""What differs between the recipe that a run was last started with and the one it is started with now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frameloom.config.schema import Recipe
from frameloom.core.errors import RunError
from frameloom.core.log import get_logger

__all__ = ["Change", "check_changes", "find_changes"]

_log = get_logger(__name__)
_ABSENT = "(not there)"

# Sections and keys that do not change what is learnt from one step to the next: length, speed, files, what is shown.
_HARMLESS = (
    "name",
    "run",
    "data.workers",
    "data.timeout_s",
    "data.bad_limit",
    "train.steps",
    "train.epochs",
    "train.log_every",
    "train.save_every",
    "train.async_save",
    "train.checkpoint",
    "train.keep",
    "optim.offload",
    "train.device",
    "train.recompute",
    "train.compile",
    "train.park_encoders",
    "train.gc_every",
    "train.max_device_memory",
    "train.halve",
    "train.rehearse",
    "train.side_by_side",
    "train.deterministic",
    "train.profile",
    "train.on_nonfinite",
    "train.nonfinite_limit",
    "parallel",
    "validation",
    "sample",
)
# Inside one of those: how many micro-batches a step has.
_HARMFUL = ("parallel.data",)


@dataclass(frozen=True)
class Change:
    """A key that differs; a harmless one does not change what is learnt."""

    key: str
    before: Any
    after: Any

    @property
    def is_harmless(self) -> bool:
        return _is_below(self.key, _HARMLESS) and not _is_below(self.key, _HARMFUL)

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def _is_below(key: str, places: tuple[str, ...]) -> bool:
    return any(key == place or key.startswith(f"{place}.") for place in places)


def find_changes(before: Recipe, after: Recipe) -> list[Change]:
    """Every key that differs, in order of their names."""
    old, new = _flatten(before.model_dump(mode="json")), _flatten(after.model_dump(mode="json"))
    return [
        Change(key, old.get(key, _ABSENT), new.get(key, _ABSENT))
        for key in sorted(old.keys() | new.keys())
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def check_changes(changes: list[Change], *, where: str, step: int, accept: bool) -> None:
    """Tell all changes; RunError lists those that change what is learnt, unless they are accepted."""
    for change in changes:
        tell = _log.info if change.is_harmless else _log.warning
        tell("%s: changed since the last start: %s", where, change)
    serious = [change for change in changes if not change.is_harmless]
    if serious and not accept:
        listed = "\n".join(f"  {change}" for change in serious)
        raise RunError(
            f"{where}: the recipe has changed since step {step} in what is learnt:\n{listed}\n"
            "put these keys back, start a new run with --name, or go on all the same with --accept-recipe-change"
        )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix.removesuffix("."): value}
    return {key: leaf for name, part in value.items() for key, leaf in _flatten(part, f"{prefix}{name}.").items()}
