"""Names a person types for a model, a size or a setting: an unknown one answers with the nearest known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from frameloom.core.errors import ConfigError


def refuse_unknown(name: str, known: Iterable[str], *, what: str) -> None:
    """Raise ConfigError when `name` is not in `known`; `what` says what was asked for, such as "denoiser family"."""
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(f"{what}: '{name}' is not known; {hint}Known: {', '.join(names)}")
