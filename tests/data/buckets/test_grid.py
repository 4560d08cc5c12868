from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from frameloom.core.resolutions import height_per_width, parse_resolution, size_table
from frameloom.data.buckets.grid import GridPolicy, _Cascade, apply_token_budget, build_grid, count_tokens
from frameloom.data.buckets.policy import (
    Clips,
    Pairs,
    assign,
    bucket_table,
    count_unused,
    counter_draw,
    nearest_values,
    possible_buckets,
)
from frameloom.data.manifest.manifest import Manifest, write_manifest
from frameloom.data.media.frames import sample_rate
from frameloom.models.vaes.config import LengthRule

GOLDENS = Path(__file__).parents[2] / "goldens" / "open-sora-v2"
TABLES = json.loads((GOLDENS / "resolution_tables.json").read_text())
DECISIONS = json.loads((GOLDENS / "bucket_decisions.json").read_text())


def lengths(*parts: tuple[int, int, int], images: list[object], keep: float = 1.0) -> dict[int, list[object]]:
    """Frame keys in steps of 4 with their batch size, as the published configs list them."""
    videos = {frames: [keep, size] for low, high, size in parts for frames in range(low, high + 1, 4)}
    return {1: images, **videos}


CONFIGS = {
    "demo": {"256px": {frames: [1.0, 1] for frames in (1, 33, 97, 129)}},
    "image": {"256px": {1: [1.0, 50]}, "768px": {1: [0.5, 11]}, "1024px": {1: [0.5, 7]}},
    "stage1": {
        "256px": lengths((5, 33, 12), (37, 65, 6), (69, 97, 4), (101, 129, 3), images=[1.0, 45]),
        "768px": {1: [0.5, 13]},
        "1024px": {1: [0.5, 7]},
    },
    "stage2": {
        "256px": lengths((5, 33, 14), (37, 65, 10), (73, 97, 7), (101, 129, 6), images=[1.0, 130]),
        "768px": lengths((5, 33, 6), (37, 65, 4), (69, 97, 3), (101, 129, 2), images=[1.0, 38]),
    },
    "stage2_i2v": {
        "256px": lengths((5, 33, 80), (37, 65, 40), (69, 97, 28), (101, 129, 23), images=[1.0, 195]),
        "768px": lengths((5, 33, 10), (37, 65, 5), (69, 97, 3), (101, 129, 2), images=[0.5, 38], keep=0.5),
    },
    "high_compression": {
        "768px": lengths((16, 32, 8), (36, 64, 4), (68, 96, 3), (100, 128, 2), images=[1.0, 20]),
    },
    "probabilistic": DECISIONS["configs"]["probabilistic"]["bucket_config"],
}


@pytest.mark.parametrize("case", TABLES["tables"])
def test_size_tables_equal_the_original(case: str) -> None:
    name, stride, mode = case.split("|")
    table = size_table(name, int(stride[1:]), training=mode == "training")
    wanted = TABLES["tables"][case]
    assert [[ratio, list(size)] for ratio, size in table.items()] == [list(item) for item in wanted["sizes_hw"].items()]
    assert parse_resolution(name)[0] == wanted["num_pixels"]


def test_nearest_ratio_equals_the_original() -> None:
    cases = TABLES["closest_ratio_256px_[h,w,name]"]
    table = size_table("256px", 16)
    heights, widths = np.array([case[0] for case in cases]), np.array([case[1] for case in cases])
    nearest = nearest_values([height_per_width(ratio) for ratio in table], heights / widths)
    assert [list(table)[i] for i in nearest] == [case[2] for case in cases]


@pytest.mark.parametrize("fps_max", [16, 24])
def test_frame_rate_rule_equals_the_original(fps_max: int) -> None:
    cases = [case for case in TABLES["map_target_fps_[fps,max_fps,new_fps,sampling_interval]"] if case[1] == fps_max]
    rates, intervals = sample_rate(np.array([np.nan if case[0] is None else case[0] for case in cases]), fps_max)
    assert [list(pair) for pair in zip(rates.tolist(), intervals.tolist(), strict=True)] == [case[2:] for case in cases]


