"""Clips that several processes make together: each has a part of the tokens, all have the weights of the denoiser."""

from __future__ import annotations

from dataclasses import replace

from frameloom.distributed.sequence_parallel import SequenceGroup
from frameloom.generate.pipeline import Sampler
from frameloom.generate.placement import Placement
from frameloom.models.denoisers.sequence import use_sequence_group
from frameloom.models.text.base import TextEncoder
from frameloom.models.text.tensor_parallel import TensorEncoder, can_split, find_group

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
