"""Out-of-memory handling: micro-batches that do not fit run in smaller pieces from then on.

The mean of a step is over its samples and every draw is keyed by a sample's slot, so pieces learn what the whole would
have learnt. The step is begun anew: nothing of it has changed a weight when memory runs out in a pass.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from frameloom.core.errors import RunError
from frameloom.core.files import write_json
from frameloom.core.logging import get_logger
from frameloom.data.loading.batch import Batch, Crops, JointImages

_log = get_logger(__name__)

NOTES = "halved"
"""folder in a run's folder: what a process left behind that could not tell the others"""
TRY_AGAIN = 75
"""exit code of a run that goes on when it is started again; EX_TEMPFAIL of sysexits.h"""
_SIGNS = (
    "DefaultCPUAllocator",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_ADVICE = (
    "recompute blocks (train.recompute: true), split the weights (parallel.zero: 3) or the clip (parallel.sequence: 2) "
    "over processes, move the optimizer's state to the host (optim.offload: true), or make the bucket smaller in data; "
    "docs/memory.md has them in order"
)
Rows = slice | NDArray[np.int64]


@dataclass(frozen=True)
class OomEvent:
    """So many samples of a bucket did not fit into memory at once."""

    bucket: str
    size: int
    reason: str = ""


class RetrySmaller(Exception):
    """A step did not fit on some process; all processes raise it alike, and nothing was changed."""

    def __init__(self, events: Sequence[OomEvent]) -> None:
        super().__init__(f"{len(events)} passes did not fit in memory")
        self.events = list(events)


class FatalOom(Exception):
    """Memory ran out inside a pass that other processes wait in, which no message can reach."""

    def __init__(self, event: OomEvent) -> None:
        super().__init__(event.reason)
        self.event = event


def find_oom(error: BaseException, piece: Batch) -> OomEvent | None:
    """What did not fit when a pass ended with this error; None if it is about something else."""
    is_short = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)
    if not is_short:
        return None
    return OomEvent(piece.bucket.name, piece.size, str(error).strip().partition("\n")[0][:200] or type(error).__name__)


