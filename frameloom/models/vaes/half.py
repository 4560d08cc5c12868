"""Any frozen autoencoder in half precision: float32 in and out, so nobody around it need know.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frameloom.models.half_precision import widen_norms
from frameloom.models.vaes.base import Moments, VideoVAE


class HalfVAE(VideoVAE):
    """Rounds the weights of `vae` to `dtype` and runs it in that; with `fp32_norms` its norm layers stay float32."""

    def __init__(self, vae: VideoVAE, dtype: torch.dtype, *, fp32_norms: bool = False) -> None:
        super().__init__(
            strides=vae.strides,
            latent_channels=vae.latent_channels,
            causal=vae.causal,
            scale=vae.scale.tolist(),
            shift=vae.shift.tolist(),
        )
        self.vae, self.dtype = vae.to(dtype), dtype
        if fp32_norms:
            widen_norms(vae, dtype)

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        moments = self.vae.encode(pixels_BCFHW.to(self.dtype))
        return Moments(moments.mean_BCFHW.float(), moments.logvar_BCFHW.float())

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        return self.vae.decode(latent_BCFHW.to(self.dtype)).float()

    def latent_frames(self, pixel_frames: int) -> int:
        return self.vae.latent_frames(pixel_frames)
