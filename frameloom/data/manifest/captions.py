"""Captions that replace or extend those of the manifest: frame rate and motion score, templates of subject tuning.

    a boat between high rocks 24 FPS, 5 motion score.

The added text is a part of the caption from here on: it counts for text caches and for the manifest's fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from frameloom.core.errors import ConfigError
from frameloom.core.logging import get_logger
from frameloom.data.buckets.policy import BucketPolicy
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.manifest.rows import Rows
from frameloom.data.media.frames import sample_rate

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
    """To one caption, or to each of several; None stays None."""
    if value is None:
        return None
    return join_note(value, note) if isinstance(value, str) else [join_note(text, note) for text in value]


def note_captions(manifest: Manifest, notes: CaptionNotes) -> Manifest:
    """The same rows, with notes behind their captions."""
    if notes.motion is not None and notes.motion not in manifest.columns:
        _log.warning("%s: no column '%s', so no caption gets a motion score", manifest.source, notes.motion)
    return Manifest([replace(part, rows=NotedRows(part.rows, notes)) for part in manifest.parts])


TEMPLATES: dict[str, tuple[str, ...]] = {
    "object": (
        *("a photo of {}", "a picture of {}", "a clear photo of {}", "a dark photo of {}", "a bright photo of {}"),
        *("a close-up of {}", "a photo of {} from the side", "a photo of {} from afar", "a small picture of {}"),
        *("a photo of one {}", "a photo of my {}", "this is {}", "a sharp picture of {}", "a blurred photo of {}"),
        *("a drawing of {}", "{} in the middle of a picture", "a beautiful photo of {}", "an old photo of {}"),
    ),
    "style": (
        *("a painting in the style of {}", "a picture in the style of {}", "a drawing in the style of {}"),
        *("a landscape in the style of {}", "a portrait in the style of {}", "a small work in the style of {}"),
        *("a dark painting in the style of {}", "a bright painting in the style of {}", "art in the style of {}"),
        *("a scene in the style of {}", "a detail in the style of {}", "a sketch in the style of {}"),
    ),
    "face": (
        *("a photo of the face of {}", "a portrait of {}", "a close-up of the face of {}", "{} looks at the camera"),
        *("{} from the side", "a photo of {} who smiles", "a serious portrait of {}", "the face of {} in soft light"),
        *("the face of {} in bright light", "a dark portrait of {}", "a photo of the person {}", "a sketch of {}"),
    ),
}


def read_templates(kind: str, file: Path | None, placeholder: str) -> list[str]:
    """Phrases with the word in them, of a kind or from a file with `{}` in every line."""
    lines: Sequence[str] = TEMPLATES[kind]
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"inversion.template_file: {file} cannot be read as text ({error})") from error
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        wrong = [line for line in lines if line.count("{}") != 1]
        if wrong or not lines:
            found = f"'{wrong[0][:60]}'" if wrong else "no line"
            raise ConfigError(
                f"inversion.template_file: {file} has {found}; every line needs {{}} once, where the word stands"
            )
    return [line.replace("{}", placeholder) for line in lines]


class RetoldRows:
    """Rows that all have the captions `texts` to choose from; everything else is as in `rows`."""

    known_fingerprint: str | None = None

    def __init__(self, rows: Rows, texts: Sequence[str]) -> None:
        self._rows, self._told = rows, {"caption": texts[0], "captions": list(texts)}

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys([*self._rows.columns, *self._told]))

    def __len__(self) -> int:
        return len(self._rows)

    def values(self, names: Sequence[str], row: int) -> tuple[Any, ...]:
        own = [name for name in names if name not in self._told]
        found = dict(zip(own, self._rows.values(own, row), strict=True)) if own else {}
        return tuple(self._told[name] if name in self._told else found[name] for name in names)

    def gather(self, name: str, rows: Sequence[int]) -> list[Any]:
        return [self._told[name]] * len(rows) if name in self._told else self._rows.gather(name, rows)

    def slice(self, name: str, start: int, count: int) -> pl.Series:
        if name not in self._told:
            return self._rows.slice(name, start, count)
        count = max(0, min(count, len(self) - start))
        dtype = pl.String if name == "caption" else pl.List(pl.String)
        return pl.Series(name, [self._told[name]] * count, dtype=dtype)


def retell(manifest: Manifest, texts: Sequence[str]) -> Manifest:
    """The same rows, all with the captions `texts`."""
    return Manifest([replace(part, rows=RetoldRows(part.rows, texts)) for part in manifest.parts])
