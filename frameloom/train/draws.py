"""The random numbers of a training sample, each a function of (seed, purpose, epoch, ordinal).

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.random import bits_at, key, uniform_at
from frameloom.data.batch import Batch


def draw_normal(seed: int, purpose: str, batch: Batch, shape_CFHW: tuple[int, ...], device: torch.device) -> Tensor:
    """Standard normal numbers of shape B + `shape_CFHW`, each sample's from a stream of its own."""
    drawn_BCFHW = torch.empty((len(batch.ordinals), *shape_CFHW), device=device)
    generator = torch.Generator(device)
    # torch takes signed 64-bit seeds.
    seeds_B = draw_seeds(seed, purpose, batch) >> np.uint64(1)
    for sample, sample_seed in zip(drawn_BCFHW.unbind(), seeds_B.tolist(), strict=True):
        sample.normal_(generator=generator.manual_seed(sample_seed))
    return drawn_BCFHW


def draw_seeds(seed: int, purpose: str, batch: Batch) -> NDArray[np.uint64]:
    """64 random bits per sample; all samples at once, since a digest for each costs a fifth of the drawing of noise."""
    return bits_at(key(seed, purpose, batch.epoch), batch.ordinals)


def draw_uniform(seed: int, purpose: str, batch: Batch) -> Tensor:
    """One number in [0, 1) per sample, on the host, in double precision; all samples at once."""
    return torch.from_numpy(uniform_at(key(seed, purpose, batch.epoch), batch.ordinals))
