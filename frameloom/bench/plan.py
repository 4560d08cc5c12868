"""The plan of an epoch for ten million rows: processor time, memory, look-ups, and how even its steps are.

The clips are made up after the Pexels videos (sizes, lengths, frame rates), the buckets are those of Open-Sora 2.0's
second stage (858 shapes, batch sizes from 2 to 195). Costs are taken in a process of their own: assignment of buckets
and order, as a run pays for them at the start of an epoch. The plain way is a Python loop over rows with a generator
per row, as the originals build their buckets, on a sample of the same rows; only the ratio means something.

A hundred million rows: ten million are the tenth that is measured. Every pass over rows is linear but the sort inside
a bucket, which compares log2(n) times: 27 instead of 24, so a row costs at most an eighth more. What is kept per row
is one 32-bit number in the plan and one in the assignment, row numbers fitting 32 bits up to two thousand million;
the passes need about 15 bytes more for a while, and the buckets of a chunk a constant 0.2 GB. Geometry (20 bytes a
row) can stay a memory-mapped shard: it is read in chunks of a million rows. `at_100m` says what this makes of the
measured numbers.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from frameloom.core.random import numpy_stream
from frameloom.data.buckets import assign
from frameloom.data.manifest import Manifest
from frameloom.data.plan import ALIKE, BatchPlan, plan_epoch
from frameloom.data.policies.grid import GridPolicy
from frameloom.data.policies.grid_parser import parse_grid

NUM_ROWS = 10_000_000
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
    return parse_grid({"256px": {1: [1.0, 195], **small}, "768px": {1: [0.5, 38], **large}}, stride=16, fps_max=24)


def count_tokens(grid: GridPolicy) -> NDArray[np.float64]:
    """Tokens of a clip of each bucket for a causal autoencoder with strides 4, 8, 8 and patches of 2."""
    area = _VAE_STRIDES[1] * _VAE_STRIDES[2] * _PATCH**2
    return np.array([(1 + (b.frames - 1) // _VAE_STRIDES[0]) * b.height * b.width / area for b in grid.buckets])


def make_plan(columns: Columns, grid: GridPolicy, *, seed: int = 0, epoch: int = 0, alike: int = ALIKE) -> BatchPlan:
    assignment = assign(cast(Manifest, columns), grid, seed, epoch)
    return plan_epoch(assignment, grid.batch_sizes, count_tokens(grid), seed=seed, epoch=epoch, alike=alike)


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
    assign_cpu_s: float
    order_cpu_s: float
    first_batch_s: float
    lookup_s: float
    before_bytes: int
    peak_bytes: int

    @property
    def cpu_s(self) -> float:
        return self.assign_cpu_s + self.order_cpu_s


def measure_cost(num_rows: int) -> PlanCost:
    """In this process; call it in a fresh one, or the peak is that of something else."""
    columns, grid = make_mix(num_rows), make_grid()
    tokens = count_tokens(grid)
    before = _resident_bytes("VmRSS")
    start = time.process_time()
    assignment = assign(cast(Manifest, columns), grid, 0, 0)
    assigned = time.process_time()
    plan = plan_epoch(assignment, grid.batch_sizes, tokens, seed=0, epoch=0)
    ordered = time.process_time()
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
        assign_cpu_s=assigned - start,
        order_cpu_s=ordered - assigned,
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


def plan_row_by_row(columns: Columns, grid: GridPolicy, num_rows: int, seed: int = 0) -> list[tuple[int, list[int]]]:
    """Buckets as a loop builds them: a generator per row, a walk over all resolutions and lengths, lists of rows."""
    filled: dict[int, list[int]] = {}
    for row in range(num_rows):
        clip = (int(columns.frames[row]), int(columns.height[row]), int(columns.width[row]), float(columns.fps[row]))
        found = _find_bucket(grid, *clip, np.random.Generator(np.random.PCG64(seed + row)))
        if found is not None:
            filled.setdefault(found, []).append(row)
    draw = numpy_stream(seed, "bench plain order")
    batches = []
    for bucket, rows in filled.items():
        size = grid.buckets[bucket].batch_size
        order = [rows[i] for i in draw.permutation(len(rows))]
        batches += [(bucket, order[i : i + size]) for i in range(0, len(order), size)]
    return [batches[i] for i in draw.permutation(len(batches))]


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


@dataclass(frozen=True)
class PlanComparison:
    """Processor time per row of both ways, the cost at full size, and the balance with and without cost classes."""

    name: str
    cost: PlanCost
    ours_row_s: float
    plain_row_s: float
    even: tuple[Balance, ...]
    shuffled: tuple[Balance, ...]
    rounds: int

    @property
    def ratio(self) -> float:
        return self.plain_row_s / self.ours_row_s

    @property
    def at_100m(self) -> dict[str, float]:
        """What the docstring's argument gives for ten times the rows, geometry in memory, from the measured numbers."""
        times = 100_000_000 / self.cost.num_rows
        working = self.cost.peak_bytes - self.cost.before_bytes
        return {"cpu_s": times * self.cost.cpu_s * 27 / 24, "working_bytes": times * working}

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "cpu_s": self.cost.cpu_s, "at_100m": self.at_100m}

    def describe(self) -> Iterator[str]:
        cost = self.cost
        yield f"{self.name}: {cost.num_rows:,} rows, {cost.num_microbatches:,} micro-batches"
        yield f"  processor {cost.cpu_s:.2f} s (buckets {cost.assign_cpu_s:.2f}, order {cost.order_cpu_s:.2f})"
        yield f"  memory    {cost.peak_bytes / 1e9:.2f} GB at most, {cost.before_bytes / 1e9:.2f} GB before the plan"
        yield f"  first batch after {cost.first_batch_s * 1e3:.3f} ms, a look-up {cost.lookup_s * 1e6:.1f} us"
        ours, plain = self.ours_row_s * 1e6, self.plain_row_s * 1e6
        yield f"  per row {ours:.2f} us, a loop over rows {plain:.1f} us: {self.ratio:.0f}x"
        for even, shuffled in zip(self.even, self.shuffled, strict=True):
            yield (
                f"  {even.num_ranks} ranks: largest over mean {even.ratio:.4f} (shuffled {shuffled.ratio:.2f}), "
                f"{even.share_uneven:.1%} of {even.num_steps:,} steps above 1.05, worst {even.worst:.2f}"
            )
        cpu_s, working = self.at_100m["cpu_s"], self.at_100m["working_bytes"] / 1e9
        yield f"  100 million rows by calculation: {cpu_s:.0f} s, {working:.1f} GB besides the geometry"


