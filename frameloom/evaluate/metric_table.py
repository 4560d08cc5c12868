"""A table of metrics: one row per clip, means with confidence intervals, written as text, parquet and JSON.

The bootstrap (Efron 1979, percentiles) assumes no distribution and never leaves the range of the numbers; of fewer than
about ten clips it comes out too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import polars as pl

from frameloom.core.errors import DataError
from frameloom.core.files import atomic_file, write_json
from frameloom.core.random import numpy_stream

CONFIDENCE = 0.95
Intervals = Literal["student", "bootstrap"]
Record = Mapping[str, Any]
TABLE, DOCUMENT = "metrics.parquet", "metrics.json"
_SHOWN_ROWS = 50
_NAME_WIDTH = 40
_RESAMPLES = 4000
_MAX_DRAWS = 4_000_000  # indices that are held at once
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)
_EXPAND_FROM = 200  # degrees of freedom from which the expansion around the normal law is exact to 1e-7


@dataclass(frozen=True)
class MetricTable:
    """`records` have a `name`, an `error` (None for a good clip) and the `columns`; `more` are numbers of whole sets,
    and `notes` what a reader should know of them."""

    records: Sequence[Record]
    columns: Sequence[str]
    confidence: float = CONFIDENCE
    more: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    intervals: Intervals = "student"

    @property
    def good(self) -> list[Record]:
        return [record for record in self.records if record["error"] is None]

    @property
    def bad(self) -> list[Record]:
        return [record for record in self.records if record["error"] is not None]

    def refuse_empty(self) -> None:
        """DataError when there is no number at all."""
        if not self.good and not self.more:
            first = f"; the first reason: {self.bad[0]['error']}" if self.bad else "; ask for metrics or --features"
            raise DataError(f"none of {len(self.records)} clips could be measured{first}")

    def summaries(self) -> dict[str, Summary]:
        """By column; one that no clip has a number for is left out."""
        found = {}
        for column in self.columns:
            values = [record[column] for record in self.good if record.get(column) is not None]
            if values:
                found[column] = summarise(values, self.confidence, self.intervals)
        return found

    def to_json(self) -> dict[str, Any]:
        """Infinite numbers, which JSON lacks, are written as the text "inf"."""
        whole = {
            "clips": len(self.good),
            "confidence": self.confidence,
            "intervals": self.intervals,
            "summary": {name: asdict(summary) for name, summary in self.summaries().items()},
            "sets": dict(self.more),
            "notes": list(self.notes),
            "files": [dict(record) for record in self.good],
            "bad": [{"name": record["name"], "error": record["error"]} for record in self.bad],
        }
        plain: dict[str, Any] = _to_plain(whole)
        return plain

    def write(self, folder: Path) -> None:
        """`metrics.parquet` with a row per clip, bad ones too, and `metrics.json` with the summary."""
        names = list(dict.fromkeys(name for record in self.records for name in record))
        rows = {name: [record.get(name) for record in self.records] for name in names}
        schema = {name: pl.Float64 for name in self.columns}
        with atomic_file(folder / TABLE) as temporary:
            pl.DataFrame(rows, schema_overrides=schema, strict=False).write_parquet(temporary)
        write_json(folder / DOCUMENT, self.to_json())

    def format(self) -> list[str]:
        columns = [name for name in self.columns if any(record.get(name) is not None for record in self.good)]
        widths = {column: max(10, len(column) + 2) for column in columns}
        lines = []
        if columns:
            lines.append(f"{'clip':<{_NAME_WIDTH}}" + "".join(f"{name:>{widths[name]}}" for name in columns))
            for record in self.good[:_SHOWN_ROWS]:
                name = str(record["name"])
                line = f"{name if len(name) < _NAME_WIDTH else f'...{name[4 - _NAME_WIDTH :]}':<{_NAME_WIDTH}}"
                for column in columns:
                    cell = "-" if record.get(column) is None else f"{record[column]:.4f}"
                    line += f"{cell:>{widths[column]}}"
                lines.append(line)
            if len(self.good) > _SHOWN_ROWS:
                lines.append(f"... and {len(self.good) - _SHOWN_ROWS} more")
        for name, summary in self.summaries().items():
            text = f"{name}: {summary.mean:.4f} over {summary.count} clip{'s' if summary.count > 1 else ''}"
            if summary.low is not None and summary.high is not None:
                text += f", {self.confidence:.0%} interval of the mean {summary.low:.4f} to {summary.high:.4f}"
            lines.append(text)
        lines += [
            f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.more.items()
        ]
        lines += [f"note: {note}" for note in self.notes]
        if self.bad:
            lines.append(f"{len(self.bad)} of {len(self.records)} could not be used:")
            lines += [f"  {record['error']}" for record in self.bad]
        return lines


def refuse_existing_metrics(folder: Path, *, force: bool) -> None:
    """DataError when the metrics of an earlier call would be replaced."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is a file; metrics go to a folder: choose another name")
    present = [name for name in (TABLE, DOCUMENT) if (folder / name).exists()]
    if present and not force:
        raise DataError(f"{folder / present[0]} exists; choose another folder, or replace it with --force")


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@dataclass(frozen=True)
class Summary:
    """`low` and `high` bound the mean with the given confidence; None for a single number or an infinite mean."""

    count: int
    mean: float
    std: float | None
    low: float | None
    high: float | None
    smallest: float
    largest: float


