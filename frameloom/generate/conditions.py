"""What a model with more inputs than text is told when only a prompt is given.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.generate.parts import LoadedDenoiser
from frameloom.models.denoisers.base import NOTHING, Conditions
from frameloom.models.vaes import VideoVAE


@dataclass(frozen=True)
class SeedDraws:
    """The random numbers of samples that are made, each from its own seed."""

    seeds: Sequence[int]
    device: torch.device
    is_training: bool = False

    def uniform_B(self, purpose: str) -> Tensor:
        draws = [torch.rand((), generator=stream(seed, purpose)) for seed in self.seeds]
        return torch.stack(draws).to(self.device)

    def normal(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        draws = [torch.randn(shape, generator=stream(seed, purpose)) for seed in self.seeds]
        return torch.stack(draws).to(self.device)


@torch.no_grad()
def text_only(
    denoiser: LoadedDenoiser, vae: VideoVAE, seeds: Sequence[int], size_FHW: tuple[int, int, int], device: torch.device
) -> Conditions:
    """Conditions for text to video: an inpaint model is told that nothing of the clip is known."""
    beside = denoiser.family.beside(denoiser.config)
    if beside == "control":
        raise ConfigError(f"{denoiser.family.name}: a control model needs a control clip and cannot sample from text")
    pack = denoiser.family.pack_known
    if beside == "none" or pack is None:
        return NOTHING
    clip_BCFHW = torch.full((len(seeds), 3, *size_FHW), -1.0, device=device)
    known_B1FHW = torch.zeros(len(seeds), 1, *size_FHW, dtype=torch.uint8, device=device)

    def encode(pixels_BCFHW: Tensor) -> Tensor:
        return vae.normalize(vae.encode(pixels_BCFHW).mode())

    packed = pack(denoiser.config, clip_BCFHW, known_B1FHW, encode, SeedDraws(seeds, device))
    return Conditions(beside_BCFHW=packed)


def twice(given: Conditions) -> Conditions:
    """For a batch that holds every sample two times, one half after the other."""
    doubled: dict[str, Any] = {
        name: torch.cat([part, part]) for name, part in vars(given).items() if isinstance(part, Tensor)
    }
    return dataclasses.replace(given, **doubled)
