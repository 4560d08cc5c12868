"""Captions that replace or extend those of the manifest: frame rate and motion score, templates of subject tuning.

    a boat between high rocks 24 FPS, 5 motion score.

The added text is a part of the caption from here on: it counts for text caches and for the manifest's fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from frameloom.core.errors import ConfigError
from frameloom.core.logging import get_logger
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.manifest.rows import Rows
from frameloom.data.media.frames import sample_rate

_log = get_logger(__name__)
Facts = tuple[Any, ...]
_CAPTION_DTYPES: dict[str, pl.DataType] = {"caption": pl.String(), "captions": pl.List(pl.String)}


def format_rate(fps: float, fps_max: float) -> str:
    """The rate of a clip after thinning; as in the original, one that was not thinned keeps its decimals (16.0 FPS)."""
    rate, _ = sample_rate(np.array([fps]), fps_max)
    return f"{int(rate[0]) if fps >= fps_max else float(rate[0])} FPS"


def format_motion(score: float) -> str:
    return f"{int(score + 0.5)} motion score"


def join_suffix(caption: str, parts: Sequence[str]) -> str:
    """Nothing but a space goes before the suffix, whatever the caption ends with."""
    return f"{caption} {', '.join(parts)}." if parts else caption


@dataclass(frozen=True)
class CaptionSuffix:
    """What is said behind a caption: the rate if `fps`, and the score in the column `motion`.

    `stride` and `rate` are how a bucket policy spaces frames, if it does not thin them to `fps_max`.
    """

    fps: bool
    motion: str | None
    fps_max: float
    stride: int | None = None
    rate: float | None = None

    def parts(self, fps: float | None, score: float | None = None) -> list[str]:
        """Those of one row; `fps` is that of the file, None or NaN for an image."""
        parts = []
        if self.fps and fps is not None and not math.isnan(fps):
            spaced = self.rate if self.stride is None else fps / self.stride
            parts.append(format_rate(fps, self.fps_max) if spaced is None else f"{spaced:g} FPS")
        if score is not None and not math.isnan(score):
            parts.append(format_motion(score))
        return parts

    def append_to(self, name: str, value: Any, facts: Facts) -> Any:
        """To one caption, or to each of several; None stays None."""
        if value is None:
            return None
        parts = _cached_parts(self, *facts)
        return join_suffix(value, parts) if isinstance(value, str) else [join_suffix(text, parts) for text in value]


# A set has few different rates and scores.
@lru_cache(maxsize=65_536)
def _cached_parts(suffix: CaptionSuffix, fps: float | None, score: float | None = None) -> list[str]:
    return suffix.parts(fps, score)


@dataclass(frozen=True)
class AnnotatedRows(Rows):
    """Rows whose columns in `dtypes` are edited; everything else is as in `rows`.

    `edit` takes the name of a column, its value (None where `rows` lack the column), and the row's values of the
    columns `facts`. It travels to other processes, so it is a function of a module or a method.
    """

    rows: Rows
    dtypes: dict[str, pl.DataType]
    edit: Callable[[str, Any, Facts], Any]
    facts: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys([*self.rows.columns, *self.dtypes]))

    def __len__(self) -> int:
        return len(self.rows)

    def values(self, names: Sequence[str], row: int) -> tuple[Any, ...]:
        known = [name for name in (*names, *self.facts) if name in self.rows.columns]
        found = dict(zip(known, self.rows.values(known, row), strict=True)) if known else {}
        facts = tuple(found[name] for name in self.facts)
        return tuple(self.edit(name, found.get(name), facts) if name in self.dtypes else found[name] for name in names)

    def slice(self, name: str, start: int, count: int) -> pl.Series:
        if name not in self.dtypes:
            return self.rows.slice(name, start, count)
        count = max(0, min(count, len(self) - start))
        values = self.rows.slice(name, start, count).to_list() if name in self.rows.columns else [None] * count
        facts = [self.rows.slice(fact, start, count).to_list() for fact in self.facts]
        made = [self.edit(name, value, tuple(row)) for value, *row in zip(values, *facts, strict=True)]
        return pl.Series(name, made, dtype=self.dtypes[name])


def append_suffix(manifest: Manifest, suffix: CaptionSuffix) -> Manifest:
    """The same rows, with a suffix behind their captions."""
    if suffix.motion is not None and suffix.motion not in manifest.columns:
        _log.warning("%s: no column '%s', so no caption gets a motion score", manifest.source, suffix.motion)
    parts = []
    for part in manifest.parts:
        facts = ("fps", *([suffix.motion] if suffix.motion in part.rows.columns else []))
        dtypes = {name: dtype for name, dtype in _CAPTION_DTYPES.items() if name in part.rows.columns}
        parts.append(replace(part, rows=AnnotatedRows(part.rows, dtypes, suffix.append_to, facts)))
    return Manifest(parts)


def override_captions(manifest: Manifest, texts: Sequence[str]) -> Manifest:
    """The same rows, all with the captions `texts` to choose from."""
    edit = partial(_override, {"caption": texts[0], "captions": list(texts)})
    return Manifest([replace(part, rows=AnnotatedRows(part.rows, _CAPTION_DTYPES, edit)) for part in manifest.parts])


def _override(captions: dict[str, Any], name: str, value: Any, facts: Facts) -> Any:
    return captions[name]


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
