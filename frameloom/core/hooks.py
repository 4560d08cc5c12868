"""Named points of a run (a pass, a save) and the callables that observe them; none by default."""

from __future__ import annotations

from collections.abc import Callable

observers: list[Callable[[str, dict[str, object]], None]] = []


def notify(point: str, **facts: object) -> None:
    """Call every observer; what it raises is raised here."""
    for observe in observers:
        observe(point, facts)