def decide(config: str, fps_max: float, base_seed: int) -> list[list[object] | None]:
    """Buckets of the golden samples, with draws as the original makes them: one numpy generator per sample."""
    samples = DECISIONS["samples_[T,H,W,fps]"]
    frames, heights, widths = (np.array([sample[i] for sample in samples]) for i in range(3))
    fps = np.array([np.nan if sample[3] is None else sample[3] for sample in samples])
    draws = np.stack([np.random.default_rng(base_seed + i).random(64) for i in range(len(samples))])
    grid = build_grid(CONFIGS[config], stride=32 if config == "high_compression" else 16, fps_max=fps_max)
    clips = Clips(frames, heights, widths, fps)
    chosen = grid.assign_clips(clips, np.arange(len(samples)), lambda rows, numbers: draws[rows, numbers])
    found = [grid.buckets[i] if i >= 0 else None for i in chosen]
    return [[bucket.resolution, bucket.frames, bucket.ratio] if bucket else None for bucket in found]


@pytest.mark.parametrize("fps_max", [16, 24])
@pytest.mark.parametrize("config", CONFIGS)
def test_bucket_decisions_equal_the_original(config: str, fps_max: int) -> None:
    wanted = DECISIONS["configs"][config]["decisions"][f"fps_max={fps_max}"]
    assert decide(config, fps_max, DECISIONS["base_seed"]) == wanted


def test_bucket_decisions_need_the_right_draws() -> None:
    wanted = DECISIONS["configs"]["probabilistic"]["decisions"]["fps_max=24"]
    assert decide("probabilistic", 24, DECISIONS["base_seed"] + 1) != wanted


@pytest.mark.parametrize("config", CONFIGS)
def test_grid_holds_the_buckets_of_the_original(config: str) -> None:
    wanted = DECISIONS["configs"][config]
    grid = build_grid(CONFIGS[config], stride=32 if config == "high_compression" else 16)
    assert len(grid.buckets) == wanted["num_bucket"]
    order = {level.resolution: [length.frames for length in level.lengths] for level in grid.levels}
    assert order == wanted["search_order"]
    assert list(order) == list(wanted["search_order"])
    shapes = {(b.resolution, b.frames, b.ratio): ([b.frames, b.height, b.width], b.batch_size) for b in grid.buckets}
    for (resolution, frames, ratio), shape, batch_size in wanted["thw_of_used_buckets"]:
        assert shapes[resolution, frames, ratio] == (shape, batch_size)
    assert [bucket.index for bucket in grid.buckets] == list(range(len(grid.buckets)))


GRID = {
    "128px": {1: [0.5, 4], 17: [0.5, 2], 33: [[0.6, 0.3], 1]},
    "64px": {1: [0.7, 8], 9: [1.0, 4], 17: [[0.5, 0.5], 4], 33: [0.25, 2], 65: [[1.0, 1.0], 1]},
}


@pytest.fixture
def rows(tmp_path: Path) -> Manifest:
    """3000 made-up rows; no file is behind them."""
    draw = np.random.default_rng(0)
    num_rows = 3000
    image = draw.random(num_rows) < 0.3
    table = pl.DataFrame(
        {
            "path": [f"{i}.mp4" for i in range(num_rows)],
            "caption": ["c"] * num_rows,
            "kind": np.where(image, "image", "video").tolist(),
            "height": draw.integers(40, 250, num_rows),
            "width": draw.integers(40, 250, num_rows),
            "frames": np.where(image, 1, draw.integers(2, 100, num_rows)),
            "fps": [None if still else 30.0 for still in image],
        }
    )
    write_manifest(tmp_path / "m.parquet", table)
    return Manifest.read(tmp_path / "m.parquet")


@pytest.fixture
def grid() -> GridPolicy:
    return build_grid(GRID, stride=16, fps_max=24)


def test_assignment_is_a_function_of_seed_epoch_and_row(rows: Manifest, grid: GridPolicy) -> None:
    first = assign(rows, grid, 1, 0)
    assert np.array_equal(first, assign(rows, grid, 1, 0))
    assert not np.array_equal(first, assign(rows, grid, 2, 0))
    assert not np.array_equal(first, assign(rows, grid, 1, 1))
    some = np.array([7, 1999, 42])
    clips = Clips(*(column[some].astype(np.int64) for column in (rows.frames, rows.height, rows.width)), rows.fps[some])
    assert np.array_equal(grid.assign_clips(clips, some, counter_draw(1, 0)), first[some])


