"""Captions that stand in for those of a manifest: one prompt for all pictures, or phrases around a new word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from frameloom.core.errors import ConfigError
from frameloom.data.manifest import Manifest
from frameloom.data.table_rows import Rows

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
