"""The noise of training samples: keyed draws, stratified levels, offsets and perturbations.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.random import bits_at, key, numpy_stream, uniform_at
from frameloom.data.loading.batch import Batch
from frameloom.diffusion.noise_levels import stratify
from frameloom.diffusion.objectives import NoiseSettings, offset_noise


def apply_noise_options(
    settings: NoiseSettings, noise_BCFHW: Tensor, seed: int, batch: Batch
) -> tuple[Tensor, Tensor | None]:
    """Noise with its offset, and the perturbation that is in the noisy latent and not in the target."""
    num_channels = noise_BCFHW.shape[1] if settings.noise_offset_per == "channel" else 1
    device, perturbation_BCFHW = noise_BCFHW.device, None
    if settings.input_perturbation:
        shape = tuple(noise_BCFHW.shape[1:])
        drawn_BCFHW = draw_normal(seed, "input perturbation", batch, shape, device)
        perturbation_BCFHW = settings.input_perturbation * drawn_BCFHW
    if settings.noise_offset:
        offset_BC = draw_normal(seed, "noise offset", batch, (num_channels,), device)
        noise_BCFHW = offset_noise(noise_BCFHW, offset_BC, settings.noise_offset)
    return noise_BCFHW, perturbation_BCFHW


def draw_levels(seed: int, batch: Batch, num_strata: int = 1) -> Tensor:
    """A uniform number per sample, on the host. Of `num_strata` slots that follow each other, each has its own part.

    A slot counts the samples of an epoch over all processes, so the numbers do not depend on how a step is split.
    """
    drawn_B = draw_uniform(seed, "timestep", batch)
    if num_strata == 1:
        return drawn_B
    stratum_B = np.empty(len(batch.sample_indices), dtype=np.int64)
    groups = batch.sample_indices // num_strata
    for group in np.unique(groups).tolist():
        # A shuffled order: where in a step a sample stands must not tell its noise level.
        order = numpy_stream(seed, "timestep strata", batch.epoch, group).permutation(num_strata)
        inside = groups == group
        stratum_B[inside] = order[batch.sample_indices[inside] % num_strata]
    return stratify(drawn_B, torch.from_numpy(stratum_B), num_strata)


def draw_normal(seed: int, purpose: str, batch: Batch, shape_CFHW: tuple[int, ...], device: torch.device) -> Tensor:
    """Standard normal numbers of shape B + `shape_CFHW`, each sample's from a stream of its own."""
    drawn_BCFHW = torch.empty((len(batch.sample_indices), *shape_CFHW), device=device)
    generator = torch.Generator(device)
    # torch takes signed 64-bit seeds.
    seeds_B = draw_seeds(seed, purpose, batch) >> np.uint64(1)
    for sample, sample_seed in zip(drawn_BCFHW.unbind(), seeds_B.tolist(), strict=True):
        sample.normal_(generator=generator.manual_seed(sample_seed))
    return drawn_BCFHW


def draw_seeds(seed: int, purpose: str, batch: Batch) -> NDArray[np.uint64]:
    """64 random bits per sample; all samples at once, since a digest for each costs a fifth of the drawing of noise."""
    return bits_at(key(seed, purpose, batch.epoch), batch.sample_indices)


def draw_uniform(seed: int, purpose: str, batch: Batch) -> Tensor:
    """One number in [0, 1) per sample, on the host, in double precision; all samples at once."""
    return torch.from_numpy(uniform_at(key(seed, purpose, batch.epoch), batch.sample_indices))
