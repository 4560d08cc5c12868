"""Spelling suggestions: the known name nearest to a misspelt one."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from frameloom.core.errors import ConfigError

_MAX_WORD = 64


def distance(one: str, other: str, *, limit: int = sys.maxsize) -> int:
    """Edits between two words: insert, delete, replace, or swap two neighbours; beyond `limit`, any number above it."""
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        older, before, row = before, row, [i]
        for j, right in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (left != right))
            if i > 1 and j > 1 and left == other[j - 2] and one[i - 2] == right:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
        # What follows is built on these two rows and never falls below both.
        if min(row) > limit and min(before) > limit:
            return limit + 1
    return row[-1]


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` is most likely a slip of, or None when nothing is close."""
    if len(word) > _MAX_WORD:
        return None
    plain = _fold(word)
    limit = max(1, len(plain) // 3)
    scored = [(distance(plain, _fold(candidate), limit=limit), candidate) for candidate in candidates]
    close = [(score, candidate[:1] != word[:1], candidate) for score, candidate in scored if score <= limit]
    return min(close)[2] if close else None


def share_words(word: str, candidates: Iterable[str]) -> str | None:
    """The only candidate that begins alike (maxlen, max_length) or is a part of the word (num_steps, steps)."""
    start, parts = _fold(word).replace("_", ""), _fold(word).split("_")
    alike = [
        name for name in candidates if name in parts or (len(start) > 2 and name.replace("_", "").startswith(start))
    ]
    return alike[0] if len(alike) == 1 else None


def suggest(word: str, candidates: Iterable[str], *, kind: str) -> str:
    """`did you mean 'x'?`, or the whole list when nothing is close."""
    known = list(candidates)
    near = nearest(word, known)
    return f"did you mean '{near}'?" if near else f"known {kind}: {', '.join(known)}"


def refuse_unknown(name: str, known: Iterable[str], *, what: str) -> None:
    """Raise ConfigError when `name` is not in `known`; `what` says what was asked for, such as "denoiser family"."""
    names = sorted(known)
    if name not in names:
        near = nearest(name, names)
        hint = f"did you mean '{near}'? " if near else ""
        raise ConfigError(f"{what}: '{name}' is not known; {hint}Known: {', '.join(names)}")


def _fold(word: str) -> str:
    return word.casefold().replace("-", "_")
