"""Conditions of training samples besides noise level and caption: known frames, control clips, sizes, images.

All that is random is drawn for each sample from its own stream.

Shape letters: B batch, C channels, F frames, H height, W width, N images beside a clip, M all of these images.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from frameloom.diffusion.conditioning import MaskRandom, draw_mask
from frameloom.models.denoisers.base import Draws
from frameloom.models.vaes.base import VideoVAE
from frameloom.training.tasks.noising import draw_normal, draw_uniform


@torch.no_grad()
def encode_moments(vae: VideoVAE, pixels_BCFHW: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latents of uint8 pixels, not normalised."""
    with torch.autocast(device.type, enabled=False):
        moments = vae.encode(to_signed_range(pixels_BCFHW.to(device)))
    return moments.mean_BCFHW, torch.exp(0.5 * moments.logvar_BCFHW)


@dataclass(frozen=True)
class ConditionMaker:
    """`known` says how the known frames of an inpaint model are drawn.

    `has_control`: batches bring control clips, which a control model is given.
    """

    denoiser: LoadedDenoiser
    vae: VideoVAE
    known: KnownSection | None
    device: torch.device
    has_control: bool = False

    def __post_init__(self) -> None:
        condition, name = self.denoiser.config.condition, self.denoiser.family.name
        if condition == "inpaint" and self.known is None:
            raise ConfigError(f"known is null, but this {name} is an inpaint model; say which frames it is given")
        if condition != "inpaint" and self.known is not None:
            raise ConfigError(
                f"known is set, but this {name} is no inpaint model; choose an inpaint size, for opensora2 set "
                "model.overrides: {cond_embed: true}, or remove it"
            )
        if condition == "control" and not self.has_control:
            raise ConfigError(
                f"data.control is false, but this {name} is a control model; set it to true, and name a control clip "
                "for each row in the manifest's column 'control'"
            )
        if condition != "control" and self.has_control:
            raise ConfigError(f"data.control is true, but this {name} is no control model; choose one, or remove it")

    def make(self, batch: Batch, seed: int) -> dict[str, Tensor]:
        found = {}
        if self.known is not None:
            found["cond_latents"] = self._pack_known(batch, seed)
        elif self.has_control:
            found["cond_latents"] = self._control(batch, seed)
        if "sizes" in self.denoiser.family.supported_conditions and batch.crops is not None:
            crops = batch.crops
            sizes_B6 = torch.cat([crops.original_B2, crops.top_left_B2, crops.target_B2], dim=1)
            found["sizes"] = sizes_B6.to(self.device)
        return found

    def _pack_known(self, batch: Batch, seed: int) -> Tensor:
        assert self.known is not None and batch.pixels_BCFHW is not None
        clip_BCFHW = to_signed_range(batch.pixels_BCFHW.to(self.device))
        known_B1FHW = self.draw_known(batch, seed).to(self.device)

        def uniform_B(purpose: str) -> Tensor:
            return draw_uniform(seed, purpose, batch).to(self.device)

        def normal(purpose: str, shape: tuple[int, ...]) -> Tensor:
            return draw_normal(seed, purpose, batch, shape, self.device)

        draws = Draws(uniform_B, normal, is_training=True)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return self.denoiser.model.pack_known(clip_BCFHW, known_B1FHW, self.encode, draws)

    def _control(self, batch: Batch, seed: int) -> Tensor:
        """The control clip as a latent, drawn from its distribution as in the published training."""
        assert batch.control_BCFHW is not None
        mean_BCFHW, std_BCFHW = encode_moments(self.vae, batch.control_BCFHW, self.device)
        noise_BCFHW = draw_normal(seed, "control", batch, tuple(mean_BCFHW.shape[1:]), self.device)
        return self.vae.normalize(mean_BCFHW + std_BCFHW * noise_BCFHW)

    def encode(self, pixels_BCFHW: Tensor) -> Tensor:
        """Given pixels as the middle of their distribution: noise in what is known would only blur it."""
        return self.vae.normalize(self.vae.encode(pixels_BCFHW).mode())

    def draw_known(self, batch: Batch, seed: int) -> Tensor:
        """[B, 1, F, H, W], with the recipe's shares for a clip or for an image."""
        assert self.known is not None and batch.pixels_BCFHW is not None
        section, vae, shape = self.known, self.vae, batch.pixels_BCFHW.shape
        masks = [
            draw_mask(
                section.law,
                (shape[2], shape[3], shape[4]),
                MaskRandom(stream(seed, "known", batch.epoch, index)),
                section.image_shares if shape[2] == 1 else section.shares,
                known_share=section.known_share,
                stride=vae.strides[0],
                causal=vae.causal,
            )
            for index in batch.sample_indices.tolist()
        ]
        return torch.stack(masks)[:, None].to(torch.uint8)


def join_images(clip: tuple[Tensor, Tensor], images: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of clips [B, C, F, H, W] with those of their images [B * N, C, 1, H, W] behind them."""
    joined = []
    for part_BCFHW, images_MC1HW in zip(clip, images, strict=True):
        frames = torch.unflatten(images_MC1HW[:, :, 0], 0, (len(part_BCFHW), -1)).transpose(1, 2)
        joined.append(torch.cat([part_BCFHW, frames], dim=2))
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
