"""The random numbers of a training sample, each a function of (seed, purpose, epoch, ordinal).

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frameloom.core.random import key, stream_seed, uniform_at
from frameloom.data.batch import Batch


def draw_normal(seed: int, purpose: str, batch: Batch, shape_CFHW: tuple[int, ...], device: torch.device) -> Tensor:
    """Standard normal numbers of shape B + `shape_CFHW`, each sample's from a stream of its own."""
    drawn_BCFHW = torch.empty((len(batch.ordinals), *shape_CFHW), device=device)
    generator = torch.Generator(device)
    for sample, ordinal in zip(drawn_BCFHW.unbind(), batch.ordinals.tolist(), strict=True):
        sample.normal_(generator=generator.manual_seed(stream_seed(seed, purpose, batch.epoch, ordinal)))
    return drawn_BCFHW


def draw_uniform(seed: int, purpose: str, batch: Batch) -> Tensor:
    """One number in [0, 1) per sample, on the host, in double precision; all samples at once."""
    return torch.from_numpy(uniform_at(key(seed, purpose, batch.epoch), batch.ordinals))
