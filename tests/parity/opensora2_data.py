"""Golden cases of Open-Sora 2.0's data: resolution tables, buckets, batches, transforms, metadata of clips."""

from __future__ import annotations

import csv
import io
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from frameloom.core.errors import DataError
from frameloom.core.resolutions import ASPECT_RATIOS, height_per_width, parse_resolution, size_table
from frameloom.data.buckets.grid import GridPolicy, build_grid
from frameloom.data.buckets.policy import UNUSED, Clips, Draw, nearest_values
from frameloom.data.media.frames import FrameRule, Window, sample_rate, select_frames
from frameloom.data.media.probe import probe_header
from frameloom.data.media.transforms import cover_rule
from frameloom.data.order.plan import plan_epoch
from tests.parity.cases import (
    Found,
    ParityCase,
    ParityOutput,
    compare_facts,
    compare_numbers,
    golden,
    golden_table,
    leave_out,
)

# Shares of the published configs that are not 1.
_SHARES: dict[str, dict[str, float]] = {
    "image": {"768px": 0.5, "1024px": 0.5},
    "stage1": {"768px": 0.5, "1024px": 0.5},
    "stage2_i2v": {"768px": 0.5},
}
_STRIDES = {"high_compression": 32}
_MAX_DRAWS = 64
_SIZE_STEP = 16
# Lengths of two published configs that a table names without showing them.
_LENGTHS = {
    "demo": {"256px": [129, 97, 33, 1]},
    "stage1": {"1024px": [1], "768px": [1], "256px": [1, *range(5, 130, 4)]},
}


