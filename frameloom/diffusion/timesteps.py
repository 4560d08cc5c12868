"""How noise levels are drawn: some of them more often, and in strata.

In strata each sample of a step (each process, in the published trainers) draws from its own part of all levels. Over a
step the levels are then spread evenly, which makes its loss less noisy.

Shape letters: B batch, T noise levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError

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
