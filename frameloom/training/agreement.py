"""Agreement between ranks: one vector, summed over all of them, tells whether they do the same step.

Each process claims a step: its number, position in the plan, buckets, samples and recipe. The vector travels with the
losses of the step. Three 16-bit words w of the
claim's digest travel as w and w²: W Σw² = (Σw)² only if all W words are equal (Cauchy-Schwarz), and sums of integers
below 2^53 are exact in float64. What was really read may differ between processes, but not between those that see the
same clips: the first of such mates adds (n - 1) times its words, the others subtract theirs, and the sum is zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frameloom.data.order.rank_assignment import PlannedStep

NUM_WORDS = 3
_NUM_SHOWN = 6


@dataclass(frozen=True)
class Claim:
    """A step as one process sees it, the same on all; `shapes` counts the micro-batches of each bucket, by name."""

    step: int
    epoch: int
    microbatches: tuple[int, int]
    shapes: dict[str, int]
    buckets: NDArray[np.int32]
    rows: NDArray[np.int64]
    recipe: str

    def words(self) -> list[int]:
        named = [self.step, self.epoch, self.microbatches, self.shapes, self.recipe]
        return digest_words(named, self.buckets, self.rows)

    def facts(self) -> dict[str, str]:
        """Its parts as texts, to be compared when the digests differ."""
        shown = ", ".join(str(row) for row in self.rows[:_NUM_SHOWN])
        return {
            "step": str(self.step),
            "epoch": str(self.epoch),
            "micro-batches": f"{self.microbatches[0]} to {self.microbatches[1] - 1}",
            "buckets": ", ".join(f"{count} x {name}" for name, count in self.shapes.items()),
            "order of buckets": digest_text(self.buckets.tobytes()),
            "samples": f"{len(self.rows)} rows ({shown}{', …' if len(self.rows) > _NUM_SHOWN else ''}), digest "
            f"{digest_text(self.rows.tobytes())}",
            "recipe": self.recipe,
        }


def claim_step(step: int, planned: PlannedStep, recipe: str) -> Claim:
    """`recipe` is a digest of all its keys."""
    span = planned.first, planned.end
    return Claim(step, planned.epoch, span, planned.count_shapes(), planned.buckets, planned.rows(), recipe)


def digest_words(value: Any, *arrays: NDArray[np.integer]) -> list[int]:
    """Three 16-bit words; `value` must have a repr that says all of it."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=2 * NUM_WORDS)
    for array in arrays:
        digest.update(array.astype(np.int64).tobytes())
    return [int(word) for word in np.frombuffer(digest.digest(), dtype="<u2")]


def digest_text(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


@dataclass
class Ballot:
    """What a process adds to the sum of a step; `sums` are added up as they are."""

    claimed: list[int]
    read: list[int]
    num_mates: int = 1
    is_first_mate: bool = True
    sums: dict[str, float] = field(default_factory=dict)

    def pack(self) -> list[float]:
        sign = self.num_mates - 1 if self.is_first_mate else -1
        return [
            *map(float, self.claimed),
            *(float(word * word) for word in self.claimed),
            *(float(sign * word) for word in self.read),
            *self.sums.values(),
        ]


@dataclass(frozen=True)
class Count:
    """The summed vector of all processes, taken apart."""

    claims_agree: bool
    mates_agree: bool
    sums: dict[str, float]

    @property
    def is_agreed(self) -> bool:
        return self.claims_agree and self.mates_agree


def count_votes(total: Sequence[float], num_ranks: int, names: Sequence[str]) -> Count:
    """`total` is the sum over all processes; `names` are those of `Ballot.sums`, in order."""
    words, squares, read = (total[part * NUM_WORDS : (part + 1) * NUM_WORDS] for part in range(3))
    agree = all(num_ranks * int(square) == int(word) ** 2 for word, square in zip(words, squares, strict=True))
    sums = dict(zip(names, total[3 * NUM_WORDS :], strict=True))
    return Count(agree, not any(read), sums)


def describe_difference(facts: Sequence[Mapping[str, str]], what: str) -> str:
    """`facts` by process; of those that differ, each value with the processes that have it."""
    lines = []
    for name in facts[0]:
        values: dict[str, list[int]] = {}
        for rank, found in enumerate(facts):
            values.setdefault(found[name], []).append(rank)
        if len(values) > 1:
            lines += [f"  {name}: {_ranks(ranks)}: {value}" for value, ranks in values.items()]
    return f"{what}; nothing was changed\n" + "\n".join(lines)


def describe_mates(read: Sequence[tuple[int, str]], what: str) -> str:
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