def summarise(values: Sequence[float], confidence: float = CONFIDENCE, intervals: Intervals = "student") -> Summary:
    """Of at least one number; an infinite one (the PSNR of equal clips) makes the mean infinite."""
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers) or np.isnan(numbers).any():
        raise ValueError("a mean needs at least one number, and no NaN")
    ends = float(numbers.min()), float(numbers.max())
    mean = float(numbers.mean())
    if len(numbers) < 2 or not math.isfinite(mean):
        return Summary(len(numbers), mean, None, None, None, *ends)
    std = float(numbers.std(ddof=1))
    if intervals == "bootstrap":
        return Summary(len(numbers), mean, std, *bootstrap_mean(values, confidence), *ends)
    reach = t_quantile((1 + confidence) / 2, len(numbers) - 1) * std / math.sqrt(len(numbers))
    return Summary(len(numbers), mean, std, mean - reach, mean + reach, *ends)


def bootstrap_mean(values: Sequence[float], confidence: float = CONFIDENCE, *, seed: int = 0) -> tuple[float, float]:
    """Where the mean of so many numbers, drawn from `values` with replacement, falls with this confidence.

    Of differences between two sets on the same prompts this is the paired bootstrap. The ends are a function of the
    values.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers) or not np.isfinite(numbers).all():
        raise ValueError("a bootstrap needs at least one number, and finite ones")
    generator = numpy_stream(seed, "bootstrap")
    rows = max(1, _MAX_DRAWS // len(numbers))
    means = [
        numbers[generator.integers(0, len(numbers), (min(rows, _RESAMPLES - start), len(numbers)))].mean(1)
        for start in range(0, _RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@lru_cache(maxsize=256)
def t_quantile(share: float, freedom: int) -> float:
    """Where Student's law with `freedom` degrees of freedom reaches `share`, which lies in (0.5, 1)."""
    if not 0.5 < share < 1 or freedom < 1:
        raise ValueError(f"a share in (0.5, 1) and 1 or more degrees of freedom, got {share} and {freedom}")
    if freedom > _EXPAND_FROM:
        # Cornish and Fisher's series (Abramowitz and Stegun 26.7.5).
        z = NormalDist().inv_cdf(share)
        first = (z**3 + z) / 4
        second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return z + first / freedom + second / freedom**2 + third / freedom**3
    # Between 0 and sqrt(freedom) tan(angle): with that substitution the density is a power of cos.
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        integral = float((_WEIGHTS * np.cos(angle * (_NODES + 1) / 2) ** (freedom - 1)).sum()) * angle / 2
        low, high = (angle, high) if scale * integral < share - 0.5 else (low, angle)
    return math.sqrt(freedom) * math.tan(low)
