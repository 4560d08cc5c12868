"""The other ranks of a training run: agreement on each step, gradients, what is split over them, and checkpoints.

`Peers` is one process alone, which sends nothing; `MeshPeers` is one rank of several, whose mesh has the axes
replicate, shard and sequence. Both stand on `distributed/context.py`, which sends what they decide to send.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.builders.text import TextPipeline
from frameloom.checkpoint.reader import Checkpoint, StoredCheckpoint
from frameloom.checkpoint.resharding import read_own
from frameloom.config.rules.parallel import check_world
from frameloom.config.schema.parallel import MeshShape, step_shares
from frameloom.config.schema.recipe import Recipe
from frameloom.core.device import pick_device
from frameloom.core.errors import RunError
from frameloom.core.files import digest_value
from frameloom.data.loading.batch import BadClip, Batch
from frameloom.data.loading.loader import log as worker_log
from frameloom.data.order.rank_assignment import PlannedStep, RankAssignment
from frameloom.distributed.context import Collective, ProcessGroupCollective, build_mesh, join_host, process_group
from frameloom.distributed.fsdp import (
    add_up_by_block,
    add_up_gradients,
    expect_backward,
    gather_whole,
    scale_gradients,
    split_state,
    split_weights,
)
from frameloom.distributed.ranks import Ranks
from frameloom.distributed.sequence_parallel import join_sequence_group
from frameloom.models.denoisers.base import use_sequence_group
from frameloom.training.agreement import (
    Ballot,
    Claim,
    claim_step,
    count_votes,
    describe_difference,
    describe_mates,
    digest_words,
)
from frameloom.training.memory.oom_split import BatchLimits, Misfit, OutOfRoom
from frameloom.training.optim.optimizer import allocate_state, params_by_name
from frameloom.training.stragglers import Pace
from frameloom.training.text_sharing import OnceEncoder, SplitEncoder, split_text

Tensors = dict[str, dict[str, Tensor]]
_SIGNALS = {"sigint": signal.SIGINT, "sigterm": signal.SIGTERM}
# Places for losses in the sum of a step: a process that has none, since a pass did not fit, sends as many numbers.
_MOST_TOTALS = 24


class Peers:
    """One process alone. `MeshPeers` overrides what several processes do otherwise.

    A step calls, in this order: `begin`; for each micro-batch `expect`; after the last backward pass `join`.
    """

    splits_weights = False
    """whether a forward pass needs all processes at once"""
    shares_text = False
    """whether a text is encoded by several processes at once"""
    passes_together = False
    """whether a pass, forward or backward, waits for other processes"""

    splits_state = False
    """whether weights or optimizer state are in parts on several processes"""

    def __init__(
        self, shares: RankAssignment | None = None, *, zero: int = 0, context: Collective | None = None
    ) -> None:
        self.shares = shares or RankAssignment()
        self.zero = zero
        self.context = context or Collective()
        self.checkpoint_collective = Collective()
        self._has_failed = False

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def num_ranks(self) -> int:
        return self.context.size

    @property
    def is_first(self) -> bool:
        """Whether this process logs, writes files and shows progress."""
        return self.rank == 0

    # A step

    def begin(self, step: int, planned: PlannedStep) -> None:
        """Say which step comes next."""

    def count_samples(self, batches: Sequence[Batch]) -> int:
        """Samples of the step, on all processes."""
        return sum(len(batch.rows) for batch in batches if not batch.is_filler)

    def count_passes(self, batches: Sequence[Batch], limits: BatchLimits) -> list[int]:
        """Into how many pieces each micro-batch is cut."""
        return [limits.count_pieces(batch.bucket.name, batch.size) for batch in batches]

    def expect(self, *, is_last: bool) -> None:
        """A forward and backward pass comes; gradients are sent with the last one of a step only."""

    def join(
        self,
        totals: Mapping[str, Tensor],
        batches: Sequence[Batch],
        params: Sequence[nn.Parameter],
        misfit: Misfit | None = None,
    ) -> dict[str, Tensor]:
        """Add up `totals` and the gradients over all processes, after a look whether they did the same step.

        `misfit` is what did not fit in memory here; if there is one anywhere, all raise OutOfRoom instead.
        """
        if misfit is not None:
            raise OutOfRoom([misfit])
        return dict(totals)

    def agree_to_stop(self, asked: int | None) -> int | None:
        """The signal at which all stop now; `asked` is the one that this process got."""
        return asked

    def ask_to_stop(self, number: int) -> None:
        """This process got a signal; may be called from its handler."""

    def note_failure(self) -> None:
        """Something went wrong beside the steps, in a thread; may be called from it."""
        self._has_failed = True

    def agree_on_failure(self) -> bool:
        """Whether some process had noted a failure when the last step was taken."""
        return self._has_failed

    def take_bad_clips(self, batches: Sequence[Batch]) -> list[BadClip]:
        """Clips of the last step that could not be read, on all processes."""
        return [clip for batch in batches for clip in batch.bad]

    def name_culprits(self, batches: Sequence[Batch]) -> str:
        """The batches of a step whose loss is not finite, in words; all processes call it."""
        rows = [int(row) for batch in batches for row in batch.rows]
        return f"bucket {batches[0].bucket.name}, manifest rows {rows[:8]}"

    # What is split

    def split_model(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Split the weights of `model`, block by block; alone, only compute as those who do."""
        if self.zero >= 2:
            add_up_by_block(model, blocks)

    def share_tokens(self, denoiser: LoadedDenoiser) -> None:
        """Let the processes that see the same clip divide its tokens."""

    def split_optimizer(self, optimizer: Optimizer) -> None:
        """Leave each process the state of a part of the weights."""

    def share_text(self, text: TextPipeline) -> TextPipeline:
        """The text encoders as these processes use them together."""
        return text

    # Files

    def collect(self, tensors: Tensors) -> Tensors:
        """Whole tensors on the first process; on the others nothing."""
        return tensors

    def read(self, stored: StoredCheckpoint, own: Tensors) -> Checkpoint:
        """What this process needs of a checkpoint; `own` are its tensors now."""
        return stored.load()


