"""The page about a set: complete, self-contained, and safe against hostile captions and names."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from frameloom.data.curation.report import bin_numbers, gather_facts
from frameloom.data.media.writing import write_image, write_video
from frameloom.evaluate.charts import draw_histogram
from frameloom.evaluate.reports import write_data_report

EVIL = '<script>alert("x")</script>" onload="y'


class Page(HTMLParser):
    VOID = ("meta", "img", "br", "line", "rect", "polyline", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(3):
        write_video(tmp_path / f"{number}.mp4", rng.integers(0, 255, (6 + number, 32, 48, 3), dtype=np.uint8), 24)
        rows.append((f"{number}.mp4", f"clip {number} {EVIL}", "video", 32, 48, 6 + number, 24.0))
    write_image(tmp_path / "a&b.png", rng.integers(0, 255, (40, 40, 3), dtype=np.uint8))
    rows.append(("a&b.png", "", "image", 40, 40, 1, None))
    rows.append(("gone.mp4", "a lost clip", "video", 32, 48, 9, 24.0))
    columns = ["path", "caption", "kind", "height", "width", "frames", "fps"]
    pl.DataFrame(rows, schema=columns, orient="row").write_parquet(tmp_path / "m.parquet")
    errors = {"row": [7], "path": [f"{EVIL}.mp4"], "reason": ["unreadable"], "stage": ["header"], "error": [EVIL]}
    pl.DataFrame(errors).write_parquet(tmp_path / "m.errors.parquet")
    return tmp_path / "m.parquet"


def make_page(manifest: Path, **options: object) -> str:
    facts = gather_facts(pl.read_parquet(manifest), manifest.parent, manifest, num_thumbs=10)
    write_data_report(facts, manifest.parent / "report.html", **options)  # type: ignore[arg-type]
    return (manifest.parent / "report.html").read_text(encoding="utf-8")


def test_page_is_well_formed_and_fetches_nothing(manifest: Path) -> None:
    page = Page(make_page(manifest))
    assert page.open == []
    assert "script" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    sources = [value for name, value in page.attributes if name in ("src", "href")]
    assert len(sources) == 4 and all(value and value.startswith("data:image/jpeg;base64,") for value in sources)
    assert EVIL in " ".join(page.words)


def test_page_tells_counts_samples_and_broken_files(manifest: Path) -> None:
    text = make_page(manifest)
    words = " ".join(Page(text).words)
    for expected in ("a&b.png", "no such file", "unreadable", "48x32, 8 frames", "frames of a video", "empty captions"):
        assert expected in words
    assert "Buckets" not in words
    assert text.count("<svg") == 6


def test_sample_follows_the_seed_and_not_the_order(manifest: Path) -> None:
    table = pl.read_parquet(manifest)

    def sample(rows: pl.DataFrame, seed: int) -> list[str]:
        facts = gather_facts(rows, manifest.parent, manifest, num_thumbs=2, seed=seed)
        return [thumb.path for thumb in facts.thumbs]

    assert sample(table, 0) == sample(table.reverse(), 0)
    assert any(sample(table, 0) != sample(table, seed) for seed in range(1, 6))


def test_rows_without_sizes_are_told_and_do_not_break_the_page(manifest: Path) -> None:
    table = pl.read_parquet(manifest).with_columns(pl.lit(None, dtype=pl.Int32).alias("height"))
    facts = gather_facts(table, manifest.parent, manifest, num_thumbs=4)
    assert facts.histograms == {} and facts.thumbs == []
    assert "5 rows have no size" in facts.notes[0]


@pytest.mark.parametrize(
    ("columns", "note"),
    [
        ({"fps": [0.0, -24.0, float("inf"), None, 24.0]}, "3 videos have no frame rate"),
        ({"height": [0, -5, 32, 40, 32]}, "2 rows have no size or length"),
        ({"width": [48] * 4 + [0], "frames": [0, 6, 7, 1, 9]}, "2 rows have no size or length"),
    ],
)
def test_numbers_that_cannot_be_right_are_told_and_left_out(
    manifest: Path, columns: dict[str, list[float]], note: str
) -> None:
    table = pl.read_parquet(manifest).with_columns(pl.Series(name, values) for name, values in columns.items())
    facts = gather_facts(table, manifest.parent, manifest, num_thumbs=4)
    assert facts.notes == [f"{note}; frameloom data scan fills them in."]
    labels = [float(bar.label) for bars in facts.histograms.values() for bar in bars]
    assert np.isfinite(labels).all() and min(labels) >= 0


def test_many_rates_from_zero_on_have_a_histogram(manifest: Path) -> None:
    rows = [(f"{number}.mp4", "a clip", "video", 32, 48, 9, float(number)) for number in range(20)]
    table = pl.DataFrame(rows, schema=pl.read_parquet(manifest).columns, orient="row")
    facts = gather_facts(table, manifest.parent, manifest, num_thumbs=0)
    assert sum(bar.num_files for bar in facts.histograms["frames per second"]) == 19


def test_bins_are_round_and_lose_nothing() -> None:
    few = bin_numbers(np.array([24.0, 24.0, 30.0]))
    assert few == [("24", 2), ("30", 1)]
    values = np.random.default_rng(1).uniform(13, 987, size=5000)
    many = bin_numbers(values)
    assert sum(bar.num_files for bar in many) == 5000
    assert len(many) <= 26
    starts = [float(bar.label) for bar in many]
    assert np.allclose(np.diff(starts), 50) and starts[0] == 0
    assert len(re.findall("<rect", draw_histogram("x", many))) == len(many)