def compare_plan(
    rounds: int = 3, *, num_rows: int = NUM_ROWS, sample_rows: int = 20_000, mix_rows: int = 200_000
) -> PlanComparison:
    """The cost at `num_rows`, both ways in turn on `sample_rows`, and the balance of a set of `mix_rows`."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        cost = pool.submit(measure_cost, num_rows).result()
    columns, grid = make_mix(mix_rows), make_grid()
    ours, plain = [], []
    for _ in range(rounds):
        start = time.process_time()
        plan = make_plan(columns, grid)
        middle = time.process_time()
        plan_row_by_row(columns, grid, min(sample_rows, mix_rows))
        ours.append((middle - start) / mix_rows)
        plain.append((time.process_time() - middle) / min(sample_rows, mix_rows))
    random_order = make_plan(columns, grid, alike=1)
    tokens = count_tokens(grid)
    return PlanComparison(
        name="plan of an epoch, Pexels-like mix in Open-Sora 2.0's buckets",
        cost=cost,
        ours_row_s=float(np.median(ours)),
        plain_row_s=float(np.median(plain)),
        even=tuple(measure_balance(plan, tokens, num_ranks) for num_ranks in (8, 64)),
        shuffled=tuple(measure_balance(random_order, tokens, num_ranks) for num_ranks in (8, 64)),
        rounds=rounds,
    )
