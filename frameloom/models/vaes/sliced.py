"""Any frozen autoencoder on large batches: a few clips at a time, so memory follows from those.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frameloom.models.vaes.base import Moments, VideoVAE


class SlicedVAE(VideoVAE):
    """Encodes and decodes `mini_batch` clips at once. No layer of an autoencoder looks at another clip of its batch, so
    the result is that of the whole batch up to the order of sums."""

    def __init__(self, vae: VideoVAE, mini_batch: int) -> None:
        super().__init__(
            strides=vae.strides,
            latent_channels=vae.latent_channels,
            causal=vae.causal,
            scale=vae.scale.tolist(),
            shift=vae.shift.tolist(),
        )
        self.vae, self.mini_batch = vae, mini_batch

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        parts = [self.vae.encode(clips) for clips in torch.split(pixels_BCFHW, self.mini_batch)]
        mean_BCFHW, logvar_BCFHW = (torch.cat(same) for same in zip(*parts, strict=True))
        return Moments(mean_BCFHW, logvar_BCFHW)

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        return torch.cat([self.vae.decode(latents) for latents in torch.split(latent_BCFHW, self.mini_batch)])

    def latent_frames(self, pixel_frames: int) -> int:
        return self.vae.latent_frames(pixel_frames)
