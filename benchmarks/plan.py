"""The plan of an epoch for ten million rows: processor time, memory, look-ups, and how even its steps are.

The clips are made up after the Pexels videos (sizes, lengths, frame rates), the buckets are those of Open-Sora 2.0's
second stage (858 shapes, batch sizes from 2 to 195). Costs are taken in a process of their own: assignment of buckets
and order, as a run pays for them at the start of an epoch. The plain way is a function applied to the rows of a pandas
table, as the originals build their buckets, on fewer of the same rows, scaled: it is linear in rows.

A hundred million rows: ten million are the tenth that is measured. Every pass over rows is linear but the sort inside
a bucket, which compares log2(n) times: 27 instead of 24, so a row costs at most an eighth more. What is kept per row
is one 32-bit number in the plan and one in the assignment, row numbers fitting 32 bits up to two thousand million;
the passes need about 15 bytes more for a while, and the buckets of a chunk a constant 0.2 GB. Geometry (20 bytes a
row) can stay a memory-mapped shard: it is read in chunks of a million rows.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import BenchSettings, MissingBaseline, Row, compare_numbers, load_baseline, measure_or_skip
from frameloom.core.random import numpy_stream
from frameloom.data.buckets.grid import GridPolicy, build_grid
from frameloom.data.buckets.policy import assign
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.order.plan import COST_GROUP, BatchPlan, plan_epoch

NUM_ROWS = 10_000_000
PLAIN_ROWS = 50_000
# height, width, share: landscape 1080 and 4K lead, then upright phones, then a tail of everything
_SIZES = (
    *((1080, 1920, 0.42), (2160, 3840, 0.20), (1920, 1080, 0.12), (720, 1280, 0.05), (3840, 2160, 0.05)),
    *((1440, 2560, 0.03), (2160, 4096, 0.03), (1280, 720, 0.02), (1080, 1080, 0.02), (1350, 1080, 0.01)),
    *((960, 540, 0.01), (540, 960, 0.01), (1152, 2048, 0.01), (480, 854, 0.01), (360, 640, 0.01)),
)
_RATES = ((23.976, 0.15), (24, 0.1), (25, 0.27), (29.97, 0.2), (30, 0.08), (50, 0.1), (59.94, 0.07), (60, 0.03))
_VAE_STRIDES, _PATCH = (4, 8, 8), 2


@dataclass(frozen=True)
class Columns:
    """Stands in for a manifest of `len(frames)` rows whose paths and captions nobody asks for."""

    frames: NDArray[np.int32]
    height: NDArray[np.int32]
    width: NDArray[np.int32]
    fps: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.frames)


def make_mix(num_rows: int, seed: int = 0) -> Columns:
    """Sizes, lengths and rates as on Pexels: a long tail of lengths, half of the clips cut to scenes, some images."""
    draw = numpy_stream(seed, "bench mix")
    sizes, rates = np.array(_SIZES), np.array(_RATES)
    kinds = draw.choice(len(sizes), num_rows, p=sizes[:, 2] / sizes[:, 2].sum()).astype(np.int8)
    height, width = sizes[:, 0].astype(np.int32)[kinds], sizes[:, 1].astype(np.int32)[kinds]
    fps = rates[:, 0][draw.choice(len(rates), num_rows, p=rates[:, 1]).astype(np.int8)]
    frames = (np.exp(draw.normal(2.4, 0.6, num_rows)) * fps).astype(np.int32)
    is_cut = draw.random(num_rows, dtype=np.float32) < 0.5
    frames[is_cut] = draw.integers(5, 200, int(is_cut.sum()), dtype=np.int32)
    is_image = draw.random(num_rows, dtype=np.float32) < 0.1
    frames[is_image], fps[is_image] = 1, np.nan
    return Columns(frames, height, width, fps)


def make_grid() -> GridPolicy:
    """Open-Sora 2.0's stage 2 with image conditions: 256px and 768px, 5 to 129 frames, half of what fits at 768px."""
    lengths = range(5, 130, 4)
    small = {frames: [1.0, (80, 40, 28, 23)[(frames - 2) // 32]] for frames in lengths}
    large = {frames: [0.5, (10, 5, 3, 2)[(frames - 2) // 32]] for frames in lengths}
    return build_grid({"256px": {1: [1.0, 195], **small}, "768px": {1: [0.5, 38], **large}}, stride=16, fps_max=24)


def count_tokens(grid: GridPolicy) -> NDArray[np.float64]:
    """Tokens of a clip of each bucket for a causal autoencoder with strides 4, 8, 8 and patches of 2."""
    area = _VAE_STRIDES[1] * _VAE_STRIDES[2] * _PATCH**2
    return np.array([(1 + (b.frames - 1) // _VAE_STRIDES[0]) * b.height * b.width / area for b in grid.buckets])


def make_plan(
    columns: Columns, grid: GridPolicy, *, seed: int = 0, epoch: int = 0, cost_group: int = COST_GROUP
) -> BatchPlan:
    assignment = assign(cast(Manifest, columns), grid, seed, epoch)
    return plan_epoch(assignment, grid.batch_sizes, count_tokens(grid), seed=seed, epoch=epoch, cost_group=cost_group)


@dataclass(frozen=True)
class Balance:
    """Tokens of the largest rank over the mean: of all steps together, and the share of steps above 1.05."""

    num_ranks: int
    num_steps: int
    ratio: float
    worst: float
    share_uneven: float


def measure_balance(plan: BatchPlan, tokens: NDArray[np.float64], num_ranks: int) -> Balance:
    """Over the whole steps of an epoch; a run is as slow as the sum of its slowest ranks."""
    each = np.diff(plan.starts) * tokens[plan.buckets]
    steps = each[: len(each) // num_ranks * num_ranks].reshape(-1, num_ranks)
    largest, mean = steps.max(axis=1), steps.mean(axis=1)
    ratios = largest / mean
    uneven = float((ratios > 1.05).mean())
    return Balance(num_ranks, len(steps), float(largest.sum() / mean.sum()), float(ratios.max()), uneven)


@dataclass(frozen=True)
class PlanCost:
    """Processor seconds and bytes; `peak_bytes` is of the whole process, of which `before_bytes` were there before."""

    num_rows: int
    num_microbatches: int
    wall_s: float
    cpu_s: float
    first_batch_s: float
    lookup_s: float
    before_bytes: int
    peak_bytes: int


def measure_cost(num_rows: int) -> PlanCost:
    """In this process; call it in a fresh one, or the peak is that of something else."""
    columns, grid = make_mix(num_rows), make_grid()
    tokens = count_tokens(grid)
    before = _resident_bytes("VmRSS")
    wall, start = time.perf_counter(), time.process_time()
    assignment = assign(cast(Manifest, columns), grid, 0, 0)
    plan = plan_epoch(assignment, grid.batch_sizes, tokens, seed=0, epoch=0)
    ordered, wall_s = time.process_time(), time.perf_counter() - wall
    plan.rows(0)
    first = time.process_time()
    looked_up = numpy_stream(0, "bench look-up").integers(0, plan.num_microbatches, 10_000).tolist()
    lookups = time.process_time()
    for microbatch in looked_up:
        plan.rows(microbatch)
    end = time.process_time()
    return PlanCost(
        num_rows=num_rows,
        num_microbatches=plan.num_microbatches,
        wall_s=wall_s,
        cpu_s=ordered - start,
        first_batch_s=first - ordered,
        lookup_s=(end - lookups) / len(looked_up),
        before_bytes=before,
        peak_bytes=_resident_bytes("VmHWM"),
    )


def _resident_bytes(field: str) -> int:
    """`VmRSS` now or `VmHWM` at most; where there is no /proc, the most in both cases."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(line for line in status.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def plan_row_by_row(columns: Columns, grid: GridPolicy, seed: int = 0) -> list[tuple[int, list[int]]]:
    """As the published codes build their buckets: a function applied to each row of a pandas table, with a generator
    per row and a walk over all resolutions and lengths, then lists of rows and lists of batches."""
    table = load_baseline("pandas").DataFrame(vars(columns))

    def find(row: Any) -> int | None:
        draw = np.random.Generator(np.random.PCG64(seed + int(row.name)))
        return _find_bucket(grid, int(row["frames"]), int(row["height"]), int(row["width"]), float(row["fps"]), draw)

    filled: dict[int, list[int]] = {}
    for row, bucket in enumerate(table.apply(find, axis=1)):
        if bucket == bucket and bucket is not None:  # pandas makes NaN of None
            filled.setdefault(int(bucket), []).append(row)
    order = numpy_stream(seed, "bench plain order")
    batches = []
    for bucket, rows in filled.items():
        size = grid.buckets[bucket].batch_size
        shuffled = [rows[i] for i in order.permutation(len(rows))]
        batches += [(bucket, shuffled[i : i + size]) for i in range(0, len(shuffled), size)]
    return [batches[i] for i in order.permutation(len(batches))]


def measure_plain(num_rows: int) -> tuple[float, float, float]:
    """Wall and processor seconds and bytes of the plain way, in this process."""
    load_baseline("pandas")
    columns, grid = make_mix(num_rows), make_grid()
    plan_row_by_row(make_mix(10), grid)  # what a first call sets up for good does not count
    before, wall, cpu = _resident_bytes("VmRSS"), time.perf_counter(), time.process_time()
    plan_row_by_row(columns, grid)
    spent = time.perf_counter() - wall, time.process_time() - cpu
    return *spent, max(0, _resident_bytes("VmHWM") - before)


def _find_bucket(
    grid: GridPolicy, frames: int, height: int, width: int, fps: float, draw: np.random.Generator
) -> int | None:
    if grid.fps_max is not None and fps >= grid.fps_max:
        frames //= int(-(-fps // grid.fps_max))
    for level in grid.levels:
        if height * width < 0.8 * level.budget:
            continue
        for length in level.lengths:
            if (length.frames == 1) != (frames == 1) or frames < length.frames:
                continue
            if length.keep < 1 and draw.random() >= length.keep:
                break
            ratios = [abs(size.height / size.width - height / width) for size in level.sizes.values()]
            return length.first_bucket + ratios.index(min(ratios))
    return None


def measure(bench: BenchSettings) -> Iterator[Row]:
    """Time and memory at growing numbers of rows, and how even the steps are."""
    plain = _measure_plain(bench)
    for num_rows in bench.pick((100_000, 1_000_000, NUM_ROWS), (20_000,)):
        yield from measure_or_skip("plan", f"{num_rows:,} rows", _measure_size, num_rows, plain, bench)
    yield from measure_or_skip("plan", "evenness", _measure_evenness, bench)


@dataclass(frozen=True)
class PlainCost:
    """Of one row, and why there is none."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_bytes: float = 0.0
    num_rows: int = 0
    missing: str = ""


def _measure_plain(bench: BenchSettings) -> PlainCost:
    """Seconds and bytes of a row of the table, measured on as many rows as one has the patience for."""
    num_rows = bench.pick(PLAIN_ROWS, 500)
    try:
        load_baseline("pandas")
    except MissingBaseline as error:
        return PlainCost(missing=str(error))
    with _new_process() as pool:
        found = [pool.submit(measure_plain, num_rows).result() for _ in range(bench.rounds)]
    wall, cpu, num_bytes = (float(np.median(column)) / num_rows for column in zip(*found, strict=True))
    return PlainCost(wall, cpu, num_bytes, num_rows)


def _new_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _measure_size(num_rows: int, plain: PlainCost, bench: BenchSettings) -> Iterator[Row]:
    rounds = bench.rounds if num_rows < NUM_ROWS else 1
    costs = []
    for _ in range(rounds):
        with _new_process() as pool:
            costs.append(pool.submit(measure_cost, num_rows).result())
    cost = sorted(costs, key=lambda one: one.cpu_s)[rounds // 2]
    scaled = plain.missing or f"measured on {plain.num_rows:,} rows and scaled"
    has_plain = not plain.missing
    ours, other = cost.wall_s, plain.wall_s * num_rows if has_plain else None
    row = compare_numbers(
        "plan",
        f"an epoch of {num_rows:,} rows",
        ours,
        other,
        unit="s",
        against=f"row by row with pandas, {scaled}",
        repeats=rounds,
        note=f"{cost.num_microbatches:,} micro-batches; a look-up takes {cost.lookup_s * 1e6:.1f} us",
        at=("rows", num_rows),
    )
    yield replace(row, ours_cpu_s=cost.cpu_s, other_cpu_s=plain.cpu_s * num_rows if has_plain else None)
    yield compare_numbers(
        "plan",
        f"memory of {num_rows:,} rows",
        cost.peak_bytes - cost.before_bytes,
        plain.num_bytes * num_rows if has_plain else None,
        unit="B",
        against=f"row by row with pandas, {scaled}",
        repeats=rounds,
        note="at most, beside the columns",
        at=("rows", num_rows),
    )


def _measure_evenness(bench: BenchSettings) -> Iterator[Row]:
    columns, grid = make_mix(bench.pick(200_000, 20_000)), make_grid()
    plan, shuffled, tokens = make_plan(columns, grid), make_plan(columns, grid, cost_group=1), count_tokens(grid)
    for num_ranks in (8, 64):
        even, random_order = (measure_balance(each, tokens, num_ranks) for each in (plan, shuffled))
        yield compare_numbers(
            "plan",
            f"tokens of the dearest of {num_ranks} ranks, over the mean",
            even.ratio,
            random_order.ratio,
            unit="",
            against="a plain shuffle",
            note=f"{even.num_steps:,} steps, {even.share_uneven:.1%} of them above 1.05",
            at=("ranks", num_ranks),
        )
