"""Statistics of a list of clips for its report page: counts, histograms, sampled thumbnails and broken files."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from PIL import Image

from frameloom.core.errors import DataError
from frameloom.core.random import key, uniform_at
from frameloom.data.curation.scan import errors_path, fold_members, member_of, path_codes
from frameloom.data.media.decode import read_clip, read_image
from frameloom.data.media.tar_members import find_media

THUMB_PX = 192  # of the longer side
_MAX_BARS = 24
_NUM_BROKEN = 200
_NUM_CAPTIONS = 5


class Bar(NamedTuple):
    label: str
    num_files: int


class Thumb(NamedTuple):
    """One file of the sample; `jpeg` is None when it could not be read, `note` then says why."""

    path: str
    caption: str
    note: str
    jpeg: bytes | None


@dataclass(frozen=True)
class SetFacts:
    """All that the page needs; no part of it is larger than a page can show."""

    title: str
    totals: dict[str, str]
    histograms: dict[str, list[Bar]]
    thumbs: list[Thumb]
    longest_captions: list[str]
    broken_counts: list[Bar]
    broken: list[tuple[str, str, str]]
    """(path, reason, detail)"""
    num_broken: int
    notes: list[str] = field(default_factory=list)


def gather_facts(table: pl.DataFrame, root: Path, manifest: Path, *, num_thumbs: int, seed: int = 0) -> SetFacts:
    """Look at the table, decode a picture of `num_thumbs` files, read the lists of broken files beside `manifest`."""
    broken = read_broken(manifest)
    known = table.filter(pl.all_horizontal(pl.col("height", "width", "frames") > 0))
    counts = broken["reason"].value_counts().sort(["count", "reason"], descending=[True, False])
    shown = _sample(fold_members(known), num_thumbs, seed)
    captions = table.select(pl.col("caption").fill_null("")).unique()
    longest = captions.sort(pl.col("caption").str.len_chars(), descending=True).head(_NUM_CAPTIONS)["caption"]
    # The sizes in a list need not be complete; rows without them are in no histogram.
    num_videos = known.filter(pl.col("kind") == "video").height
    without = {"rows have no size or length": table.height - known.height}
    without["videos have no frame rate"] = num_videos - _with_rate(known).height
    return SetFacts(
        title=manifest.name,
        totals=_count_totals(table, known, broken),
        histograms=_make_histograms(known),
        thumbs=[make_thumb(row, root) for row in shown.iter_rows(named=True)],
        longest_captions=longest.to_list(),
        broken_counts=[Bar(reason, count) for reason, count in counts.iter_rows()],
        broken=broken.head(_NUM_BROKEN).rows(),
        num_broken=broken.height,
        notes=[f"{count:,} {what}; frameloom data scan fills them in." for what, count in without.items() if count],
    )


def _with_rate(known: pl.DataFrame) -> pl.DataFrame:
    fps = pl.col("fps")
    return known.filter((pl.col("kind") == "video") & (fps > 0) & fps.is_finite())


def read_broken(manifest: Path) -> pl.DataFrame:
    """(path, reason, detail) from the lists that `data scan` and `data check` write beside their output."""
    names = {"path": pl.String, "reason": pl.String, "detail": pl.String}
    tables = [pl.DataFrame(schema=names)]
    for path, detail in ((errors_path(manifest), "error"), (manifest.with_suffix(".reasons.parquet"), "detail")):
        if path.exists():
            try:
                found = pl.read_parquet(path).select("path", "reason", pl.col(detail).alias("detail"))
            except (pl.exceptions.PolarsError, OSError) as error:
                raise DataError(f"{path}: not a list of broken files ({error}); scan or check again") from error
            tables.append(found.cast(names))  # type: ignore[arg-type]
    return pl.concat(tables)


def _count_totals(table: pl.DataFrame, known: pl.DataFrame, broken: pl.DataFrame) -> dict[str, str]:
    videos = _with_rate(known)
    hours = float((videos["frames"] / videos["fps"]).sum() or 0) / 3600
    kinds = dict(table["kind"].fill_null("unknown").value_counts().iter_rows())
    empty = int((table["caption"].fill_null("").str.strip_chars() == "").sum())
    totals = {
        "rows": f"{table.height:,}",
        "videos": f"{kinds.get('video', 0):,}",
        "images": f"{kinds.get('image', 0):,}",
    }
    totals["of video"] = f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"
    if empty:
        totals["empty captions"] = f"{empty:,}"
    if broken.height:
        totals["broken or left out"] = f"{broken.height:,}"
    return totals


def _make_histograms(known: pl.DataFrame) -> dict[str, list[Bar]]:
    if not known.height:
        return {}
    height, width = known["height"].to_numpy().astype(np.float64), known["width"].to_numpy().astype(np.float64)
    words = known["caption"].fill_null("").str.count_matches(r"\S+").to_numpy()
    videos = _with_rate(known)
    made = {
        "size (square root of the pixels)": bin_numbers(np.sqrt(height * width)),
        "width / height": bin_numbers(width / height),
        "words in a caption": bin_numbers(words.astype(np.float64)),
    }
    if videos.height:
        frames, fps = videos["frames"].to_numpy().astype(np.float64), videos["fps"].to_numpy()
        made["frames of a video"] = bin_numbers(frames)
        made["seconds of a video"] = bin_numbers(frames / fps)
        made["frames per second"] = bin_numbers(fps)
    return made


def bin_numbers(values: NDArray[np.float64], max_bars: int = _MAX_BARS) -> list[Bar]:
    """Bars from small to large: one per value when there are few different ones, else equal steps of a round size."""
    different, counts = np.unique(values.round(3), return_counts=True)
    if len(different) <= max_bars // 2:
        return [Bar(f"{value:.4g}", int(count)) for value, count in zip(different, counts, strict=True)]
    low, high = float(different[0]), float(different[-1])
    # The smallest of 1, 2, 5, 10, 20 ... (times any power of ten) that is not below this.
    least = (high - low) / max_bars
    power = 10.0 ** np.floor(np.log10(least))
    step = float(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least))
    first = np.floor(low / step)
    counts = np.bincount((np.floor(values / step) - first).astype(np.int64))
    starts = (first + np.arange(len(counts))) * step
    return [Bar(f"{start:.6g}", int(count)) for start, count in zip(starts, counts, strict=True)]


def _sample(known: pl.DataFrame, count: int, seed: int) -> pl.DataFrame:
    """The files with the smallest draws: the same ones whatever the order of the table."""
    draws = uniform_at(key(seed, "report thumbnails"), path_codes(known["path"]))
    chosen = known.with_columns(draw=pl.Series(draws)).unique("path", keep="first", maintain_order=True)
    return chosen.sort("draw").head(count)


def make_thumb(row: dict[str, Any], root: Path) -> Thumb:
    """A picture of one row of a folded table (see `fold_members`): its middle frame."""
    path, caption = str(row["path"]), str(row["caption"] or "")
    height, width, frames = (int(str(row[name])) for name in ("height", "width", "frames"))
    note = f"{width}x{height}"
    if row["kind"] == "video":
        note += f", {frames} frames"
    scale = THUMB_PX / max(height, width)
    thumb_height, thumb_width = max(1, round(height * scale)), max(1, round(width * scale))
    try:
        file = find_media(root, path, member_of(row))
        if row["kind"] == "video":
            middle = int(str(row.get("start_frame") or 0)) + frames // 2
            pixels = read_clip(file, indices=[middle], height=thumb_height, width=thumb_width)
        else:
            pixels = read_image(file, height=thumb_height, width=thumb_width)
    except (DataError, OSError) as error:
        return Thumb(path, caption, str(error), None)
    buffer = io.BytesIO()
    Image.fromarray(pixels[:, 0].permute(1, 2, 0).numpy()).save(buffer, format="JPEG", quality=85)
    return Thumb(path, caption, note, buffer.getvalue())