def test_assignment_does_not_depend_on_batch_sizes(rows: Manifest, grid: GridPolicy) -> None:
    doubled = {name: {key: [value[0], 2 * value[1]] for key, value in row.items()} for name, row in GRID.items()}
    other = build_grid(doubled, stride=16, fps_max=24)
    assert np.array_equal(assign(rows, grid, 3, 0), assign(rows, other, 3, 0))
    assert other.geometry() == grid.geometry()
    assert other.batch_sizes.tolist() != grid.batch_sizes.tolist()


def test_possible_buckets_are_those_that_epochs_reach(rows: Manifest, grid: GridPolicy) -> None:
    pairs = possible_buckets(rows, grid)
    possible = set(zip(pairs.rows.tolist(), pairs.buckets.tolist(), strict=True))
    reached = set()
    for epoch in range(60):
        chosen = assign(rows, grid, 5, epoch)
        reached |= {(row, int(bucket)) for row, bucket in enumerate(chosen) if bucket >= 0}
    assert reached <= possible
    # The rarest path has a chance of about 7%, so 60 epochs of 3000 rows miss next to nothing.
    assert len(possible - reached) < 0.01 * len(possible)
    assert isinstance(pairs, Pairs)
    assert np.array_equal(np.lexsort((pairs.rows, pairs.buckets)), np.arange(len(pairs.rows)))


def test_chance_zero_is_never_taken_and_chance_one_always(rows: Manifest) -> None:
    never = build_grid({"64px": {1: [0.0, 1], 9: [[1.0, 1.0], 1], 5: [0, 1]}}, stride=16)
    assert (assign(rows, never, 0, 0) == -1).all()
    assert not len(possible_buckets(rows, never).rows)
    always = build_grid({"64px": {1: [1.0, 1], 2: [1.0, 1]}}, stride=16)
    chosen = assign(rows, always, 0, 0)
    large = rows.height.astype(np.int64) * rows.width >= 0.8 * 64**2
    assert ((chosen >= 0) == large).all()


def test_taking_the_longest_at_once_equals_trying_one_after_the_other(
    rows: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"128px": {1: [0.5, 4], 17: [0.5, 2], 33: [0.0, 1]}, "64px": {1: [0.7, 8], 9: [1.0, 4], 33: [0.3, 1]}}
    grid = build_grid(plain, stride=16, fps_max=24)
    at_once = [assign(rows, grid, 4, epoch) for epoch in range(3)]
    monkeypatch.setattr(_Cascade, "_take_longest", _Cascade._try_lengths)
    assert np.array_equal(at_once, [assign(rows, grid, 4, epoch) for epoch in range(3)])
    assert not np.array_equal(at_once[0], at_once[1])


def test_table_and_reasons_add_up(rows: Manifest, grid: GridPolicy) -> None:
    chosen = assign(rows, grid, 1, 0)
    table = bucket_table(chosen, grid)
    unused = count_unused(rows, grid, chosen)
    assert sum(use.num_clips for use in table) + sum(unused.values()) == len(rows)
    assert all(use.num_batches == -(-use.num_clips // use.bucket.batch_size) for use in table)
    assert all(count > 0 for count in unused.values())


def clips(*rows: tuple[int, int, int, float]) -> Clips:
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(3)]
    return Clips(*columns, np.array([row[3] for row in rows]))


@pytest.mark.parametrize("tokens", [1, 100, 5000])
def test_token_budget_sets_the_batch_and_leaves_decisions_alone(tokens: int) -> None:
    grid = build_grid({"128px": {1: [0.5, 64], 17: [0.5, 64]}, "64px": {1: [1.0, 64], 9: [1.0, 64]}}, stride=16)
    rule = LengthRule()
    policy = apply_token_budget(grid, tokens, rule)
    for before, bucket in zip(grid.buckets, policy.buckets, strict=True):
        size = count_tokens(bucket, 16, rule)
        assert bucket.batch_size == max(1, min(64, tokens // size))
        assert (bucket.height, bucket.width, bucket.frames) == (before.height, before.width, before.frames)
    assert policy.geometry() == grid.geometry()
    assert (policy.batch_sizes != grid.batch_sizes).any() == (tokens < 5000 or (policy.batch_sizes < 64).any())
    rows = clips(*[(30, 128, 128, 24.0)] * 500)
    draws = counter_draw(4, 0)
    same = policy.assign_clips(rows, np.arange(500), draws)
    assert np.array_equal(same, grid.assign_clips(rows, np.arange(500), draws))