def release_memory(device_type: str) -> None:
    """Give back what a failed pass has left behind."""
    gc.collect()
    if device_type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class BatchLimits:
    """The most samples of a bucket that run at once, of those whose micro-batches did not fit; equal on all processes.

    Switched off, the first event is an error, and what a checkpoint remembers of others counts for nothing.
    """

    is_on: bool = True
    most: dict[str, int] = field(default_factory=dict)
    remark: str = ""
    """what else smaller pieces mean to this run, in words"""

    def count_pieces(self, bucket: str, size: int) -> int:
        return max(1, -(-size // self.most[bucket])) if bucket in self.most else 1

    def halve(self, events: Iterable[OomEvent], *, step: int) -> None:
        """Half as many from now on; RunError where it was one already. Step 0 is the preflight."""
        worst: dict[str, OomEvent] = {}
        for event in events:
            if event.bucket not in worst or event.size < worst[event.bucket].size:
                worst[event.bucket] = event
        for event in worst.values():
            reason = f"({event.reason})" if event.reason else ""
            if event.size <= 1:
                raise RunError(f"bucket {event.bucket}: not even one sample fits in memory {reason}; {_ADVICE}")
            if not self.is_on:
                raise RunError(
                    f"bucket {event.bucket}: {event.size} samples do not fit in memory at once {reason}, and "
                    f"train.oom_split is false; set it to true, lower the bucket's batch, or {_ADVICE}"
                )
            most = min(math.ceil(event.size / 2), self.most.get(event.bucket, event.size))
            self.most[event.bucket] = most
            _log.warning(
                "%s: %d samples of bucket %s do not fit in memory at once; from now on at most %d, gradients add up%s",
                f"step {step}" if step else "preflight",
                event.size,
                event.bucket,
                most,
                f"; {self.remark}" if self.remark else "",
            )

    def tighten(self, found: Mapping[str, int]) -> None:
        """Take over limits of an earlier start, where they are smaller."""
        if not self.is_on:
            return
        for bucket, most in found.items():
            self.most[bucket] = min(most, self.most.get(bucket, most))


def cut_batch(batch: Batch, num_pieces: int) -> list[Batch]:
    """Exactly so many pieces, the larger ones first; where samples are fewer, the rest are fillers."""
    if num_pieces == 1:
        return [batch]
    edges = np.cumsum([0, *(len(part) for part in np.array_split(batch.rows, num_pieces))]).tolist()
    pieces = [
        replace(take_rows(batch, slice(start, stop)), part=batch.part + start)
        for start, stop in pairwise(edges)
        if stop > start
    ] or [batch]
    return pieces + [replace(pieces[0], is_filler=True)] * (num_pieces - len(pieces))


def take_rows(batch: Batch, rows: Rows) -> Batch:
    """These samples of a batch; those that are paired with them (class pictures) come along."""
    num_rows = len(batch.rows)
    chosen = np.arange(num_rows)[rows]
    copies = len(batch.sample_indices) // num_rows if num_rows else 1
    every: Rows = rows if copies == 1 else np.concatenate([chosen + copy * num_rows for copy in range(copies)])
    crops, images = batch.crops, batch.images
    if crops is not None:
        crops = Crops(**{part.name: getattr(crops, part.name)[every] for part in fields(Crops)})
    if images is not None:
        counts = images.rows_BN.shape[:2]
        text = images.text and {
            name: torch.unflatten(part, 0, counts)[rows].flatten(0, 1) for name, part in images.text.items()
        }
        captions = [images.captions[index] for index in chosen.tolist()]
        images = JointImages(images.pixels_BCNHW[rows], images.rows_BN[rows], captions, text)
    return replace(
        batch,
        rows=batch.rows[rows],
        sample_indices=batch.sample_indices[every],
        captions=[batch.captions[index] for index in np.arange(len(batch.sample_indices))[every].tolist()],
        pixels_BCFHW=None if batch.pixels_BCFHW is None else batch.pixels_BCFHW[every],
        latents=None if batch.latents is None else (batch.latents[0][every], batch.latents[1][every]),
        text=None if batch.text is None else {name: part[every] for name, part in batch.text.items()},
        crops=crops,
        images=images,
        control_BCFHW=None if batch.control_BCFHW is None else batch.control_BCFHW[every],
        bad=[],
    )


def stop_to_halve(found: FatalOom, limits: BatchLimits, folder: Path, *, step: int, rank: int) -> NoReturn:
    """Put the halving down for the next start, which goes on with it, and end this one."""
    limits.halve([found.event], step=step)
    (folder / NOTES).mkdir(exist_ok=True)
    write_json(folder / NOTES / f"rank-{rank}.json", {"step": step, "most": limits.most})
    event = found.event
    error = RunError(
        f"bucket {event.bucket}: {event.size} samples do not fit in memory at once ({event.reason}), and the "
        f"processes of this run compute together, so all stop; the next start takes at most "
        f"{limits.most[event.bucket]}: start the same command again, or let frameloom launch --restarts do it"
    )
    error.exit_code = TRY_AGAIN
    raise error from found


def stop_short(error: BaseException, *, step: int) -> NoReturn:
    """Memory ran out where smaller pieces do not help: while weights were moved, averaged or saved."""
    reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    raise RunError(
        f"step {step}: memory ran out outside of the passes over a batch ({reason}); {_ADVICE}. Start the same command "
        "again to go on from the last checkpoint"
    ) from error


def read_notes(folder: Path, *, after_step: int) -> dict[str, int]:
    """What processes have put down in steps that the checkpoint of `after_step` does not know of."""
    limits = BatchLimits()
    for path in sorted((folder / NOTES).glob("rank-*.json")):
        note = json.loads(path.read_text(encoding="utf-8"))
        if note["step"] > after_step:
            limits.tighten(note["most"])
    return limits.most
