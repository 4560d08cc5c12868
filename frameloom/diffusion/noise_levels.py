"""Distribution of noise levels in training: biased and stratified draws, and the profile of an objective over levels.

Shape letters: B batch, T noise levels of a DDPM, L bands of the noise level, F frames, H height, W width.

With strata, each sample of a step (each process, in the published trainers) draws from its own part of all levels. The
levels of a step are then spread evenly, which makes its loss less noisy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.diffusion.objective import Objective, level_of, noise_error_factor

BiasStrategy = Literal["none", "earlier", "later", "range"]


@dataclass(frozen=True)
class LevelBias:
    """Some noise levels drawn `multiplier` times as often as the others, as SDXL's `timestep_bias_*` options say it.

    "earlier" are the first levels, of least noise, "later" the last ones: `portion` of all. "range" is `begin` up to,
    and not including, `end`.
    """

    strategy: BiasStrategy = "none"
    multiplier: float = 1.0
    begin: int = 0
    end: int = 1000
    portion: float = 0.25

    def weights_T(self, num_levels: int) -> Tensor:
        """How often each level comes, relative to a level that is not favoured."""
        weights_T = torch.ones(num_levels, dtype=torch.float64)
        count = int(self.portion * num_levels)
        if self.strategy == "earlier":
            weights_T[:count] *= self.multiplier
        elif self.strategy == "later":
            weights_T[num_levels - count :] *= self.multiplier
        elif self.strategy == "range":
            weights_T[self.begin : self.end] *= self.multiplier
        return weights_T


def level_probabilities(num_levels: int, bias: LevelBias | None, within: tuple[int, int] | None) -> Tensor:
    """[T], the probability of each level in float64; levels outside of `within` (end not included) never come."""
    weights_T = torch.ones(num_levels, dtype=torch.float64) if bias is None else bias.weights_T(num_levels)
    if within is not None:
        allowed_T = torch.zeros_like(weights_T)
        allowed_T[within[0] : within[1]] = 1
        weights_T = weights_T * allowed_T
    if not float(weights_T.sum()) > 0:
        raise ConfigError(f"noise levels: none of {num_levels} is left by {bias} and {within}; widen the range")
    return weights_T / weights_T.sum()


def running_sum(probability_T: Tensor) -> Tensor:
    """Of the probabilities up to the last level that can come, for `pick_levels`."""
    last = int(probability_T.nonzero().max())
    return torch.cumsum(probability_T[: last + 1], dim=0)


def pick_levels(draw_B: Tensor, running_T: Tensor) -> Tensor:
    """The level that each uniform draw in [0, 1) falls on, given the `running_sum` of the probabilities."""
    # The sum may end a rounding error below 1.
    return torch.searchsorted(running_T, draw_B.double(), right=True).clamp_max(len(running_T) - 1)


def stratify(draw_B: Tensor, stratum_B: Tensor, num_strata: int) -> Tensor:
    """Uniform draws in [0, 1) moved into the part of [0, 1) that each is given; over all parts they stay uniform."""
    return (stratum_B + draw_B.double()) / num_strata


# Draws of the quadrature: the midpoints of this many equal parts of [0, 1).
NUM_DRAWS = 200_000


@dataclass(frozen=True)
class Profile:
    """Values in the middle of equal bands of the noise level, in float64.

    density          of the law; its mean over the bands is 1
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

    @property
    def mean_level(self) -> float:
        return float((self.share_L * self.level_L).sum())

    @property
    def mean_weight(self) -> float:
        return float((self.share_L * self.weight_L).sum())

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
    """[L], the part of the law's draws that falls on each band, by quadrature over the uniform draw."""
    draw = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    level = level_of(objective.mix_at(objective.place_B(draw, latent)))
    band = (level * num_bands).long().clamp(0, num_bands - 1)
    return torch.bincount(band, minlength=num_bands).double() / num_draws


def profile_objective(objective: Objective, shape_FHW: tuple[int, int, int], *, num_bands: int = 50) -> Profile:
    """Of an objective on latents of this size, which only some laws depend on."""
    latent = torch.empty(1, 1, *shape_FHW, device="meta")
    level_L = band_levels(num_bands)
    share_L = band_shares(objective, latent, num_bands)
    closed_L = objective.density(level_L, latent)
    density_L = share_L * num_bands if closed_L is None else closed_L
    place_L = objective.place_at(level_L)
    weight_L = objective.weight_at(place_L).double()
    pull_L = density_L * weight_L
    return Profile(
        level_L, density_L, weight_L, pull_L, pull_L * noise_error_factor(objective.mix_at(place_L)), share_L
    )
