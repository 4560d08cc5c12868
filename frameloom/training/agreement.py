"""Agreement between ranks: one vector, summed over all of them, shows whether they take the same step.

The fingerprint of a step is a digest of its number, position in the plan, buckets, samples and recipe. Three 16-bit
words w of it travel with the losses, as w and w²: W Σw² = (Σw)² only if all W words are equal (Cauchy-Schwarz), and
sums of integers below 2^53 are exact in float64. What was really read may differ between ranks, but not between
sequence peers, which see the same clips: the first of n peers adds (n - 1) times its words, the others subtract theirs,
and the sum is zero.
"""

from __future__ import annotations

import hashlib
import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.errors import RunError
from frameloom.data.loading.batch import BadClip, Batch
from frameloom.data.order.rank_assignment import PlannedStep
from frameloom.training.memory.oom_split import BatchLimits, OomEvent, RetrySmaller
from frameloom.training.parallel import Parallelism
from frameloom.training.stragglers import StragglerMonitor

NUM_WORDS = 3
_NUM_SHOWN = 6
_SIGNALS = {"sigint": signal.SIGINT, "sigterm": signal.SIGTERM}
# Room for losses in the sum of a step: a rank that has none, since a pass ran out of memory, sends as many numbers.
_MOST_TOTALS = 24


@dataclass(frozen=True)
class StepFingerprint:
    """A step as one rank sees it, equal on all; `shapes` counts the micro-batches of each bucket, by name."""

    step: int
    epoch: int
    microbatches: tuple[int, int]
    shapes: dict[str, int]
    buckets: NDArray[np.int32]
    rows: NDArray[np.int64]
    recipe: str
    """digest of all its keys"""

    @classmethod
    def of(cls, step: int, planned: PlannedStep, recipe: str) -> StepFingerprint:
        ends = planned.first, planned.end
        return cls(step, planned.epoch, ends, planned.count_shapes(), planned.buckets, planned.rows(), recipe)

    def words(self) -> list[int]:
        named = [self.step, self.epoch, self.microbatches, self.shapes, self.recipe]
        return digest_words(named, self.buckets, self.rows)

    def describe(self) -> dict[str, str]:
        """Its parts as texts, to be compared when the digests differ."""
        shown = ", ".join(str(row) for row in self.rows[:_NUM_SHOWN])
        return {
            "step": str(self.step),
            "epoch": str(self.epoch),
            "micro-batches": f"{self.microbatches[0]} to {self.microbatches[1] - 1}",
            "buckets": ", ".join(f"{count} x {name}" for name, count in self.shapes.items()),
            "order of buckets": _digest_text(self.buckets.tobytes()),
            "samples": f"{len(self.rows)} rows ({shown}{', …' if len(self.rows) > _NUM_SHOWN else ''}), digest "
            f"{_digest_text(self.rows.tobytes())}",
            "recipe": self.recipe,
        }


