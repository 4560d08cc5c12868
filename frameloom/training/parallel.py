"""How the ranks of a run divide it: data, weights, optimizer state, tokens, and the tensors of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from frameloom.checkpoint.reader import Checkpoint, StoredCheckpoint
from frameloom.checkpoint.resharding import read_own
from frameloom.config.schema.parallel import MeshShape, ParallelSection, step_shares
from frameloom.data.order.rank_assignment import RankAssignment
from frameloom.distributed.context import Collective, build_mesh
from frameloom.distributed.fsdp import apply_fsdp, expect_backward, gather_whole, match_fsdp_rounding, shard_state
from frameloom.models.precision import Precision
from frameloom.training.optim.optimizer import allocate_state, params_by_name
from frameloom.training.task import Tensors


@dataclass(frozen=True)
class Parallelism:
    """The ranks of a run and how they are arranged; one process alone unless `join_ranks` made it.

    `saving` has a group of its own: a thread that writes checkpoints must not mix its messages with those of a step.
    """

    section: ParallelSection
    device: torch.device
    shape: MeshShape = field(default_factory=MeshShape)
    context: Collective = field(default_factory=Collective)
    saving: Collective = field(default_factory=Collective)
    mesh: DeviceMesh | None = None

    @property
    def shards_weights(self) -> bool:
        return self.section.zero >= 2 and self.mesh is not None

    @property
    def waits_in_passes(self) -> bool:
        """Whether a pass, forward or backward, waits for other ranks."""
        shares = self.section.encoders != "each" or self.shape.sequence > 1
        return self.mesh is not None and (shares or self.section.zero >= 2)

    @property
    def assignment(self) -> RankAssignment:
        """The part of this rank in the data of a step."""
        rank = self.shape.data_rank(self.context.rank)
        return RankAssignment(rank, self.shape.data, step_shares(self.section, self.shape))

    def shard_model(self, model: nn.Module, blocks: Sequence[nn.Module], precision: Precision) -> None:
        """Shard the weights (ZeRO 2 and 3), block by block; one process alone only computes as several do."""
        if self.section.zero < 2:
            return
        if self.mesh is None:
            match_fsdp_rounding(model, blocks)
            return
        # Ranks that share a clip hold different parts too: their gradients are parts of one sum.
        parts = self.shape.shard * self.shape.sequence
        mesh = build_mesh(self.device.type, copies=self.shape.replicate, parts=parts)
        mesh = mesh if self.shape.replicate > 1 else mesh["parts"]
        apply_fsdp(model, blocks, mesh, keep_gathered=self.section.zero == 2, gather=precision.gather_dtype)

    def shard_optimizer(self, optimizer: Optimizer) -> None:
        """Leave this rank the state of a part of the weights (ZeRO 1)."""
        if self.section.zero == 1 and self.mesh is not None and self.shape.shard > 1:
            group, index = self.mesh.get_group("shard"), self.mesh.get_local_rank("shard")
            ranks, params = dist.get_process_group_ranks(group), params_by_name(optimizer)
            shard_state(optimizer, params, group, index=index, ranks=ranks, allocate=allocate_state)

    def expect_backward(self, model: nn.Module, *, is_last: bool) -> None:
        """A forward and backward pass comes; sharded gradients are sent with the last one of a step only."""
        if self.shards_weights:
            expect_backward(model, is_last=is_last, keep_gathered=self.section.zero == 2)

    def gather_tensors(self, tensors: Tensors) -> Tensors:
        """Whole tensors on the first rank; on the others nothing."""
        # The ranks of a shard group have all tensors between them, where some have what others lack.
        return tensors if self.mesh is None else gather_whole(tensors, self.mesh.get_group("shard"))

    def read_checkpoint(self, stored: StoredCheckpoint, own: Tensors) -> Checkpoint:
        """What this rank needs of a checkpoint; `own` are its tensors now."""
        if self.mesh is None:
            return stored.load()
        held = self.saving.gather({(kind, name) for kind, members in own.items() for name in members})
        known = self.saving.broadcast(set().union(*held))
        with stored.open() as tensors:
            return Checkpoint(stored.step, read_own(tensors, own, known), stored.state)
