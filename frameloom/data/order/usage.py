"""Usage report: what happened to every row of a manifest in an epoch (used, waiting, bad, dropped, or never planned).

Nothing is logged per sample. The order of an epoch is a function, so it follows from the plan, the run's position and
its short list of bad clips; the report computes it again and checks that every row has exactly one status.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from frameloom.core.files import atomic_file
from frameloom.data.loading.batch import BadClip
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.order.plan import BatchPlan, Ints

USED, WAITING, BAD, DROPPED, NOT_SHOWN = "used", "waiting", "bad file", "dropped", "not shown"
UNACCOUNTED = "unaccounted"
_STATUSES = (UNACCOUNTED, USED, WAITING, BAD, DROPPED, NOT_SHOWN)  # reasons of the bucket policy follow
_MAX_LINES = 20

Codes = NDArray[np.int8]


@dataclass(frozen=True)
class EpochUsage:
    """`statuses[codes[row]]` is the status of a row; `problems` are in plain words, none if all is well.

    A row that its source repeats is used once one of its samples is; `times` counts them.
    """

    epoch: int
    position: int
    num_planned: int
    statuses: tuple[str, ...]
    codes: Codes
    times: NDArray[np.uint16]
    problems: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each status; they add up to the manifest."""
        found = np.bincount(self.codes, minlength=len(self.statuses)).tolist()
        return dict(zip(self.statuses, found, strict=True))


def account_epoch(
    plan: BatchPlan,
    reasons: tuple[Codes, Sequence[str]],
    *,
    position: int,
    bad: Iterable[BadClip] = (),
    shown: Ints | None = None,
    images: NDArray[np.bool_] | None = None,
) -> EpochUsage:
    """The status of every row when `position` samples of the epoch were used.

    `reasons` comes from `unused_reasons`: 0 for a row that has a bucket, else the position of why it has none. `shown`
    are the rows of the epoch, each as often as it should come, where that is not once; `images` marks rows that may
    have been drawn to go beside a video. A bad clip lost its own slot; another clip of the bucket stood in for it,
    which is no second use in the plan's sense.
    """
    why, names = reasons
    order, done = plan.order, max(0, position)
    wanted = np.ones(len(why), np.int64) if shown is None else np.bincount(shown, minlength=len(why))
    problems = _check_plan(plan, order, np.where(why > 0, 0, wanted), position)
    codes = np.where(why > 0, why + len(_STATUSES) - 1, 0).astype(np.int8)
    codes[(codes == 0) & (wanted == 0)] = _STATUSES.index(NOT_SHOWN)
    codes[plan.shuffled] = _STATUSES.index(DROPPED)
    codes[order] = _STATUSES.index(WAITING)
    codes[order[:done]] = _STATUSES.index(USED)
    slots = np.array([(clip.ordinal, clip.row) for clip in bad if clip.epoch == plan.epoch], dtype=np.int64)
    slots = slots.reshape(-1, 2)
    slots = slots[slots[:, 0] < min(done, len(order))]
    own = order[slots[:, 0]] == slots[:, 1]
    codes[slots[own, 1]] = _STATUSES.index(BAD)
    times = np.bincount(order[:done], minlength=len(why))
    np.subtract.at(times, slots[own, 1], 1)
    problems += _check_slots(plan, order, slots, images)
    lost = np.count_nonzero(codes == 0)
    if lost:
        problems.append(f"epoch {plan.epoch}: {lost} rows have a bucket but are not in the plan")
    statuses = (*_STATUSES, *names[1:])
    return EpochUsage(plan.epoch, position, len(order), statuses, codes, times.astype(np.uint16), tuple(problems))


def _check_plan(plan: BatchPlan, order: Ints, wanted: Ints, position: int) -> list[str]:
    uses = np.bincount(order, minlength=len(wanted))
    repeated, unwanted = np.count_nonzero((uses > wanted) & (wanted > 0)), np.count_nonzero((uses > 0) & (wanted == 0))
    problems = []
    if repeated:
        problems.append(f"epoch {plan.epoch}: {repeated} rows are planned more often than they should be")
    if unwanted:
        problems.append(f"epoch {plan.epoch}: {unwanted} rows are planned although they fit no bucket or are not shown")
    if len(plan.shuffled) != wanted.sum():
        problems.append(f"epoch {plan.epoch}: {len(plan.shuffled)} samples, but the rows give {wanted.sum()}")
    found = int(plan.starts.searchsorted(position))
    if found == len(plan.starts) or plan.starts[found] != position:
        problems.append(
            f"epoch {plan.epoch}: the run is at sample {position}, where no batch of its {len(order)} samples ends; "
            "the recipe was changed"
        )
    return problems


def _check_slots(plan: BatchPlan, order: Ints, slots: Ints, images: NDArray[np.bool_] | None) -> list[str]:
    """Of (sample index, row) of bad clips: the plan must give that sample to that row, others were tried after it."""
    planned = order[slots[:, 0]]
    if images is not None:
        beside = images[slots[:, 1]] & ~images[planned]
        slots, planned = slots[~beside], planned[~beside]
    strange = np.setdiff1d(slots[:, 0], slots[planned == slots[:, 1], 0])
    if not len(strange):
        return []
    return [
        f"epoch {plan.epoch}: {len(strange)} entries of the list of bad clips are for slots that the plan gives to "
        "other rows; the recipe was changed after they were written"
    ]


def describe_epochs(epochs: Sequence[EpochUsage]) -> Iterator[str]:
    """A table with one line per epoch; early epochs share a line when there are many."""
    shown = [epoch.counts for epoch in epochs]
    statuses = [status for status in epochs[0].statuses if any(counts[status] for counts in shown)]
    labels = [str(epoch.epoch) for epoch in epochs]
    if len(shown) > _MAX_LINES:
        early = len(shown) - _MAX_LINES + 1
        together = {status: sum(counts[status] for counts in shown[:early]) for status in statuses}
        shown, labels = [together, *shown[early:]], [f"{labels[0]} to {labels[early - 1]}", *labels[early:]]
    widths = [max(len(status), 12) for status in [*statuses, "sum"]]
    yield "epoch".ljust(12) + "".join(
        status.rjust(width + 2) for status, width in zip([*statuses, "sum"], widths, strict=True)
    )
    for label, counts in zip(labels, shown, strict=True):
        values = [counts[status] for status in statuses]
        values.append(sum(values))
        yield label.ljust(12) + "".join(
            f"{value:,}".rjust(width + 2) for value, width in zip(values, widths, strict=True)
        )


def write_usage(path: Path, manifest: Manifest, epochs: Sequence[EpochUsage]) -> None:
    """One parquet row per row of the manifest: its path, how often it was used, and its status in every epoch."""
    times = np.zeros(len(manifest), dtype=np.int64)
    for epoch in epochs:
        times += epoch.times
    columns = {"row": np.arange(len(manifest)), "path": manifest.column("path"), "times_used": times}
    for epoch in epochs:
        columns[f"epoch_{epoch.epoch}"] = pl.Series(epoch.codes.astype(np.uint8)).cat.to(pl.Enum(epoch.statuses))
    with atomic_file(path) as temporary:
        pl.DataFrame(columns).write_parquet(temporary)
