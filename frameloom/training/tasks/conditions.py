"""Conditions of training samples besides noise level and caption: known frames, control clips, sizes, images.

All that is random is drawn for each sample from its own stream.

Shape letters: B batch, C channels, F frames, H height, W width, N images beside a clip, M
all of these images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.config.schema.models import KnownSection
from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.data.loading.batch import Batch
from frameloom.data.media.transforms import to_signed_range
from frameloom.diffusion.mask_kinds import END_SHARES
from frameloom.diffusion.masks import StreamDice, draw_end_mask, draw_frame_mask, draw_region_mask
from frameloom.models.text.base import TextStates
from frameloom.models.vaes.base import VideoVAE
from frameloom.training.tasks.noising import draw_normal, draw_uniform

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class SampleDraws:
    """The random numbers of a batch for a family's `pack_known`."""

    seed: int
    batch: Batch
    device: torch.device
    is_training: bool = True

    def uniform_B(self, purpose: str) -> Tensor:
        return draw_uniform(self.seed, purpose, self.batch).to(self.device)

    def normal(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        return draw_normal(self.seed, purpose, self.batch, shape, self.device)


@dataclass(frozen=True)
class ConditionMaker:
    """`known` says how the known frames of an inpaint model are drawn; families that take sizes are given them.

    `has_control`: batches bring control clips, which a control model is given.
    """

    denoiser: LoadedDenoiser
    vae: VideoVAE
    known: KnownSection | None
    takes_sizes: bool
    device: torch.device
    has_control: bool = False

    def __post_init__(self) -> None:
        beside = self.denoiser.config.condition
        name = self.denoiser.family.name
        if beside == "inpaint" and self.known is None:
            raise ConfigError(f"known is null, but this {name} is an inpaint model; say which frames it is given")
        if beside != "inpaint" and self.known is not None:
            raise ConfigError(
                f"known is set, but this {name} is no inpaint model; choose an inpaint size, for opensora2 set "
                "model.overrides: {cond_embed: true}, or remove it"
            )
        if beside == "control" and not self.has_control:
            raise ConfigError(
                f"data.control is false, but this {name} is a control model; set it to true, and name a control clip "
                "for each row in the manifest's column 'control'"
            )
        if beside != "control" and self.has_control:
            raise ConfigError(f"data.control is true, but this {name} is no control model; choose one, or remove it")

    def make(self, batch: Batch, seed: int, image_text: TextStates | None) -> dict[str, Tensor]:
        found = {}
        if self.known is not None:
            found["cond_latents"] = self._pack_known(batch, seed)
        elif self.has_control:
            found["cond_latents"] = self._control(batch, seed)
        if self.takes_sizes and batch.crops is not None:
            crops = batch.crops
            sizes_B6 = torch.cat([crops.original_B2, crops.top_left_B2, crops.target_B2], dim=1)
            found["sizes"] = sizes_B6.to(self.device)
        if image_text is not None:
            found |= {"image_text": image_text.tokens_BKD, "image_text_mask": image_text.mask_BK}
        return found

    def _pack_known(self, batch: Batch, seed: int) -> Tensor:
        assert self.known is not None and batch.pixels_BCFHW is not None
        clip_BCFHW = to_signed_range(batch.pixels_BCFHW.to(self.device))
        known_B1FHW = self.draw_known(batch, seed).to(self.device)
        draws = SampleDraws(seed, batch, self.device)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return self.denoiser.model.pack_known(clip_BCFHW, known_B1FHW, self.encode, draws)

    def _control(self, batch: Batch, seed: int) -> Tensor:
        """The control clip as a latent, drawn from its distribution as in the published training."""
        assert batch.control_BCFHW is not None
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            moments = self.vae.encode(to_signed_range(batch.control_BCFHW.to(self.device)))
            shape = tuple(moments.mean_BCFHW.shape[1:])
            noise_BCFHW = draw_normal(seed, "control", batch, shape, self.device)
            return self.vae.normalize(moments.mean_BCFHW + torch.exp(0.5 * moments.logvar_BCFHW) * noise_BCFHW)

    def encode(self, pixels_BCFHW: Tensor) -> Tensor:
        """Given pixels as the middle of their distribution: noise in what is known would only blur it."""
        return self.vae.normalize(self.vae.encode(pixels_BCFHW).mode())

    def draw_known(self, batch: Batch, seed: int) -> Tensor:
        assert self.known is not None and batch.pixels_BCFHW is not None
        shape = (batch.pixels_BCFHW.shape[2], batch.pixels_BCFHW.shape[3], batch.pixels_BCFHW.shape[4])
        draw = _LAWS[self.known.law]
        masks = []
        for ordinal in batch.sample_indices.tolist():
            dice = StreamDice(stream(seed, "known", batch.epoch, ordinal))
            masks.append(draw(shape, dice, self.known, self.vae))
        return torch.stack(masks)[:, None].to(torch.uint8)


def _shares(section: KnownSection, shape_FHW: Shape) -> Mapping[str, float] | None:
    """The recipe's shares for a clip or for an image; None leaves them to the law."""
    return (section.image_shares if shape_FHW[0] == 1 else section.shares) or None


def _draw_regions(shape_FHW: Shape, dice: StreamDice, section: KnownSection, vae: VideoVAE) -> Tensor:
    shares: Any = _shares(section, shape_FHW)
    return draw_region_mask(shape_FHW, dice, shares)[0]


def _draw_frames(shape_FHW: Shape, dice: StreamDice, section: KnownSection, vae: VideoVAE) -> Tensor:
    shares: Any = _shares(section, shape_FHW)
    return draw_frame_mask(shape_FHW, dice, shares, known_share=section.known_share)[0]


def _draw_ends(shape_FHW: Shape, dice: StreamDice, section: KnownSection, vae: VideoVAE) -> Tensor:
    shares = _shares(section, shape_FHW) or END_SHARES
    return draw_end_mask(shape_FHW, dice.chance(), shares, stride=vae.strides[0], causal=vae.causal)


_LAWS: dict[str, Callable[[Shape, StreamDice, KnownSection, VideoVAE], Tensor]] = {
    "regions": _draw_regions,
    "frames": _draw_frames,
    "ends": _draw_ends,
}


def join_images(clip: tuple[Tensor, Tensor], images: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of clips [B, C, F, H, W] with those of their images [B * N, C, 1, H, W] behind them."""
    joined = []
    for part_BCFHW, images_MC1HW in zip(clip, images, strict=True):
        beside = torch.unflatten(images_MC1HW[:, :, 0], 0, (len(part_BCFHW), -1)).transpose(1, 2)
        joined.append(torch.cat([part_BCFHW, beside], dim=2))
    return joined[0], joined[1]


def split_images(pixels_BCNHW: Tensor) -> Tensor:
    """Images beside clips as clips of one frame, [B * N, C, 1, H, W]."""
    return pixels_BCNHW.transpose(1, 2).flatten(0, 1)[:, :, None]


def image_sample_indices(batch: Batch) -> NDArray[np.int64]:
    """A random slot of its own for each image beside the clips of a batch."""
    assert batch.images is not None
    num_images = batch.images.rows_BN.shape[1]
    slots: NDArray[np.int64] = batch.sample_indices[:, None] * num_images + np.arange(num_images)
    return slots.ravel()
