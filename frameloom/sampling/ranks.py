"""Several processes that share a list of requests, or the tokens of one clip.

Neighbours may form groups that make one clip together (`sequence`); then the groups share the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch

from frameloom.core.errors import ConfigError, PeerFailed
from frameloom.data.loading.workers import log as worker_log
from frameloom.distributed.context import Collective, process_group
from frameloom.distributed.ranks import Ranks
from frameloom.distributed.sequence_parallel import ALONE, SequenceGroup, divide_ranks
from frameloom.models.denoisers.sequence import use_sequence_group
from frameloom.models.text.base import TextEncoder
from frameloom.models.text.tensor_parallel import TensorEncoder, can_split, find_group
from frameloom.sampling.pipeline import Sampler
from frameloom.sampling.placement import Placement

# A share may take hours longer than another; a process that dies is noticed by torchrun, not by a timeout.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class RankGroup:
    """Which rank this is, how it reaches the others, and which of them make a clip with it; alone by default."""

    ranks: Ranks = field(default_factory=Ranks)
    context: Collective = field(default_factory=Collective)
    sequence: SequenceGroup = ALONE


@contextmanager
def join_ranks(ranks: Ranks, *, sequence: int = 1) -> Iterator[RankGroup]:
    """All processes of this call, in groups of `sequence`; ConfigError when they cannot be divided so."""
    try:
        check_groups(ranks.num_ranks, sequence)
    except ConfigError as error:
        if ranks.local_rank == 0:
            raise
        # All processes of a host find the same; one of them tells it.
        raise PeerFailed(error.exit_code) from error
    if ranks.num_ranks == 1:
        yield RankGroup(ranks)
        return
    on_gpu = sequence > 1 and torch.cuda.is_available()
    with process_group(ranks, on_gpu=on_gpu, timeout=_PATIENCE, keep_warnings=[worker_log]) as context:
        yield RankGroup(ranks, context, divide_ranks(sequence))


def check_groups(num_ranks: int, sequence: int) -> None:
    """ConfigError with the arithmetic when so many processes do not make whole groups."""
    if num_ranks == 1 and sequence > 1:
        raise ConfigError(
            f"--sequence {sequence}: {sequence} processes make a clip together, but this is one; start them: "
            f"torchrun --nproc-per-node {sequence} -m frameloom sample ..."
        )
    if num_ranks % sequence:
        below = num_ranks // sequence * sequence
        fitting = f"{below} or {below + sequence}" if below else str(sequence)
        raise ConfigError(
            f"--sequence {sequence}: {num_ranks} processes / {sequence} leaves a group of {num_ranks % sequence}; "
            f"start {fitting} processes, or choose a divisor of {num_ranks}"
        )


OPTION = "--sequence"


def divide_clips(sampler: Sampler, group: SequenceGroup) -> Sampler:
    """The sampler of one process of `group`; ConfigError when its model's heads cannot be shared by so many."""
    if group.degree == 1:
        return sampler
    use_sequence_group(sampler.denoiser.family, sampler.denoiser.model, group, key=OPTION)
    if not sampler.splits_text:
        return replace(sampler, sequence=group)

    def split(encoder: TextEncoder) -> TextEncoder:
        return TensorEncoder(encoder, find_group(group.name), key=OPTION) if can_split(encoder) else encoder

    text, placement = sampler.text.with_each(split), sampler.placement
    if placement is not None:
        placement = Placement({**placement.parts, "text": text}, placement.device, offload=placement.offload)
    return replace(sampler, sequence=group, text=text, placement=placement)