@golden_table("tables", "bucket_to_shapes_lengths")
def compare_tables(case: dict[str, Any]) -> Found:
    for name, wanted in case["tables"].items():
        resolution, stride, mode = name.split("|")
        table = size_table(resolution, int(stride[1:]), training=mode == "training")
        yield compare_facts(f"{name} ratios", list(table), list(wanted["sizes_hw"]))
        yield name, list(table.values()), list(wanted["sizes_hw"].values())
        yield f"{name} budget", parse_resolution(resolution)[0], wanted["num_pixels"]
    yield compare_facts("ratios", list(ASPECT_RATIOS), case["ASPECT_RATIO_LD_LIST_width:height"])
    yield from _compare_nearest(case)
    rows = case["sanitized_inference_sizes_[resolution,aspect,height,width]"]
    ours = [size_table(resolution, 16, training=False)[ratio] for resolution, ratio, *_ in rows]
    rounded = [[-(-side // _SIZE_STEP) * _SIZE_STEP for side in size] for size in ours]
    yield "inference sizes", rounded, [row[2:] for row in rows]
    for name, count in case["bucket_to_shapes_lengths"].items():
        if name not in _LENGTHS:
            yield ParityOutput(f"buckets of {name}", None, torch.zeros(0), 0.0, "the table does not show its lengths")
            continue
        grid = build_grid(_published(name, _LENGTHS[name]), stride=16, fps_max=24.0)
        yield f"buckets of {name}", len(grid.buckets), count
    for fps_max in sorted({row[1] for row in case["map_target_fps_[fps,max_fps,new_fps,sampling_interval]"]}):
        rows = [row for row in case["map_target_fps_[fps,max_fps,new_fps,sampling_interval]"] if row[1] == fps_max]
        rates, intervals = sample_rate(_to_fps([row[0] for row in rows]), fps_max)
        yield f"frame rate up to {fps_max}", np.stack([rates, intervals], axis=1), [row[2:] for row in rows]


def _compare_nearest(case: dict[str, Any]) -> Found:
    for key, rows in case.items():
        if found := re.fullmatch(r"closest_ratio_(\w+)_\[h,w,name\]", key):
            table = size_table(found[1], 16)
            wanted_ratios = np.array([row[0] / row[1] for row in rows])
            nearest = nearest_values([height_per_width(ratio) for ratio in table], wanted_ratios)
            yield f"closest ratio {found[1]}", nearest.tolist(), [list(table).index(row[2]) for row in rows]


@golden_table("configs", "samples_[T,H,W,fps]")
def compare_decisions(case: dict[str, Any]) -> Found:
    clips = to_clips(case["samples_[T,H,W,fps]"])
    rows = np.arange(len(clips.frames))
    draws = numpy_draws(case["base_seed"] + rows)
    for name, config in case["configs"].items():
        raw = config.get("bucket_config") or _published(name, config["search_order"])
        for setting, wanted in config["decisions"].items():
            grid = build_grid(raw, stride=_STRIDES.get(name, 16), fps_max=float(setting.split("=")[1]))
            chosen = grid.assign_clips(clips, rows, read_draws(draws))
            names = {(bucket.resolution, bucket.frames, bucket.ratio): bucket.index for bucket in grid.buckets}
            yield f"{name} {setting}", chosen, [UNUSED if key is None else names[tuple(key)] for key in wanted]
        yield f"{name} buckets", len(grid.buckets), config["num_bucket"]
        used = [(grid.buckets[names[tuple(key)]], shape, batch) for key, shape, batch in config["thw_of_used_buckets"]]
        shapes = [[bucket.frames, bucket.height, bucket.width] for bucket, *_ in used]
        yield f"{name} shapes", shapes, [shape for _, shape, _ in used]
        if "bucket_config" in config:
            yield f"{name} batch sizes", [bucket.batch_size for bucket, *_ in used], [batch for *_, batch in used]


@golden_table("bucket_config", "metadata_rows", "variants")
def compare_batches(case: dict[str, Any]) -> Found:
    """The shape of every clip that the sampler hands out, how many come at once, and how many batches there are.

    Which clip comes when is another function in our plan, which does not depend on the number of processes.
    """
    clips = to_clips([row[1:] for row in case["metadata_rows"]])
    grid = build_grid(case["bucket_config"], stride=16, fps_max=case["fps_max"])
    rows = np.arange(len(clips.frames))
    for name, variant in case["variants"].items():
        yield compare_facts(f"{name} buckets", len(grid.buckets), variant["num_bucket"])
        for epoch in range(min(len(rank["epochs"]) for rank in variant["per_rank"])):
            draws = numpy_draws(case["seed"] + epoch + rows * variant["num_bucket"])
            chosen = grid.assign_clips(clips, rows, read_draws(draws))
            if not epoch:
                # Published batches are counted in the first epoch, and without those that are not full.
                plan = plan_epoch(chosen, grid.batch_sizes, grid.costs, seed=0, epoch=0, drop_last=True)
                yield compare_facts(f"{name} batches", plan.num_microbatches, variant["num_total_batch"])
            # A bucket that cannot fill its last batch hands out an empty one.
            batches = [batch for rank in variant["per_rank"] for batch in rank["epochs"][epoch] if batch]
            shapes = [[int(part) for part in item.split("-")] for batch in batches for item in batch]
            yield f"{name} epoch {epoch} shapes", [_shape(grid, chosen, row) for row, *_ in shapes], shapes
            first = [int(batch[0].split("-")[0]) for batch in batches]
            sizes = grid.batch_sizes[chosen[np.array(first, dtype=np.int64)]]
            yield f"{name} epoch {epoch} batches", sizes, [len(batch) for batch in batches]
        for rank, entry in enumerate(variant["per_rank"]):
            for epoch in range(len(entry["epochs"])):
                yield leave_out(f"{name} rank {rank} epoch {epoch}", "published-orders")
            for key in entry:
                if key != "epochs":
                    yield leave_out(f"{name} rank {rank} {key}", "published-orders")


def _shape(grid: GridPolicy, chosen: NDArray[np.int32], row: int) -> list[int]:
    bucket = grid.buckets[chosen[row]]
    return [row, bucket.frames, bucket.height, bucket.width]


@golden_table("resize_crop_[h,w,target_h,target_w,resize_hw,crop_i_j_h_w]")
def compare_transforms(case: dict[str, Any]) -> Found:
    key = "temporal_crop_[frames,num_frames,interval,python_seed,indices(first3,last3),first,last]"
    ours, wanted = [], []
    for frames, count, interval, seed, indices, first, final in case[key]:
        last = max(0, frames - count * interval - 1)
        # The original's start as the uniform draw that leads to it.
        draw = (random.Random(seed).randint(0, last) + 0.5) / (last + 1)
        rule = FrameRule(skip_last_start=True)
        found = select_frames(
            Window(0, frames), count, fps=24, interval=interval, rule=rule, start_rule="random", draw=draw
        )
        ours.append([*found[:3].tolist(), *found[-3:].tolist(), int(found[0]), int(found[-1])])
        wanted.append([*indices[:3], *indices[-3:], first, final])
    yield "temporal crop", ours, wanted
    rows = case["resize_crop_[h,w,target_h,target_w,resize_hw,crop_i_j_h_w]"]
    places = [cover_rule(*row[2:4])(*row[:2]) for row in rows]
    yield "resize", [place[:2] for place in places], [row[4] for row in rows]
    crops = [[*place[2:], *row[2:4]] for place, row in zip(places, rows, strict=True)]
    yield "crop", crops, [row[5] for row in rows]


def _published(name: str, search_order: Mapping[str, list[int]]) -> dict[str, dict[int, list[float]]]:
    shares = _SHARES.get(name, {})
    return {
        resolution: {frames: [shares.get(resolution, 1.0), 1] for frames in lengths}
        for resolution, lengths in search_order.items()
    }


def numpy_draws(seeds: NDArray[np.int64]) -> NDArray[np.float64]:
    """The original makes one numpy generator for each sample and epoch."""
    return np.stack([np.random.default_rng(int(seed)).random(_MAX_DRAWS) for seed in seeds])


def read_draws(draws: NDArray[np.float64]) -> Draw:
    return lambda rows, numbers: draws[rows, numbers]


def to_clips(samples: list[list[Any]]) -> Clips:
    frames, height, width = (np.array([sample[i] for sample in samples], dtype=np.int64) for i in range(3))
    return Clips(frames, height, width, _to_fps([sample[3] for sample in samples]))


def _to_fps(values: list[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


_NUMBERS = ("height", "width", "fps", "num_frames", "aspect_ratio", "resolution")


@golden(lambda case: {"input_csv", "output_csv", "rows"} <= case.config.keys())
def run_columns(case: ParityCase) -> list[ParityOutput]:
    assert case.path is not None
    rows, results = case.config["rows"], []
    facts = {row["path"]: _read_facts(_find_clip(case.path, row["path"])) for row in rows}
    for row in rows:
        ours = [facts[row["path"]][name] for name in _NUMBERS]
        results.append(compare_numbers(row["path"], ours, [row[name] for name in _NUMBERS], 1e-12))
    given = list(csv.DictReader(io.StringIO(case.config["input_csv"])))
    table = list(csv.DictReader(io.StringIO(case.config["output_csv"])))
    results.append(compare_facts("columns", [*given[0], *_NUMBERS], case.config["columns"]))
    ours_table = [{**row, **{name: str(facts[row["path"]][name]) for name in _NUMBERS}} for row in given]
    results.append(compare_facts("table", ours_table, table))
    counts = {entry["file"]: entry["frames_written"] for entry in case.config.get("encoded", [])}
    ours_counts = {name: facts[name]["num_frames"] for name in counts}
    return [*results, compare_facts("frames that were written", ours_counts, counts)]


def _find_clip(table: Path, name: str) -> Path:
    found = next((path for path in sorted(table.parent.rglob(Path(name).name)) if path.is_file()), None)
    if found is None:
        raise DataError(f"{table}: the clip {name} is not beside it; copy the folder of clips as well")
    return found


def _read_facts(path: Path) -> dict[str, Any]:
    facts = probe_header(path)
    fps = None if facts.fps is None else round(facts.fps, 3)
    return {
        "height": facts.height,
        "width": facts.width,
        "fps": fps,
        "num_frames": facts.frames,
        "aspect_ratio": facts.height / facts.width,
        "resolution": facts.height * facts.width,
    }
