"""What a model with more inputs than text is told: given frames and regions, or that nothing is given.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.denoisers.conditions import NOTHING, Conditions
from frameloom.models.vaes.base import VideoVAE
from frameloom.sampling.given import Given


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


@dataclass(frozen=True)
class Prepared:
    """What sampling of a batch needs besides text and noise.

    told       what the denoiser is told
    untold     the same with nothing given, for image guidance; None when nothing is given anyway
    origin     the latent that sampling starts from; None: noise
    kept       (mask_B1FHW, latent_BCFHW) of cells that are given, to be put back when sampling is done; None: none
    """

    told: Conditions = NOTHING
    untold: Conditions | None = None
    origin_BCFHW: Tensor | None = None
    kept: tuple[Tensor, Tensor] | None = None

    def put_back(self, latent_BCFHW: Tensor) -> Tensor:
        if self.kept is None:
            return latent_BCFHW
        mask_B1FHW, given_BCFHW = self.kept
        return torch.where(mask_B1FHW > 0, given_BCFHW.to(latent_BCFHW), latent_BCFHW)


def check_given(denoiser: LoadedDenoiser, given: Sequence[Given]) -> None:
    """ConfigError when the model has no input for what is given, or for that shape of it."""
    name, beside = denoiser.family.name, denoiser.family.beside(denoiser.config)
    if beside == "control" and any(one.control_CFHW is None for one in given):
        raise ConfigError(
            f"{name}: a control model needs a control clip and cannot sample from text; name it: --control"
        )
    if beside != "control" and any(one.control_CFHW is not None for one in given):
        raise ConfigError(f"{name}: this model takes no control clip; leave --control out, or choose a control model")
    if beside != "inpaint" and any(one.is_known for one in given):
        raise no_input(name)
    if denoiser.family.knows == "ends" and not all(_is_ends(one.known_FHW) for one in given):
        raise ConfigError(
            f"{name}: this model can be given whole frames at the two ends of a clip, but the mask has others; "
            "make its black parts whole frames there, or choose an inpaint model that takes regions"
        )


def no_input(family: str) -> ConfigError:
    return ConfigError(
        f"{family}: this model has no input for given frames, so --image, --last-image, --mask and --video without "
        "--strength cannot be used; choose an image-to-video or inpaint model, or change a video with --video and "
        "--strength"
    )


def _is_ends(known_FHW: Tensor) -> bool:
    known_F = known_FHW.flatten(1).float().mean(1)
    if not bool(((known_F == 0) | (known_F == 1)).all()):
        return False
    # Known, then unknown, then known again: at most two changes, and none from unknown at both ends.
    changes = int((known_F[1:] != known_F[:-1]).sum())
    return changes <= 1 or (changes == 2 and bool(known_F[0] == 1))


@torch.no_grad()
def prepare(
    denoiser: LoadedDenoiser,
    vae: VideoVAE,
    seeds: Sequence[int],
    given: Sequence[Given],
    device: torch.device,
    *,
    keeps: bool = True,
) -> Prepared:
    """Conditions, start and kept cells of a batch, encoded one clip at a time: memory does not grow with the batch."""
    check_given(denoiser, given)
    clip_BCFHW = torch.stack([one.clip_CFHW for one in given]).to(device)
    known_B1FHW = torch.stack([one.known_FHW for one in given])[:, None].to(device)

    def encode(pixels_BCFHW: Tensor) -> Tensor:
        parts = [vae.normalize(vae.encode(part_CFHW[None]).mode()) for part_CFHW in pixels_BCFHW]
        return torch.cat(parts).float()

    origin = encode(clip_BCFHW) if given[0].starts else None
    pack, beside = denoiser.family.pack_known, denoiser.family.beside(denoiser.config)
    if beside == "control":
        control_BCFHW = torch.stack([one.control_CFHW for one in given if one.control_CFHW is not None]).to(device)
        return Prepared(told=Conditions(beside_BCFHW=encode(control_BCFHW)), origin_BCFHW=origin)
    if beside == "none" or pack is None:
        return Prepared(origin_BCFHW=origin)
    draws = SeedDraws(seeds, device)
    told = pack(denoiser.config, clip_BCFHW, known_B1FHW, encode, draws)
    if not bool(known_B1FHW.any()):
        return Prepared(told=Conditions(beside_BCFHW=told), origin_BCFHW=origin)
    untold = pack(denoiser.config, clip_BCFHW, torch.zeros_like(known_B1FHW), encode, draws)
    kept = None
    if keeps and denoiser.family.find_kept is not None:
        kept = denoiser.family.find_kept(told)
    elif keeps:
        kept = find_known_cells(known_B1FHW, vae), encode(clip_BCFHW)
    return Prepared(Conditions(beside_BCFHW=told), Conditions(beside_BCFHW=untold), origin, kept)


def find_known_cells(known_B1FHW: Tensor, vae: VideoVAE) -> Tensor:
    """1 for the latent cells of which every pixel is known; a causal autoencoder's first frame is a cell by itself."""
    stride, *sides = vae.strides
    known = known_B1FHW.float()
    if vae.causal:
        known = torch.cat([known[:, :, :1].expand(-1, -1, stride - 1, -1, -1), known], dim=2)
    elif known.shape[2] % stride:
        known = known[:, :, -1:].expand(-1, -1, stride, -1, -1)
    return -F.max_pool3d(-known, kernel_size=(stride, *sides), stride=(stride, *sides))


def repeat(given: Conditions, times: int) -> Conditions:
    """For a batch that holds every sample several times, one whole batch after the other."""
    repeated: dict[str, Any] = {
        name: part.repeat(times, *[1] * (part.ndim - 1))
        for name, part in vars(given).items()
        if isinstance(part, Tensor)
    }
    return dataclasses.replace(given, **repeated)


def concatenate(parts: Sequence[Conditions]) -> Conditions:
    """The batches of all parts, in order; all have the same conditions."""
    names = [name for name, part in vars(parts[0]).items() if isinstance(part, Tensor)]
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return dataclasses.replace(parts[0], **joined)
