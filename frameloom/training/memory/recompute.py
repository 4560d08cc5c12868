"""Recomputing blocks in the backward pass (activation checkpointing): which blocks, and where their inputs wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from frameloom.config.schema.training import RecomputeSection
from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.core.units import parse_bytes
from frameloom.training.memory.activation_offload import HostBuffer

_WHERE = "train.recompute"


def apply_recompute(
    model: nn.Module, blocks: Iterable[nn.Module], settings: RecomputeSection | bool, device: torch.device
) -> None:
    """Recompute what a recipe's `train.recompute` asks for."""
    if not settings:
        return
    if settings is True:
        settings = RecomputeSection()
    if settings.offload and device.type == "cpu":
        raise ConfigError(
            f"{_WHERE}.offload is true, but the run computes on the CPU, whose memory is the host's; set it to false, "
            "or choose a GPU with train.device"
        )
    chosen = choose_blocks(group_blocks(model, blocks), settings)
    buffer = None
    if settings.offload and settings.buffer is not None:
        buffer = HostBuffer(
            parse_bytes(settings.buffer, where="train.recompute.buffer"), pin_memory=torch.cuda.is_available()
        )
    recompute_blocks(chosen, settings.offload, buffer)


def choose_blocks(kinds: Mapping[str, list[nn.Module]], settings: RecomputeSection) -> list[nn.Module]:
    """The first blocks of each kind, as many as the settings say, or each k-th of them.

    The last ones are left out, not the first: their activations are used up before any block is recomputed.
    """
    for kind in settings.blocks:
        refuse_unknown(kind, kinds, what=f"{_WHERE}.blocks")
    chosen = []
    for kind, blocks in kinds.items():
        limit = min(settings.blocks.get(kind, len(blocks)), len(blocks) - settings.skip)
        chosen += blocks[: max(0, limit) : settings.every]
    if not chosen:
        found = ", ".join(f"{len(blocks)} {kind}" for kind, blocks in kinds.items())
        raise ConfigError(
            f"{_WHERE}: skip {settings.skip} and blocks {settings.blocks} leave nothing to recompute of {found}; lower "
            f"skip, raise a number of blocks, or set {_WHERE}: false"
        )
    return chosen


def group_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, list[nn.Module]]:
    """Blocks by kind, which is the name of the list they stand in, each kind in the order given."""
    names = {id(module): name for name, module in model.named_modules()}
    kinds: dict[str, list[nn.Module]] = {}
    for block in blocks:
        parts = [part for part in names[id(block)].split(".") if not part.isdecimal()]
        kinds.setdefault(parts[-1], []).append(block)
    return kinds


def recompute_blocks(blocks: Iterable[nn.Module], offload: bool = False, buffer: HostBuffer | None = None) -> None:
    """Make each block forget its inner activations; results stay equal to the bit, because no block has a random state:
    dropout draws from keys among a block's inputs.

    With `offload` what a block is given waits in host memory for the backward pass: as much as there is, or, with a
    `buffer`, what fits there.
    """
    pin_memory = torch.cuda.is_available()

    def run(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        # Only the block's inputs are saved under this: inside, the checkpoint has hooks of its own.
        waiting: AbstractContextManager[object] = nullcontext()
        if buffer is not None:
            waiting = buffer.keeping(args)
        elif offload:
            waiting = save_on_cpu(pin_memory=pin_memory)
        with waiting:
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    for block in blocks:
        block.forward = partial(run, block.forward)
