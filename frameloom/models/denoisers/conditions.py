"""Inputs of a denoiser besides the noisy latent, its noise level and the caption.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.models.layers.dropout import DropoutSeeds
from frameloom.models.text.base import TextStates

Encode = Callable[[Tensor], Tensor]
NUM_TIMESTEPS = 1000


class Draws(Protocol):
    """The random numbers of the samples of a batch, each from its own stream; `purpose` keeps draws apart."""

    @property
    def is_training(self) -> bool: ...

    def uniform_B(self, purpose: str) -> Tensor: ...
    def normal(self, purpose: str, shape: tuple[int, ...]) -> Tensor: ...


@dataclass(frozen=True)
class Conditions:
    """Inputs besides the noisy latent, its noise level and the caption; None is "not given".

    beside_BCFHW     latent channels that stand beside the noisy ones (inpaint mask and masked latent, control), in the
                     order of the family's `pack_known`
    sizes_B6         original height and width, crop top and left, target height and width, in pixels
    image_text       captions of single images that follow the clip along F: N for each sample, B * N in this order
    guidance_B       guidance scale that a distilled model takes as an input
    dropout          seeds of the masks of a model with dropout, in training; None: nothing is dropped
    """

    beside_BCFHW: Tensor | None = None
    sizes_B6: Tensor | None = None
    image_text: TextStates | None = None
    guidance_B: Tensor | None = None
    dropout: DropoutSeeds | None = None


NOTHING = Conditions()


def refuse_foreign(given: Conditions, family: str, *, known: Collection[str]) -> None:
    """ConfigError for a condition that the family has no input for: ignoring it would train on something else."""
    for name, value in vars(given).items():
        if value is not None and name not in known:
            raise ConfigError(f"{family}: the model has no input for the condition '{name}'; leave it out")


def find_index(timestep_B: Tensor) -> Tensor:
    """The index of a noise level, as a DDPM counts them; a whole number in float32."""
    return (timestep_B.float() * NUM_TIMESTEPS).round()
