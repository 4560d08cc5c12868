"""The orders in which three published trainers hand out their data, for those who must repeat one of their runs.

Our own order is that of `plan`: it follows from the seed and the epoch alone, skips nothing, and survives another
number of processes. These do not: they depend on the number of processes, and lose or repeat rows. They are kept exact,
with the generators that the originals use.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

Batches = list[list[int]]


def group_by_shape(
    shapes: Sequence[Hashable],
    *,
    batch_size: int,
    world_size: int,
    is_grouped: bool = True,
    num_skipped: int = 0,
    seed: int = 42,
    pads: random.Random,
) -> list[int]:
    """Open-Sora-Plan 1.3: rows of one shape together, dealt out in blocks of `world_size * batch_size`.

    Batch k of the result belongs to process k modulo `world_size`, see `deal_batches`. A batch that is short, or that
    holds several shapes, is filled with repeats of its own rows, drawn from `pads`. `num_skipped` blocks at the start
    are left out (steps that are done, times the accumulation).
    """
    generator = torch.Generator().manual_seed(seed)
    rows = _group(shapes, generator) if is_grouped else torch.randperm(len(shapes), generator=generator).tolist()
    width = world_size * batch_size
    blocks = [_deal(rows[start : start + width], batch_size, world_size, pads) for start in range(0, len(rows), width)]
    blocks = [blocks[index] for index in torch.randperm(len(blocks), generator=generator).tolist()]
    if is_grouped:
        blocks = [[unify_batch(batch, shapes, pads) for batch in block] for block in blocks]
    return [row for block in blocks[num_skipped:] for batch in block for row in batch]


def _group(shapes: Sequence[Hashable], generator: torch.Generator) -> list[int]:
    """Largest group first, each shuffled; the first seen goes first among equals."""
    members: dict[Hashable, list[int]] = {}
    for row, shape in enumerate(shapes):
        members.setdefault(shape, []).append(row)
    groups = sorted(members.values(), key=len, reverse=True)
    return [group[place] for group in groups for place in torch.randperm(len(group), generator=generator).tolist()]


def _deal(rows: list[int], batch_size: int, world_size: int, pads: random.Random) -> Batches:
    batches: Batches = []
    for rank in range(world_size):
        batch = rows[rank::world_size]
        if batch:
            batch += [pads.choice(batch) for _ in range(batch_size - len(batch))]
        else:
            batch = list(pads.choice(batches))
        batches.append(batch)
    return batches


def unify_batch(batch: list[int], shapes: Sequence[Hashable], pads: random.Random) -> list[int]:
    """The most frequent shape stays (the one met last among equals); the others become repeats of what stays."""
    counts = Counter(shapes[row] for row in batch)
    if len(counts) == 1:
        return batch
    most = max(counts.values())
    kept_shape = [shape for shape, count in counts.items() if count == most][-1]
    kept = list(dict.fromkeys(row for row in batch if shapes[row] == kept_shape))
    return kept + [pads.choice(kept) for _ in range(len(batch) - len(kept))]


def deal_batches(order: Sequence[int], *, batch_size: int, world_size: int) -> list[Batches]:
    """Whole batches of an order by process: batch k goes to process k modulo `world_size`."""
    batches = [list(order[start : start + batch_size]) for start in range(0, len(order), batch_size)]
    whole = [batch for batch in batches if len(batch) == batch_size]
    return [whole[rank::world_size] for rank in range(world_size)]


@dataclass
class RatioBuckets:
    """CogVideoX-Fun: walk a shuffled list, and hand out a group of rows as soon as it is full.

    `groups` gives the group of each row (its kind and nearest ratio), or None for a row that is left out. Groups that
    are not full stay for the next epoch. Every process makes the same batches and takes each n-th.
    """

    groups: Sequence[Hashable | None]
    batch_size: int
    seed: int = 42
    waiting: dict[Hashable, list[int]] = field(default_factory=dict)

    def permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order: list[int] = torch.randperm(len(self.groups), generator=generator).tolist()
        return order

    def batches(self, epoch: int, *, start: int = 0) -> Iterator[list[int]]:
        """The batches of an epoch, from place `start` of its permutation on."""
        for row in self.permutation(epoch)[start:]:
            group = self.groups[row]
            if group is None:
                continue
            members = self.waiting.setdefault(group, [])
            members.append(row)
            if len(members) == self.batch_size:
                yield self.waiting.pop(group)


@dataclass(frozen=True)
class GridBatches:
    """Open-Sora 2.0: rows by bucket, each with its own batch size; every step takes a batch for each process.

    `buckets` gives the bucket of each row, or a negative number for a row that is left out; `batch_sizes` is by bucket.
    """

    buckets: Sequence[int]
    batch_sizes: Sequence[int]
    world_size: int
    seed: int = 42
    shuffle: bool = True
    drop_last: bool = True

    def num_batches(self) -> int:
        """Whole batches of all buckets; a shorter rest is not counted, though it may be handed out."""
        return sum(len(rows) // self.batch_sizes[bucket] for bucket, rows in self._members().items())

    def steps(self, epoch: int, *, start: int = 0) -> Iterator[list[list[int]]]:
        """For each step of an epoch the batches of all processes, from step `start` on."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        filled = {bucket: self._fill(bucket, rows, generator) for bucket, rows in self._members().items()}
        access = [bucket for bucket, rows in filled.items() for _ in range(len(rows) // self.batch_sizes[bucket])]
        if self.shuffle:
            access = [access[place] for place in torch.randperm(len(access), generator=generator).tolist()]
        rest = len(access) % self.world_size
        if rest:
            access = access[: len(access) - rest] if self.drop_last else access + access[: self.world_size - rest]
        used = dict.fromkeys(filled, 0)
        for step in range(len(access) // self.world_size):
            batches = []
            for bucket in access[step * self.world_size : (step + 1) * self.world_size]:
                size = self.batch_sizes[bucket]
                batches.append(filled[bucket][used[bucket] : used[bucket] + size])
                used[bucket] += size
            if step >= start:
                yield batches

    def _members(self) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for row, bucket in enumerate(self.buckets):
            if bucket >= 0:
                members.setdefault(bucket, []).append(row)
        return members

    def _fill(self, bucket: int, rows: list[int], generator: torch.Generator) -> list[int]:
        """A whole number of batches: the last rows are left out, or the first ones come again."""
        size = self.batch_sizes[bucket]
        rest = len(rows) % size
        if rest:
            rows = rows[: len(rows) - rest] if self.drop_last else rows + rows[: size - rest]
        if not self.shuffle:
            return rows
        return [rows[place] for place in torch.randperm(len(rows), generator=generator).tolist()]
