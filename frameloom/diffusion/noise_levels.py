"""Noise levels of training: stratified draws, and the profile of an objective over levels.

Shape letters: B batch, L bands of the noise level, F frames, H height, W width.

With stratified levels, each sample of a step (each process, in the published trainers) draws from its own part of all
levels. The levels of a step are then spread evenly, which makes its loss less noisy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from frameloom.diffusion.objectives import Objective


def stratify(uniform_B: Tensor, stratum_B: Tensor, num_strata: int) -> Tensor:
    """Uniform numbers in [0, 1) moved into the part that each is given; over all parts they stay uniform."""
    return (stratum_B + uniform_B.double()) / num_strata


# Draws of the quadrature: the midpoints of this many equal parts of [0, 1).
NUM_DRAWS = 200_000


@dataclass(frozen=True)
class Profile:
    """Values in the middle of equal bands of the noise level, in float64.

    density          of the distribution; its mean over the bands is 1
    weight           what the squared error of the network's target is multiplied by
    pull             density * weight: how much of the training goes to a level
    noise_pull       the same for the error of the noise that the prediction implies, which compares objectives that
                     predict different things; infinite where nothing of the latent is left
    share            the part of all draws that falls on the band
    """

    level_L: Tensor
    density_L: Tensor
    weight_L: Tensor
    pull_L: Tensor
    noise_pull_L: Tensor
    share_L: Tensor

    def mean(self, values_L: Tensor) -> float:
        """Over all draws."""
        return float((self.share_L * values_L).sum())

    def pull_middle(self) -> float:
        """The noise level that has half of the pull below it."""
        running_L = torch.cumsum(self.pull_L, dim=0)
        half = running_L[-1] / 2
        band = int((running_L >= half).nonzero()[0])
        before = running_L[band - 1] if band else torch.zeros(())
        inside = float((half - before) / self.pull_L[band])
        return (band + inside) / len(self.level_L)


def band_levels(num_bands: int) -> Tensor:
    """The middles of equal bands of the noise level."""
    return (torch.arange(num_bands, dtype=torch.float64) + 0.5) / num_bands


def band_shares(objective: Objective, latent: Tensor, num_bands: int, *, num_draws: int = NUM_DRAWS) -> Tensor:
    """[L], the part of the distribution's draws that falls on each band, by quadrature over the uniform draw."""
    uniform = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    level = objective.coefficients(objective.timesteps(uniform, latent)).noise_level
    band = (level * num_bands).long().clamp(0, num_bands - 1)
    return torch.bincount(band, minlength=num_bands).double() / num_draws


def profile_objective(objective: Objective, shape_FHW: tuple[int, int, int], *, num_bands: int = 50) -> Profile:
    """Of an objective on latents of this size, which only some distributions depend on."""
    latent = torch.empty(1, 1, *shape_FHW, device="meta")
    level_L = band_levels(num_bands)
    share_L = band_shares(objective, latent, num_bands)
    closed_L = objective.density(level_L, latent)
    density_L = share_L * num_bands if closed_L is None else closed_L
    timestep_L = objective.timestep_at(level_L)
    weight_L = objective.weight(timestep_L)
    pull_L = density_L * weight_L
    noise_pull_L = pull_L * objective.coefficients(timestep_L).noise_error_factor()
    return Profile(level_L, density_L, weight_L, pull_L, noise_pull_L, share_L)
