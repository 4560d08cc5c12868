"""Pictures of the class that DreamBooth keeps the prior of, as rows behind those of the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from frameloom.config.personal_settings import DreamBoothSection
from frameloom.data.caption_templates import retell
from frameloom.data.manifest import Manifest, Part, check_table
from frameloom.data.probe import kind_of, probe_header
from frameloom.data.table_rows import TableRows

__all__ = ["class_rows", "list_pictures", "with_class_images"]

_SOURCE = "dreambooth.class_folder"


def with_class_images(manifest: Manifest, section: DreamBoothSection) -> Manifest:
    """All rows with the instance prompt; pictures of the class behind them, in no epoch by themselves."""
    told = retell(manifest, [section.instance_prompt])
    if section.class_folder is None or section.class_prompt is None:
        return told
    folder = Path(section.class_folder)
    table = _read_table(folder, section.class_prompt)
    if not table.height:
        return told
    weight = 0.0 if any(part.weight is not None for part in told.parts) else None
    rows = TableRows(check_table(table, source=_SOURCE))
    return Manifest([*told.parts, Part(rows, folder, _SOURCE, weight, repeat=0.0)])


def class_rows(manifest: Manifest) -> NDArray[np.int64]:
    """The rows of the class pictures, none if there are none."""
    last = manifest.parts[-1]
    count = len(last.rows) if last.source == _SOURCE else 0
    return np.arange(len(manifest) - count, len(manifest), dtype=np.int64)


def list_pictures(folder: Path) -> list[Path]:
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if kind_of(path) == "image" and not path.name.startswith(".")]


def _read_table(folder: Path, prompt: str) -> pl.DataFrame:
    facts = [(path.name, probe_header(path)) for path in list_pictures(folder)]
    return pl.DataFrame(
        {
            "path": [name for name, _ in facts],
            "caption": [prompt] * len(facts),
            "kind": ["image"] * len(facts),
            "height": [found.height for _, found in facts],
            "width": [found.width for _, found in facts],
            "frames": [1] * len(facts),
            "fps": pl.Series([None] * len(facts), dtype=pl.Float64),
        }
    )
