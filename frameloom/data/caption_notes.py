"""What is said about a clip behind its caption: the frame rate and the motion score, as Open-Sora 2.0 trains with.

    a boat between high rocks 24 FPS, 5 motion score.

The note is a part of the caption for all that follows: text caches know it, and so does the manifest's fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl

from frameloom.core.log import get_logger
from frameloom.data.buckets import BucketPolicy
from frameloom.data.manifest import Manifest
from frameloom.data.policies.lengths import sample_rate
from frameloom.data.table_rows import Rows

__all__ = ["CaptionNotes", "join_note", "note_captions", "spell_motion", "spell_rate"]

_log = get_logger(__name__)
_CAPTIONS = ("caption", "captions")


def spell_rate(fps: float, fps_max: float) -> str:
    """The rate of a clip after thinning; as in the original, one that was not thinned keeps its decimals (16.0 FPS)."""
    rate, _ = sample_rate(np.array([fps]), fps_max)
    return f"{int(rate[0]) if fps >= fps_max else float(rate[0])} FPS"


def spell_motion(score: float) -> str:
    return f"{int(score + 0.5)} motion score"


def join_note(caption: str, parts: Sequence[str]) -> str:
    """Nothing but a space goes before the note, whatever the caption ends with."""
    return f"{caption} {', '.join(parts)}." if parts else caption


@dataclass(frozen=True)
class CaptionNotes:
    """Which facts are said. `motion` is a column; `stride` and `rate` are how a bucket policy spaces frames, if it does
    not thin them to `fps_max`."""

    fps: bool
    motion: str | None
    fps_max: float
    stride: int | None = None
    rate: float | None = None

    @classmethod
    def for_policy(cls, policy: BucketPolicy, *, fps: bool, motion: str | None, fps_max: float) -> CaptionNotes:
        return cls(fps, motion, fps_max, policy.frame_rule.stride, policy.frame_rule.fps)

    def parts(self, fps: float | None, score: float | None) -> list[str]:
        """Those of one row; `fps` is that of the file, None or NaN for an image."""
        parts = []
        if self.fps and fps is not None and not math.isnan(fps):
            parts.append(self._spell_rate(fps))
        if score is not None and not math.isnan(score):
            parts.append(spell_motion(score))
        return parts

    def _spell_rate(self, fps: float) -> str:
        if self.rate is not None:
            return f"{self.rate:g} FPS"
        return spell_rate(fps, self.fps_max) if self.stride is None else f"{fps / self.stride:g} FPS"


class NotedRows:
    """Rows whose captions carry their notes; everything else is as in `rows`."""

    known_fingerprint: str | None = None

    def __init__(self, rows: Rows, notes: CaptionNotes) -> None:
        self._rows, self._notes = rows, notes
        self._facts = ["fps", *([notes.motion] if notes.motion in rows.columns else [])]

    @property
    def columns(self) -> list[str]:
        return self._rows.columns

    def __len__(self) -> int:
        return len(self._rows)

    def values(self, names: Sequence[str], row: int) -> tuple[Any, ...]:
        found = self._rows.values(names, row)
        if not any(name in _CAPTIONS for name in names):
            return found
        note = self._parts(self._rows.values(self._facts, row))
        pairs = zip(names, found, strict=True)
        return tuple(_add_note(value, note) if name in _CAPTIONS else value for name, value in pairs)

    def gather(self, name: str, rows: Sequence[int]) -> list[Any]:
        found = self._rows.gather(name, rows)
        if name not in _CAPTIONS:
            return found
        facts = zip(*(self._rows.gather(fact, rows) for fact in self._facts), strict=True)
        return [_add_note(value, self._parts(fact)) for value, fact in zip(found, facts, strict=True)]

    def slice(self, name: str, start: int, count: int) -> pl.Series:
        found = self._rows.slice(name, start, count)
        if name not in _CAPTIONS:
            return found
        spelled = lru_cache(maxsize=None)(self._parts)  # a set has few different rates and scores
        facts = zip(*(self._rows.slice(fact, start, count).to_list() for fact in self._facts), strict=True)
        noted = [_add_note(value, spelled(fact)) for value, fact in zip(found.to_list(), facts, strict=True)]
        return pl.Series(name, noted, dtype=found.dtype)

    def _parts(self, facts: tuple[Any, ...]) -> list[str]:
        return self._notes.parts(facts[0], facts[1] if len(facts) > 1 else None)


def _add_note(value: Any, note: list[str]) -> Any:
    """To one caption, or to each of several; a caption that is not there stays so."""
    if value is None:
        return None
    return join_note(value, note) if isinstance(value, str) else [join_note(text, note) for text in value]


def note_captions(manifest: Manifest, notes: CaptionNotes) -> Manifest:
    """The same rows, with notes behind their captions."""
    if notes.motion is not None and notes.motion not in manifest.columns:
        _log.warning("%s: no column '%s', so no caption gets a motion score", manifest.source, notes.motion)
    return Manifest([replace(part, rows=NotedRows(part.rows, notes)) for part in manifest.parts])
