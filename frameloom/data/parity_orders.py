"""Golden cases of the published samplers: which rows come in which order, and where a resumed run goes on."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frameloom.core.parity import ParityOutput, compare_facts
from frameloom.data.policies.grid import GridPolicy
from frameloom.data.policies.grid_parser import parse_grid
from frameloom.data.policies.parity_grid import numpy_draws, read_draws, to_clips
from frameloom.data.policies.ratios import RATIO_TABLE, nearest_values
from frameloom.data.published_orders import GridBatches, RatioBuckets, deal_batches, group_by_shape

_RESUME = re.compile(r"resume_after_(\d+)")
_SET_STEP = re.compile(r"set_step_(\d+)_epoch_(\d+)")


def compare_grouped(case: dict[str, Any]) -> Iterator[ParityOutput]:
    """Open-Sora-Plan 1.3."""
    for number, entry in enumerate(case["cases"]):
        batch_size, world_size = entry["batch_size"], entry["world_size"]
        num_skipped = entry["initial_global_step"] * entry["gradient_accumulation_steps"]
        order = group_by_shape(
            [tuple(shape) for shape in entry["samples_thw"]],
            batch_size=batch_size,
            world_size=world_size,
            is_grouped=entry["group_data"],
            num_skipped=num_skipped,
            seed=entry["torch_generator_seed"],
            pads=random.Random(entry["python_random_seed"]),
        )
        yield compare_facts(f"order {number}", order, entry["order"])
        dealt = deal_batches(order, batch_size=batch_size, world_size=world_size)
        yield compare_facts(f"batches of each process {number}", dealt, entry["per_rank_batches"])
        num_rows = len(entry["samples_thw"]) - num_skipped * batch_size * world_size
        yield compare_facts(f"length {number}", num_rows, entry["sampler_len"])


def compare_ratio_buckets(case: dict[str, Any]) -> Iterator[ParityOutput]:
    """CogVideoX-Fun."""
    groups = [_group_of(row) for row in case["dataset"]]
    batch_size, seed = case["batch_size"], case["seed"]
    walk = RatioBuckets(groups, batch_size, seed)
    for entry in case["epochs"]:
        epoch = entry["epoch"]
        yield compare_facts(f"permutation of epoch {epoch}", walk.permutation(epoch), entry["permutation"])
        yield compare_facts(f"batches of epoch {epoch}", list(walk.batches(epoch)), entry["batches"])
        wanted = {
            (kind, float(ratio)): rows
            for kind, ratios in entry["left_in_buckets_after"].items()
            for ratio, rows in ratios.items()
        }
        yield compare_facts(f"left after epoch {epoch}", walk.waiting, wanted)
    resumed, place = case["resume"], case["resume"]["_pos_start"]
    again = RatioBuckets(groups, batch_size, resumed["generator_seed"])
    yield compare_facts(f"resumed at {place}", list(again.batches(0, start=place)), resumed["batches"])
    by_kind = RatioBuckets([row.get("type", "image") for row in case["dataset"]], batch_size, seed)
    yield compare_facts("by kind alone", list(by_kind.batches(0)), case["image_video_sampler_without_buckets"])
    dropped = [row for row, group in enumerate(groups) if group is None]
    yield compare_facts("rows without a size", dropped, case["dropped_because_size_unreadable"])
    yield compare_facts("reported length", len(groups) // batch_size, case["len_of_batch_sampler"])


def _group_of(row: dict[str, Any]) -> tuple[str, float] | None:
    """Kind and nearest ratio; None for a row whose size is not known. Sizes stand there as text too."""
    if not {"height", "width"} <= row.keys():
        return None
    table = list(RATIO_TABLE)
    nearest = nearest_values(table, np.array([float(row["height"]) / float(row["width"])]))
    return row.get("type", "image"), table[int(nearest[0])]


def compare_grid_batches(case: dict[str, Any]) -> Iterator[ParityOutput]:
    """Open-Sora 2.0."""
    clips = to_clips([row[1:] for row in case["metadata_rows"]])
    grid = parse_grid(case["bucket_config"], stride=16, fps_max=case["fps_max"])
    rows = np.arange(len(clips.frames))
    for name, variant in case["variants"].items():
        chosen: list[NDArray[np.int32]] = []
        for epoch in range(2):
            draws = numpy_draws(case["seed"] + epoch + rows * variant["num_bucket"])
            chosen.append(grid.assign_clips(clips, rows, read_draws(draws)))
        settings = {"shuffle": name.startswith("shuffle"), "drop_last": name.endswith("droplast")}
        plans = [
            GridBatches(one.tolist(), grid.batch_sizes.tolist(), case["world_size"], case["seed"], **settings)
            for one in chosen
        ]
        yield compare_facts(f"{name} buckets", len(grid.buckets), variant["num_bucket"])
        total = plans[0].num_batches()
        yield compare_facts(
            f"{name} batches", [total, total // case["num_groups"]], [variant["num_total_batch"], variant["len"]]
        )
        yield from _compare_ranks(name, grid, chosen, plans, variant["per_rank"])


def _compare_ranks(
    name: str, grid: GridPolicy, chosen: list[NDArray[np.int32]], plans: list[GridBatches], ranks: list[dict[str, Any]]
) -> Iterator[ParityOutput]:
    def follow(epoch: int, rank: int, start: int = 0) -> list[list[str]]:
        steps = plans[epoch].steps(epoch, start=start)
        return [[_describe(grid, chosen[epoch], row) for row in step[rank]] for step in steps]

    for rank, entry in enumerate(ranks):
        for epoch, wanted in enumerate(entry["epochs"]):
            yield compare_facts(f"{name} rank {rank} epoch {epoch}", follow(epoch, rank), wanted)
        for key, wanted in entry.items():
            if found := _RESUME.fullmatch(key):
                state = wanted["state_dict"]
                step, epoch = int(found[1]), state["epoch"]
                place = {"seed": plans[epoch].seed, "epoch": epoch, "last_micro_batch_access_index": step * len(ranks)}
                yield compare_facts(f"{name} rank {rank} {key} state", place, state)
                yield compare_facts(f"{name} rank {rank} {key}", follow(epoch, rank, step), wanted["rest"])
            elif found := _SET_STEP.fullmatch(key):
                yield compare_facts(f"{name} rank {rank} {key}", follow(int(found[2]), rank, int(found[1])), wanted)


def _describe(grid: GridPolicy, chosen: NDArray[np.int32], row: int) -> str:
    bucket = grid.buckets[chosen[row]]
    return f"{row}-{bucket.frames}-{bucket.height}-{bucket.width}"
