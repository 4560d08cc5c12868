"""Large text encoders on several processes: one process of a machine encodes for all, or each holds a part.

To split them is to keep a part of every layer and gather the layer when it comes (`SplitEncoder`), or to compute a part
of every layer (`TensorEncoder`): the one sends weights, the other states. All need every process of the group to encode
equally often; a step has as many rounds on all of them.

Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from frameloom.builders.text import TextPipeline
from frameloom.core.errors import ConfigError
from frameloom.distributed.context import build_mesh, join_host
from frameloom.models.text.base import TextEncoder, TextStates
from frameloom.models.text.tensor_parallel import SharedEncoder, TensorEncoder, can_split
from frameloom.training.parallel import Parallelism


class OnceEncoder(SharedEncoder):
    """Process `owner` of the group encodes the captions of all and sends the states; the others hold no weights."""

    def __init__(self, inner: TextEncoder, device: torch.device, group: dist.ProcessGroup, *, owner: int) -> None:
        super().__init__(inner, device)
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._owner = self._ranks[owner]

    def encode(self, captions: Sequence[str]) -> TextStates:
        is_owner = dist.get_rank() == self._owner
        asked: list[Any] | None = [None] * len(self._ranks) if is_owner else None
        dist.gather_object(list(captions), asked, dst=self._owner, group=self._group)
        if asked is not None:
            return self._encode_all(asked)
        count, device = len(captions), self.device
        tokens_BKD = torch.empty(count, self.max_length, self.width, device=device)
        mask_BK = torch.empty(count, self.max_length, dtype=torch.uint8, device=device)
        pooled_BD = torch.empty(count, self.pooled_width, device=device)
        for tensor in (tokens_BKD, mask_BK, pooled_BD):
            dist.recv(tensor, src=self._owner, group=self._group)
        return TextStates(tokens_BKD, mask_BK.bool(), pooled_BD)

    def _encode_all(self, asked: Sequence[Sequence[str]]) -> TextStates:
        """Each different caption once; the own states, after those of the others are sent."""
        different = list(dict.fromkeys(caption for captions in asked for caption in captions))
        device = self.device
        states = self.inner.to(device).encode(different)
        index_of = {caption: index for index, caption in enumerate(different)}
        own, sent = None, []
        for rank, captions in zip(self._ranks, asked, strict=True):
            chosen = torch.tensor([index_of[caption] for caption in captions], device=device)
            part = [tensor[chosen].contiguous() for tensor in vars(states).values()]
            if rank == self._owner:
                own = TextStates(*part)
                continue
            tokens_BKD, mask_BK, pooled_BD = part
            for tensor in (tokens_BKD, mask_BK.to(torch.uint8), pooled_BD):
                sent.append((tensor, dist.isend(tensor, dst=rank, group=self._group)))
        for _, work in sent:
            assert work is not None
            work.wait()
        assert own is not None
        return own

    def unload(self) -> None:
        self.inner.unload()


class SplitEncoder(SharedEncoder):
    """Each process holds a part of every layer, gathers a layer when it comes to it, and encodes its own captions."""

    def __init__(self, inner: TextEncoder, device: torch.device, mesh: DeviceMesh, *, batch_size: int = 16) -> None:
        super().__init__(inner, device)
        self._mesh, self._batch_size = mesh, batch_size
        self._is_split = False

    def encode(self, captions: Sequence[str]) -> TextStates:
        self._split()
        size = self._batch_size
        pieces = [list(captions[start : start + size]) for start in range(0, len(captions), size)]
        most = torch.tensor(len(pieces), device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._mesh.get_group())
        parts = [self.inner.encode(piece) for piece in pieces]
        for _ in range(int(most) - len(pieces)):
            self.inner.encode([""])  # others have more captions, and need this process's part of the layers
        return TextStates.concatenate(parts)

    def _split(self) -> None:
        if self._is_split:
            return
        model = self.inner.to("cpu").load()
        if model is None:
            raise ConfigError(
                f"parallel.encoders is shard, but the text encoder {self.name} has no weights to split; write each"
            )
        # The repeated layers: the members of the list with the most weights.
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = max(lists, key=lambda part: sum(weight.numel() for weight in part.parameters()), default=())
        for module in (*blocks, model):
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
        self.inner.to(self.device)
        self._is_split = True

    def unload(self) -> None:
        """The parts stay: they are small, and reading the whole again would need all processes at once."""


def share_text(text: TextPipeline, parallel: Parallelism) -> TextPipeline:
    """The text encoders as the ranks of a run use them together; all ranks must call it."""
    kind, device = parallel.section.encoders, parallel.device
    if kind == "each" or parallel.mesh is None:
        return text
    if kind == "shard":
        mesh = build_mesh(device.type, encoders=parallel.context.size)
        return text.with_each(lambda encoder: SplitEncoder(encoder, device, mesh))
    if kind == "tensor":
        # Groups of neighbours split the layers of the large encoders; each keeps the others whole.
        group, _ = dist.new_subgroups(parallel.section.tensor)  # type: ignore[no-untyped-call]
        return text.with_each(lambda encoder: TensorEncoder(encoder, group, device) if can_split(encoder) else encoder)
    host = join_host()
    # Several encoders of a machine are kept by different ranks, which spreads their memory.
    size = dist.get_world_size(host)
    owners = {id(encoder): number % size for number, encoder in enumerate(text.encoders)}
    return text.with_each(lambda encoder: OnceEncoder(encoder, device, host, owner=owners[id(encoder)]))
