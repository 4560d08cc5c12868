"""Two sets of clips: pairing, misfits, tables, and distances of whole sets."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from frameloom.core.errors import DataError
from frameloom.data.loading.clip_view import ClipView, list_clips
from frameloom.data.media.writing import write_image
from frameloom.evaluate.comparison import Distances, compare_sets, pair_clips
from frameloom.evaluate.metric_table import refuse_existing_metrics
from frameloom.evaluate.pair_metrics import Measures, build_measures


def write_set(folder: Path, names: dict[str, int], *, side: int = 16) -> Path:
    """Gray pictures of the given brightness."""
    for name, level in names.items():
        write_image(folder / f"{name}.png", np.full((side, side, 3), level, dtype=np.uint8))
    return folder


def test_pairs_by_name_are_measured_and_the_rest_is_listed(tmp_path: Path) -> None:
    ours = write_set(tmp_path / "ours", {"a": 110, "b": 100, "only": 5})
    reference = write_set(tmp_path / "reference", {"a": 100, "b": 100, "other": 7})
    pairs = pair_clips(list_clips(ours), list_clips(reference), "name")
    table = compare_sets(pairs, build_measures(["psnr"]), view=ClipView())
    found = {record["name"]: record["psnr_db"] for record in table.good}
    assert found["a"] == pytest.approx(20 * math.log10(255 / 10), abs=1e-3) and found["b"] == math.inf
    assert {record["name"] for record in table.bad} == {"only", "other"}
    assert any("no reference clip" in line for line in table.format())


def test_order_pairs_what_names_do_not(tmp_path: Path) -> None:
    ours = list_clips(write_set(tmp_path / "ours", {"a": 110, "b": 120}))
    reference = list_clips(write_set(tmp_path / "reference", {"x": 100, "y": 100}))
    with pytest.raises(DataError, match="--pairs order"):
        pair_clips(ours, reference, "name")
    table = compare_sets(pair_clips(ours, reference, "order"), build_measures(["psnr"]), view=ClipView())
    assert [round(record["psnr_db"], 2) for record in table.good] == [28.13, 22.11]
    with pytest.raises(DataError, match="2 generated and 1 reference"):
        pair_clips(ours, reference[:1], "order")


def test_clips_of_other_sizes_are_told_how_to_be_compared(tmp_path: Path) -> None:
    ours = list_clips(write_set(tmp_path / "ours", {"a": 110, "b": 1}))
    reference = list_clips(write_set(tmp_path / "reference", {"a": 100, "b": 1}, side=32))
    pairs = pair_clips(ours, reference, "name")
    table = compare_sets(pairs, build_measures(["psnr"]), view=ClipView())
    assert "16x16 generated and 32x32" in table.bad[0]["error"]
    with pytest.raises(DataError, match="none of 2"):
        table.refuse_empty()
    scaled = compare_sets(pairs, build_measures(["psnr"]), view=ClipView(height=16, width=16))
    assert len(scaled.good) == 2


def test_tables_are_written_complete_with_summary(tmp_path: Path) -> None:
    levels = {"a": 110, "b": 90, "c": 105}
    ours = list_clips(write_set(tmp_path / "ours", levels))
    reference = list_clips(write_set(tmp_path / "reference", dict.fromkeys(levels, 100)))
    table = compare_sets(pair_clips(ours, reference, "name"), build_measures(["psnr"]), view=ClipView())
    table.write(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "metrics.json").read_text())
    rows = pl.read_parquet(tmp_path / "out" / "metrics.parquet")
    assert rows["name"].to_list() == ["a", "b", "c"]
    summary = written["summary"]["psnr_db"]
    assert summary["mean"] == pytest.approx(rows["psnr_db"].mean())
    assert summary["low"] < summary["mean"] < summary["high"] and summary["count"] == 3
    with pytest.raises(DataError, match="--force"):
        refuse_existing_metrics(tmp_path / "out", force=False)


def test_infinite_numbers_stay_readable_json(tmp_path: Path) -> None:
    same = list_clips(write_set(tmp_path / "same", {"a": 1, "b": 2}))
    table = compare_sets(pair_clips(same, same, "name"), build_measures(["psnr"]), view=ClipView())
    table.write(tmp_path / "out")
    text = (tmp_path / "out" / "metrics.json").read_text()
    assert "Infinity" not in text and json.loads(text)["summary"]["psnr_db"]["mean"] == "inf"


def test_sets_without_pairs_have_distances(tmp_path: Path) -> None:
    ours = list_clips(write_set(tmp_path / "ours", {"a": 100, "b": 110, "c": 120}))
    reference = list_clips(write_set(tmp_path / "reference", {"x": 100, "y": 110, "z": 120}))
    brighter = list_clips(write_set(tmp_path / "brighter", {"x": 200, "y": 210, "z": 220}))
    equal, apart = (
        compare_sets(pair_clips(ours, other, "none"), Measures({}), view=ClipView(), distances=Distances(pixels=True))
        for other in (reference, brighter)
    )
    assert equal.more["frechet_pixels"] == pytest.approx(0, abs=1e-9) and equal.more["frechet_pixels_clips"] == 3
    # The same spread, 100 levels brighter in each of the 96 numbers.
    assert apart.more["frechet_pixels"] == pytest.approx(96 * (100 / 127.5) ** 2, rel=1e-4)
    assert any("no FVD" in note for note in equal.notes)


def test_features_of_a_network_give_fvd(tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(8, 4))
    np.save(tmp_path / "ours.npy", features)
    np.save(tmp_path / "theirs.npy", features + np.array([3, 0, 4, 0]))
    files = (tmp_path / "ours.npy", tmp_path / "theirs.npy")
    table = compare_sets([], Measures({}), view=ClipView(), distances=Distances(clips=files))
    assert table.more["fvd"] == pytest.approx(25.0) and table.more["fvd_clips"] == 8
    frames = compare_sets([], Measures({}), view=ClipView(), distances=Distances(frames=files))
    assert frames.more["fid"] == pytest.approx(25.0) and frames.more["fid_frames"] == 8 and "fvd" not in frames.more