def digest_words(value: Any, *arrays: NDArray[np.integer]) -> list[int]:
    """Three 16-bit words; `value` must have a repr that says all of it."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=2 * NUM_WORDS)
    for array in arrays:
        digest.update(array.astype(np.int64).tobytes())
    return [int(word) for word in np.frombuffer(digest.digest(), dtype="<u2")]


def _digest_text(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def pack_words(
    planned: Sequence[int], read: Sequence[int], num_peers: int = 1, *, is_first: bool = True
) -> list[float]:
    """What a rank adds to the sum for the words of its fingerprint and of what it has read."""
    sign = num_peers - 1 if is_first else -1
    words = [*planned, *(word * word for word in planned), *(sign * word for word in read)]
    return [float(word) for word in words]


def check_words(total: Sequence[float], num_ranks: int) -> tuple[bool, bool]:
    """Whether all fingerprints are equal, and whether sequence peers have read the same; `total` is the sum."""
    words, squares, read = (total[part * NUM_WORDS : (part + 1) * NUM_WORDS] for part in range(3))
    agree = all(num_ranks * int(square) == int(word) ** 2 for word, square in zip(words, squares, strict=True))
    return agree, not any(read)


class Agreement:
    """What the ranks of a run learn of each other in a step: in one sum, which is the only one beside gradients."""

    def __init__(self, parallel: Parallelism, recipe: str) -> None:
        self.parallel, self._context = parallel, parallel.context
        self.monitor = StragglerMonitor(parallel.context, parallel.device)
        self._recipe = recipe
        self._planned: PlannedStep | None = None
        self._fingerprint: StepFingerprint | None = None
        self._totals: tuple[Tensor, ...] = ()
        self._num_bad = 0
        self._requested: int | None = None
        self._has_failed = False
        self._agreed_signal: int | None = None
        self._agreed_failure = False

    @property
    def stop_signal(self) -> int | None:
        """The signal at which all ranks stop after this step."""
        return self._requested if self._context.size == 1 else self._agreed_signal

    @property
    def has_failed(self) -> bool:
        """Whether some rank had noted a failure when the last step was taken."""
        return self._has_failed if self._context.size == 1 else self._agreed_failure

    def request_stop(self, number: int) -> None:
        """This rank got a signal; may be called from its handler."""
        self._requested = number

    def note_failure(self) -> None:
        """Something failed beside the steps, in a thread; may be called from it."""
        self._has_failed = True

    def begin(self, step: int, planned: PlannedStep | None) -> None:
        """Say which step comes next; one process alone needs no plan of it."""
        if self._context.size > 1:
            assert planned is not None
            self._planned, self._fingerprint = planned, StepFingerprint.of(step, planned, self._recipe)

    def count_samples(self, batches: Sequence[Batch]) -> int:
        """Samples of the step on all ranks, as planned."""
        if self._planned is None:
            return sum(len(batch.rows) for batch in batches if not batch.is_filler)
        return self._planned.num_samples

    def count_pieces(self, batches: Sequence[Batch], limits: BatchLimits) -> list[int]:
        """Into how many pieces each micro-batch is cut: where a pass waits for others, as many on all ranks."""
        if self._planned is None or not self.parallel.waits_in_passes:
            return [limits.count_pieces(batch.bucket.name, batch.size) for batch in batches]
        plan, names = self._planned.plan, self._planned.names
        return [
            max(
                limits.count_pieces(names[plan.buckets[index]], int(plan.starts[index + 1] - plan.starts[index]))
                for index in dealt
            )
            for dealt in self._planned.deal()[0].tolist()
        ]

    def join(
        self, totals: Mapping[str, Tensor], batches: Sequence[Batch], event: OomEvent | None = None
    ) -> tuple[dict[str, Tensor], float]:
        """The sums of `totals` over all ranks, and the factor that makes up for planned samples that were not read.

        RunError where the ranks do not agree on the step; RetrySmaller on all where one ran out of memory (`event`).
        """
        if self._planned is None or self._fingerprint is None:
            if event is not None:
                raise RetrySmaller([event])
            return dict(totals), 1.0
        sums = self._sum(totals, batches, event)
        self.monitor.compare(self._fingerprint.step)
        if sums["misfits"]:
            raise RetrySmaller([found for found in self._context.all_gather(event) if found is not None])
        num_peers = self.parallel.shape.sequence
        num_read = sums["samples"] / num_peers
        missing = self._planned.num_samples / num_read if num_read else math.nan
        device, factor = self.parallel.device, missing / num_peers
        return {name: torch.tensor(sums[name] * factor, dtype=torch.float64, device=device) for name in totals}, missing

    def _sum(self, totals: Mapping[str, Tensor], batches: Sequence[Batch], event: OomEvent | None) -> dict[str, float]:
        assert self._fingerprint is not None
        self.monitor.wait()
        own = [batch for batch in batches if not batch.is_filler]
        counts = {
            "samples": float(sum(len(batch.rows) for batch in own)),
            "bad": float(sum(len(batch.bad) for batch in own)),
            "misfits": float(event is not None),
            "failures": float(self._has_failed),
            **{name: float(self._requested == number) for name, number in _SIGNALS.items()},
        }
        rows = np.concatenate([batch.rows for batch in batches])
        read = digest_words([(batch.epoch, batch.index, batch.bucket.name) for batch in batches], rows)
        num_peers, device = self.parallel.shape.sequence, self.parallel.device
        is_first = self._context.rank % num_peers == 0
        packed = pack_words(self._fingerprint.words(), read, num_peers, is_first=is_first)
        self._totals = tuple(totals.values())
        assert len(totals) <= _MOST_TOTALS
        said = torch.tensor([*packed, *counts.values()], dtype=torch.float64, device=device)
        losses = [total.to(device, torch.float64).reshape(1) for total in totals.values()]
        vector = torch.cat([said, *losses, said.new_zeros(_MOST_TOTALS - len(totals))])
        found = self._context.sum(vector).tolist()
        planned_agree, peers_agree = check_words(found, self._context.size)
        if not (planned_agree and peers_agree):
            self._refuse(batches, planned_agree)
        sums = dict(zip([*counts, *totals], found[len(packed) :], strict=False))
        self._num_bad, self._agreed_failure = int(sums["bad"]), bool(sums["failures"])
        self._agreed_signal = next((int(number) for name, number in _SIGNALS.items() if sums[name]), None)
        return sums

    def _refuse(self, batches: Sequence[Batch], planned_agree: bool) -> None:
        """RunError on all ranks, with what differs between them."""
        assert self._fingerprint is not None
        rows = [int(row) for batch in batches for row in batch.rows]
        share = self.parallel.assignment.rank
        read = (share, f"{[batch.bucket.name for batch in batches]}, rows {rows}")
        found = self._context.all_gather((self._fingerprint.describe(), read))
        if planned_agree:
            what = f"step {self._fingerprint.step}: processes that share a clip have read different ones"
            raise RunError(describe_read([part[1] for part in found], what))
        what = f"step {self._fingerprint.step}: the processes do not agree on the step"
        raise RunError(describe_difference([part[0] for part in found], what))

    def gather_bad_clips(self, batches: Sequence[Batch]) -> list[BadClip]:
        """Clips of the last step that could not be read, on all ranks."""
        own = [clip for batch in batches for clip in batch.bad]
        if self._planned is None or not self._num_bad:
            return own
        return [clip for part in self._context.all_gather(own) for clip in part]

    def name_culprits(self, batches: Sequence[Batch]) -> str:
        """The batches of a step whose loss is not finite, in words; all ranks call it."""
        rows = [int(row) for batch in batches for row in batch.rows]
        own = f"bucket {batches[0].bucket.name}, manifest rows {rows[:8]}"
        if self._planned is None:
            return own
        found = self._context.all_gather((all(bool(total.isfinite()) for total in self._totals), own))
        guilty = [f"rank {rank}: {text}" for rank, (finite, text) in enumerate(found) if not finite]
        # Losses may all be finite and a gradient not; then any of them may have it.
        return "; ".join(guilty[:4]) or f"rank 0: {found[0][1]}"


def describe_difference(facts: Sequence[Mapping[str, str]], what: str) -> str:
    """`facts` by rank; of those that differ, each value with the ranks that have it."""
    lines = []
    for name in facts[0]:
        values: dict[str, list[int]] = {}
        for rank, found in enumerate(facts):
            values.setdefault(found[name], []).append(rank)
        if len(values) > 1:
            lines += [f"  {name}: {_ranks(ranks)}: {value}" for value, ranks in values.items()]
    return f"{what}; nothing was changed\n" + "\n".join(lines)


def describe_read(read: Sequence[tuple[int, str]], what: str) -> str:
    """`read` is by process (number of its share of the data, what it read); shares that were read in several ways."""
    shares: dict[int, list[tuple[int, str]]] = {}
    for rank, (share, text) in enumerate(read):
        shares.setdefault(share, []).append((rank, text))
    lines = [
        f"  rank {rank} read {text}"
        for members in shares.values()
        if len({text for _, text in members}) > 1
        for rank, text in members
    ]
    return f"{what}; nothing was changed\n" + "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NUM_SHOWN]))
    more = f" and {len(ranks) - _NUM_SHOWN} more" if len(ranks) > _NUM_SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
