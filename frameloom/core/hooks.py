"""Named points of a run and the callables that observe them; there are none unless somebody adds one."""

from __future__ import annotations

from collections.abc import Callable

observers: list[Callable[[str, dict[str, object]], None]] = []


def notify(point: str, **facts: object) -> None:
    """Call every observer; an error that it raises is one of this point."""
    for observe in observers:
        observe(point, facts)