class MeshPeers(Peers):
    """One of several processes. Made by `join_peers`."""

    def __init__(self, recipe: Recipe, shape: MeshShape, context: Collective, device: torch.device) -> None:
        section = recipe.parallel
        super().__init__(
            RankAssignment(shape.data_rank(context.rank), shape.data, step_shares(section, shape)),
            zero=section.zero,
            context=context,
        )
        self.shape, self.device = shape, device
        self._gather_bf16 = section.gather == "bf16"
        self.splits_weights = section.zero >= 2
        # FSDP averages over processes where a sum is meant. The loss could be multiplied instead, but then gradients
        # in fp16 would overflow earlier than without splitting.
        self._split_factor = float(shape.num_ranks)
        self.mesh = build_mesh(device.type, replicate=shape.replicate, shard=shape.shard, sequence=shape.sequence)
        self._recipe = digest_value(recipe.model_dump(mode="json"))[:12]
        self._encoders, self._tensor = section.encoders, section.tensor
        self.shares_text = section.encoders != "each"
        self.passes_together = self.splits_weights or self.shares_text or shape.mates > 1
        self._host = join_host()
        self._model: nn.Module | None = None
        self._claim: Claim | None = None
        self._planned: PlannedStep | None = None
        self._num_planned = 0
        self._totals: tuple[Tensor, ...] = ()
        self._num_bad = 0
        self._asked: int | None = None
        self._agreed: int | None = None
        self._pace = Pace(context, device)
        self._failures_agreed = False
        self.splits_state = section.zero > 0
        # Checkpoints may be written by a thread, whose messages must not get between those of a step.
        limit = timedelta(seconds=section.timeout_s)
        self.checkpoint_collective = ProcessGroupCollective(dist.new_group(backend="gloo", timeout=limit))

    # A step

    def begin(self, step: int, planned: PlannedStep) -> None:
        self._claim = claim_step(step, planned, self._recipe)
        self._planned, self._num_planned = planned, planned.num_samples

    def count_samples(self, batches: Sequence[Batch]) -> int:
        return self._num_planned

    def count_passes(self, batches: Sequence[Batch], limits: BatchLimits) -> list[int]:
        """Where a pass waits for others, all processes take as many in a round as the one that needs most."""
        if not self.passes_together:
            return super().count_passes(batches, limits)
        assert self._planned is not None
        plan, names, first = self._planned.plan, self._planned.names, self._planned.first
        sizes = np.diff(plan.starts[first : self._planned.end + 1])
        return [
            max(limits.count_pieces(names[plan.buckets[index]], int(sizes[index - first])) for index in dealt)
            for dealt in self._planned.deal()[0].tolist()
        ]

    def expect(self, *, is_last: bool) -> None:
        if self._model is not None:
            self._pace.wait()
            expect_backward(self._model, is_last=is_last, keep_gathered=self.zero == 2)

    def join(
        self,
        totals: Mapping[str, Tensor],
        batches: Sequence[Batch],
        params: Sequence[nn.Parameter],
        misfit: Misfit | None = None,
    ) -> dict[str, Tensor]:
        sums = self._vote(totals, batches, misfit)
        assert self._claim is not None
        self._pace.compare(self._claim.step)
        if sums["misfits"]:
            raise OutOfRoom([found for found in self.context.all_gather(misfit) if found is not None])
        num_read = sums.pop("samples") / self.shape.mates
        missing = self._num_planned / num_read if num_read else math.nan
        add_up_gradients(params, None)
        scale_gradients([param for param in params if not isinstance(param, DTensor)], missing)
        scale_gradients([param for param in params if isinstance(param, DTensor)], missing * self._split_factor)
        self._pace.begin()
        factor = missing / self.shape.mates
        return {name: torch.tensor(sums[name] * factor, dtype=torch.float64) for name in totals}

    def _vote(self, totals: Mapping[str, Tensor], batches: Sequence[Batch], misfit: Misfit | None) -> dict[str, float]:
        """One sum over all processes: the losses, what else they must know of each other, and whether they agree."""
        assert self._claim is not None
        self._pace.wait()
        own = [batch for batch in batches if not batch.is_filler]
        asked = self._asked
        ballot = Ballot(
            self._claim.words(),
            self._read_words(batches),
            self.shape.mates,
            self.rank % self.shape.mates == 0,
            {
                "samples": float(sum(len(batch.rows) for batch in own)),
                "bad": float(sum(len(batch.bad) for batch in own)),
                "misfits": float(misfit is not None),
                "failures": float(self._has_failed),
                **{name: float(asked == number) for name, number in _SIGNALS.items()},
            },
        )
        said = torch.tensor(ballot.pack(), dtype=torch.float64, device=self.device)
        self._totals = tuple(totals.values())
        assert len(totals) <= _MOST_TOTALS
        losses = [total.to(self.device, torch.float64).reshape(1) for total in totals.values()]
        vector = torch.cat([said, *losses, said.new_zeros(_MOST_TOTALS - len(totals))])
        self.context.sum(vector)
        count = count_votes(vector.tolist()[: len(said) + len(totals)], self.num_ranks, [*ballot.sums, *totals])
        if not count.is_agreed:
            self._refuse(batches, count.claims_agree)
        self._num_bad = int(count.sums["bad"])
        self._failures_agreed = bool(count.sums["failures"])
        self._agreed = next((int(number) for name, number in _SIGNALS.items() if count.sums[name]), None)
        return count.sums

    def _read_words(self, batches: Sequence[Batch]) -> list[int]:
        rows = np.concatenate([batch.rows for batch in batches])
        return digest_words([(batch.epoch, batch.index, batch.bucket.name) for batch in batches], rows)

    def _refuse(self, batches: Sequence[Batch], claims_agree: bool) -> None:
        """RunError on all processes, with what differs between them."""
        assert self._claim is not None
        rows = [int(row) for batch in batches for row in batch.rows]
        read = (self.shares.rank, f"{[batch.bucket.name for batch in batches]}, rows {rows}")
        found = self.context.all_gather((self._claim.facts(), read))
        if claims_agree:
            what = f"step {self._claim.step}: processes that share a clip have read different ones"
            raise RunError(describe_mates([part[1] for part in found], what))
        what = f"step {self._claim.step}: the processes do not agree on the step"
        raise RunError(describe_difference([part[0] for part in found], what))

    def agree_to_stop(self, asked: int | None) -> int | None:
        return self._agreed

    def ask_to_stop(self, number: int) -> None:
        self._asked = number

    def agree_on_failure(self) -> bool:
        return self._failures_agreed

    def take_bad_clips(self, batches: Sequence[Batch]) -> list[BadClip]:
        if not self._num_bad:
            return []
        return [clip for part in self.context.all_gather(super().take_bad_clips(batches)) for clip in part]

    def name_culprits(self, batches: Sequence[Batch]) -> str:
        is_finite = all(bool(total.isfinite()) for total in self._totals)
        found = self.context.all_gather((is_finite, super().name_culprits(batches)))
        guilty = [f"rank {rank}: {text}" for rank, (finite, text) in enumerate(found) if not finite]
        # Losses may all be finite and a gradient not; then any of them may have it.
        return "; ".join(guilty[:4]) or f"rank 0: {found[0][1]}"

    # What is split

    def split_model(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        if not self.splits_weights:
            return
        # Processes that share a clip hold different parts too: their gradients are parts of one sum.
        parts = self.shape.shard * self.shape.sequence
        mesh = build_mesh(self.device.type, copies=self.shape.replicate, parts=parts)
        split_weights(
            model,
            blocks,
            mesh if self.shape.replicate > 1 else mesh["parts"],
            keep_gathered=self.zero == 2,
            gather_bf16=self._gather_bf16,
        )
        self._model = model

    def share_tokens(self, denoiser: LoadedDenoiser) -> None:
        if self.shape.sequence == 1:
            return
        # Gradients of all processes are added up, those of one clip's parts among them.
        group = join_sequence_group(self.mesh.get_group("sequence"), reduction="sum")
        use_sequence_group(denoiser.family, denoiser.model, group)

    def split_optimizer(self, optimizer: Optimizer) -> None:
        if self.zero == 1 and self.shape.shard > 1:
            group = self.mesh.get_group("shard")
            index = self.mesh.get_local_rank("shard")
            ranks, params = dist.get_process_group_ranks(group), params_by_name(optimizer)
            split_state(optimizer, params, group, index=index, ranks=ranks, allocate=allocate_state)

    def share_text(self, text: TextPipeline) -> TextPipeline:
        if self._encoders == "each":
            return text
        if self._encoders == "shard":
            mesh = build_mesh(self.device.type, encoders=self.num_ranks)
            return text.with_each(lambda encoder: SplitEncoder(encoder, self.device, mesh))
        if self._encoders == "tensor":
            return split_text(text, self._tensor, self.device)
        # Several encoders of a machine are kept by different processes, which spreads their memory.
        size = dist.get_world_size(self._host)
        places = {id(encoder): number % size for number, encoder in enumerate(text.encoders)}
        return text.with_each(lambda encoder: OnceEncoder(encoder, self.device, self._host, owner=places[id(encoder)]))

    # Files

    def collect(self, tensors: Tensors) -> Tensors:
        return gather_whole(tensors, self._state_group())

    def read(self, stored: StoredCheckpoint, own: Tensors) -> Checkpoint:
        held = self.checkpoint_collective.gather({(kind, name) for kind, members in own.items() for name in members})
        known = self.checkpoint_collective.broadcast(set().union(*held))
        with stored.open() as tensors:
            return Checkpoint(stored.step, read_own(tensors, own, known), stored.state)

    def _state_group(self) -> dist.ProcessGroup:
        """Processes that have all tensors between them, where some have what others lack."""
        return self.mesh.get_group("shard")


@contextmanager
def join_peers(recipe: Recipe, ranks: Ranks) -> Iterator[Peers]:
    """The processes of a run, from the first word to the last; ConfigError when they cannot share the recipe."""
    shape = check_world(recipe, ranks.num_ranks)
    if ranks.num_ranks == 1:
        yield Peers(RankAssignment(num_shares=step_shares(recipe.parallel, shape)), zero=recipe.parallel.zero)
        return
    device, timeout = pick_device(recipe.train.device), timedelta(seconds=recipe.parallel.timeout_s)
    if device.type == "cuda":
        device = torch.device("cuda", ranks.local_rank)
    on_gpu = device.type == "cuda"
    with process_group(ranks, on_gpu=on_gpu, timeout=timeout, keep_warnings=[worker_log]) as context:
        yield MeshPeers(recipe, shape, context, device)
