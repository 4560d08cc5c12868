"""Task `autoencoder`: reconstruct clips through a small latent.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from frameloom.config.schema import AutoencoderSection
from frameloom.data.batch import Batch
from frameloom.evaluate.metrics import psnr_db, ssim
from frameloom.generate.parts import to_unit_range
from frameloom.models.vaes import VideoVAE
from frameloom.models.vaes.losses import kl_divergence, reconstruction_nll, wavelet_loss
from frameloom.train.draws import draw_normal


@dataclass
class AutoencoderTask:
    vae: VideoVAE
    weights: AutoencoderSection
    seed: int
    device: torch.device

    @property
    def model(self) -> nn.Module:
        return self.vae

    def losses(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        pixels = self._pixels(batch)
        moments, encoder_bands = self.vae.encode_with_coefficients(pixels)
        epsilon = draw_normal(self.seed, "latent", batch, tuple(moments.mean_BCFHW.shape[1:]), self.device)
        decoded, decoder_bands = self.vae.decode_with_coefficients(moments.sample(epsilon))
        parts = {
            "reconstruction": reconstruction_nll(pixels, decoded, kind=self.weights.reconstruction),
            "kl": kl_divergence(moments),
            "wavelet": wavelet_loss(encoder_bands, decoder_bands),
        }
        loss = (
            parts["reconstruction"]
            + self.weights.kl_weight * parts["kl"]
            + self.weights.wavelet_weight * parts["wavelet"]
        )
        num_samples = len(batch.rows)
        return loss.expand(num_samples), {name: part.expand(num_samples) for name, part in parts.items()}

    def validate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """PSNR and SSIM of the reconstruction from the latent mean, averaged over clips."""
        psnr_values, ssim_values = [], []
        with torch.no_grad():
            for batch in batches:
                pixels = self._pixels(batch)
                decoded = self.vae.decode(self.vae.encode(pixels).mean_BCFHW).clamp(-1, 1)
                psnr_values.append(psnr_db(decoded, pixels))
                ssim_values.append(ssim(decoded, pixels))
        return {"psnr_db": float(torch.cat(psnr_values).mean()), "ssim": float(torch.cat(ssim_values).mean())}

    def measure_latents(self, batches: Sequence[Batch]) -> dict[str, tuple[float, ...]]:
        """One `scale` for all channels, which gives the latents of these clips a standard deviation of 1."""
        with torch.no_grad():
            means = [self.vae.encode(self._pixels(batch)).mean_BCFHW.flatten() for batch in batches]
        scale = 1 / float(torch.cat(means).square().mean().sqrt())
        return {"scale": (scale,) * self.vae.latent_channels, "shift": (0.0,) * self.vae.latent_channels}

    def count_tokens(self, batch: Batch) -> int:
        """Latent cells of a micro-batch."""
        bucket = batch.bucket
        _, height_stride, width_stride = self.vae.strides
        frames = self.vae.latent_frames(bucket.frames)
        return len(batch.rows) * frames * (bucket.height // height_stride) * (bucket.width // width_stride)

    def _pixels(self, batch: Batch) -> Tensor:
        assert batch.pixels_BCFHW is not None
        return to_unit_range(batch.pixels_BCFHW.to(self.device))
