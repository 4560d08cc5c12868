"""Usage report: what happened to every row of a manifest in an epoch (used, waiting, bad, dropped, or never planned).

Nothing is logged per sample. The order of an epoch is a function, so it follows from the plan, the run's position and
its short list of bad clips; the report computes it again and checks that every row has exactly one status.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from frameloom.core.errors import DataError
from frameloom.core.files import atomic_file
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.order.plan import BatchPlan, Ints

USED, WAITING, BAD, DROPPED, NOT_SHOWN = "used", "waiting", "bad file", "dropped", "not shown"
UNACCOUNTED = "unaccounted"
_FATES = (UNACCOUNTED, USED, WAITING, BAD, DROPPED, NOT_SHOWN)  # reasons of the bucket policy follow
_MAX_LINES = 20

Codes = NDArray[np.int8]
Slots = NDArray[np.int64]  # [n, 2]: the slot of the epoch that a clip should have filled, and the clip's row


@dataclass(frozen=True)
class EpochLedger:
    """`fates[codes[row]]` is what became of a row; `problems` are in plain words, none if all is well.

    A row that its source repeats is used once one of its samples is; `times` counts them.
    """

    epoch: int
    position: int
    num_planned: int
    fates: tuple[str, ...]
    codes: Codes
    times: NDArray[np.uint16]
    problems: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each fate; they add up to the manifest."""
        found = np.bincount(self.codes, minlength=len(self.fates)).tolist()
        return dict(zip(self.fates, found, strict=True))


def account_epoch(
    plan: BatchPlan,
    reasons: tuple[Codes, Sequence[str]],
    *,
    position: int,
    bad: Slots | None = None,
    shown: Ints | None = None,
    images: NDArray[np.bool_] | None = None,
) -> EpochLedger:
    """The fate of every row when `position` samples of the epoch were used.

    `reasons` comes from `unused_reasons`: 0 for a row that has a bucket, else the position of why it has none. `shown`
    are the rows of the epoch, each as often as it should come, where that is not once; `images` marks rows that may
    have been drawn to go beside a video. A bad clip lost its own slot; another clip of the bucket stood in for it,
    which is no second use in the plan's sense.
    """
    why, names = reasons
    order, done = plan.order, max(0, position)
    wanted = np.ones(len(why), np.int64) if shown is None else np.bincount(shown, minlength=len(why))
    problems = _check_plan(plan, order, np.where(why > 0, 0, wanted), position)
    codes = np.where(why > 0, why + len(_FATES) - 1, 0).astype(np.int8)
    codes[(codes == 0) & (wanted == 0)] = _FATES.index(NOT_SHOWN)
    codes[plan.shuffled] = _FATES.index(DROPPED)
    codes[order] = _FATES.index(WAITING)
    codes[order[:done]] = _FATES.index(USED)
    slots = bad if bad is not None else np.empty((0, 2), dtype=np.int64)
    slots = slots[slots[:, 0] < min(done, len(order))]
    own = order[slots[:, 0]] == slots[:, 1]
    codes[slots[own, 1]] = _FATES.index(BAD)
    times = np.bincount(order[:done], minlength=len(why))
    np.subtract.at(times, slots[own, 1], 1)
    problems += _check_slots(plan, order, slots, images)
    lost = np.count_nonzero(codes == 0)
    if lost:
        problems.append(f"epoch {plan.epoch}: {lost} rows have a bucket but no place in the plan")
    fates = (*_FATES, *names[1:])
    return EpochLedger(plan.epoch, position, len(order), fates, codes, times.astype(np.uint16), tuple(problems))


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
    place = int(plan.starts.searchsorted(position))
    if place == len(plan.starts) or plan.starts[place] != position:
        problems.append(
            f"epoch {plan.epoch}: the run is at sample {position}, where no batch of its {len(order)} samples ends; "
            "the recipe was changed"
        )
    return problems


def _check_slots(plan: BatchPlan, order: Ints, slots: Slots, images: NDArray[np.bool_] | None) -> list[str]:
    """A slot with a bad clip must be one of that clip's own: others were only tried after it."""
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


def read_bad_slots(path: Path) -> dict[int, Slots]:
    """The slots of a run's list of bad clips by epoch; reads only, so the run may be going on."""
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    # A line that is being written, or was when the run was killed, is not there yet.
    lines = text[: text.rfind("\n") + 1].splitlines()
    found: dict[int, list[tuple[int, int]]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            found.setdefault(int(record["epoch"]), []).append((int(record["ordinal"]), int(record["row"])))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}: line {number} is not a bad clip ({error!r}); move the file away") from error
    return {epoch: np.array(slots, dtype=np.int64) for epoch, slots in found.items()}


def describe_epochs(epochs: Sequence[EpochLedger]) -> Iterator[str]:
    """A table with one line per epoch; early epochs share a line when there are many."""
    shown = [epoch.counts for epoch in epochs]
    fates = [fate for fate in epochs[0].fates if any(counts[fate] for counts in shown)]
    labels = [str(epoch.epoch) for epoch in epochs]
    if len(shown) > _MAX_LINES:
        early = len(shown) - _MAX_LINES + 1
        together = {fate: sum(counts[fate] for counts in shown[:early]) for fate in fates}
        shown, labels = [together, *shown[early:]], [f"{labels[0]} to {labels[early - 1]}", *labels[early:]]
    widths = [max(len(fate), 12) for fate in [*fates, "sum"]]
    yield "epoch".ljust(12) + "".join(
        fate.rjust(width + 2) for fate, width in zip([*fates, "sum"], widths, strict=True)
    )
    for label, counts in zip(labels, shown, strict=True):
        values = [counts[fate] for fate in fates]
        values.append(sum(values))
        yield label.ljust(12) + "".join(
            f"{value:,}".rjust(width + 2) for value, width in zip(values, widths, strict=True)
        )


def write_ledger(path: Path, manifest: Manifest, epochs: Sequence[EpochLedger]) -> None:
    """One parquet row per row of the manifest: its path, how often it was used, and its fate in every epoch."""
    times = np.zeros(len(manifest), dtype=np.int64)
    for epoch in epochs:
        times += epoch.times
    columns = {"row": np.arange(len(manifest)), "path": manifest.column("path"), "times_used": times}
    for epoch in epochs:
        columns[f"epoch_{epoch.epoch}"] = pl.Series(epoch.codes.astype(np.uint8)).cat.to(pl.Enum(epoch.fates))
    with atomic_file(path) as temporary:
        pl.DataFrame(columns).write_parquet(temporary)
