"""Task `autoencoder`: reconstruct clips through a small latent.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from frameloom.checkpoint.model_folder import read_weights
from frameloom.config.schema.models import AutoencoderSection, LpipsSection
from frameloom.core.random import key, uniform_at
from frameloom.data.loading.batch import Batch
from frameloom.data.media.transforms import to_signed_range, to_uint8
from frameloom.evaluate.pair_metrics import psnr_db, ssim
from frameloom.models.layers.patches import fold_frames
from frameloom.models.vaes.base import Moments, VideoVAE
from frameloom.models.vaes.losses import kl_divergence, reconstruction_nll, wavelet_loss
from frameloom.models.vaes.lpips import LPIPS, load_lpips
from frameloom.training.tasks.noising import draw_normal

_MOST_CLIPS = 4
_MOST_FRAMES = 4
_GAP_PX = 4
_HALVES = {"encoder": ("encoder.", "quant_conv."), "decoder": ("decoder.", "post_quant_conv.")}


@dataclass
class AutoencoderTask:
    """`logvar` may be a parameter that trains; `lpips` is frozen."""

    vae: VideoVAE
    weights: AutoencoderSection
    seed: int
    device: torch.device
    lpips: LPIPS | None = None
    logvar: Tensor | float = 0.0

    @property
    def model(self) -> nn.Module:
        return self.vae

    def losses(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        compared = self.compare(self.reconstruct(batch))
        return spread_losses(compared.loss, compared.parts, batch)

    def reconstruct(self, batch: Batch) -> Reconstruction:
        """Through a sample of the latents, whose noise is a function of the sample's slot."""
        pixels = self._pixels(batch)
        if self._is_image(batch):
            pixels = pixels[:, :, :1]
        moments, encoder_bands = self.vae.encode_with_coefficients(pixels)
        epsilon = draw_normal(self.seed, "latent", batch, tuple(moments.mean_BCFHW.shape[1:]), self.device)
        decoded, decoder_bands = self.vae.decode_with_coefficients(moments.sample(epsilon))
        return Reconstruction(pixels, moments, decoded, encoder_bands, decoder_bands)

    def compare(self, made: Reconstruction) -> Comparison:
        weights = self.weights
        perceptual_BF = self._perceptual(made) if weights.lpips is not None and weights.lpips.weight else None
        parts = {
            "reconstruction": reconstruction_nll(
                made.pixels_BCFHW,
                made.decoded_BCFHW,
                logvar=self.logvar,
                kind=weights.reconstruction,
                perceptual_BF=None if perceptual_BF is None else self._lpips_weight * perceptual_BF,
            ),
            "kl": kl_divergence(made.moments),
            "wavelet": wavelet_loss(made.encoder_bands, made.decoder_bands),
        }
        loss = parts["reconstruction"] + weights.kl_weight * parts["kl"] + weights.wavelet_weight * parts["wavelet"]
        if perceptual_BF is not None:
            parts["lpips"] = perceptual_BF.mean()
        if isinstance(self.logvar, Tensor):
            parts["logvar"] = self.logvar
        return Comparison(loss, parts["reconstruction"], parts)

    def validate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """PSNR, SSIM and, with its weights, LPIPS of the reconstruction from the latent mean, averaged over clips."""
        values: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            for batch in batches:
                pixels = self._pixels(batch)
                decoded = self._restore(pixels)
                values.setdefault("psnr_db", []).append(psnr_db(decoded, pixels))
                values.setdefault("ssim", []).append(ssim(decoded, pixels))
                if self.lpips is not None:
                    distance_N = self.lpips(fold_frames(pixels), fold_frames(decoded))
                    values.setdefault("lpips", []).append(distance_N.reshape(len(pixels), -1).mean(1))
        return {name: float(torch.cat(found).mean()) for name, found in values.items()}

    def draw_pictures(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Validation clips over their reconstructions, as one picture HWC of bytes."""
        if not batches:
            return {}
        with torch.no_grad():
            pixels = self._pixels(max(batches, key=lambda batch: batch.bucket.frames))
            return {"reconstructions": draw_grid(pixels, self._restore(pixels))}

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
        frames = self.vae.latent_frames(1 if self._is_image(batch) else bucket.frames)
        return len(batch.rows) * frames * (bucket.height // height_stride) * (bucket.width // width_stride)

    @property
    def _lpips_weight(self) -> float:
        return self.weights.lpips.weight if self.weights.lpips is not None else 0.0

    def _perceptual(self, made: Reconstruction) -> Tensor:
        assert self.lpips is not None
        distance_N: Tensor = self.lpips(fold_frames(made.pixels_BCFHW), fold_frames(made.decoded_BCFHW))
        return distance_N.reshape(len(made.pixels_BCFHW), -1)

    def _restore(self, pixels_BCFHW: Tensor) -> Tensor:
        return self.vae.decode(self.vae.encode(pixels_BCFHW).mean_BCFHW).clamp(-1, 1)

    def _is_image(self, batch: Batch) -> bool:
        """Whether a micro-batch of clips is one of those that are trained on as images."""
        if not self.weights.image_share:
            return False
        drawn = uniform_at(key(self.seed, "image mixing", batch.epoch), np.array([batch.index]))
        return bool(drawn[0] < self.weights.image_share)

    def _pixels(self, batch: Batch) -> Tensor:
        assert batch.pixels_BCFHW is not None
        return to_signed_range(batch.pixels_BCFHW.to(self.device))


class Reconstruction(NamedTuple):
    """A batch on its way through the autoencoder: clips, latents, results, and the bands of both halves."""

    pixels_BCFHW: Tensor
    moments: Moments
    decoded_BCFHW: Tensor
    encoder_bands: Sequence[Tensor]
    decoder_bands: Sequence[Tensor]


class Comparison(NamedTuple):
    """Losses of a batch: the sum with its weights, the reconstruction's term in it, and all parts by name."""

    loss: Tensor
    reconstruction: Tensor
    parts: dict[str, Tensor]


def spread_losses(loss: Tensor, parts: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of a whole micro-batch as those of its samples, which the step takes the mean of."""
    num_samples = len(batch.rows)
    return loss.expand(num_samples), {name: part.expand(num_samples) for name, part in parts.items()}


def draw_grid(pixels_BCFHW: Tensor, decoded_BCFHW: Tensor) -> Tensor:
    """Bytes HWC: for each of the first clips a row of frames, evenly chosen, and their reconstructions under it."""
    num_frames = pixels_BCFHW.shape[2]
    chosen = torch.linspace(0, num_frames - 1, min(num_frames, _MOST_FRAMES)).round().long().tolist()
    rows = []
    for clip, result in zip(pixels_BCFHW[:_MOST_CLIPS], decoded_BCFHW[:_MOST_CLIPS], strict=True):
        pairs = [torch.cat([clip[:, frame], result[:, frame]], dim=1) for frame in chosen]
        rows.append(torch.cat(_separate(pairs, dim=2), dim=2))
    picture_CHW = torch.cat(_separate(rows, dim=1), dim=1)
    return to_uint8(picture_CHW).permute(1, 2, 0).cpu().contiguous()


def _separate(parts: list[Tensor], *, dim: int) -> list[Tensor]:
    """White lines between neighbours."""
    shape = list(parts[0].shape)
    shape[dim] = _GAP_PX
    line = parts[0].new_ones(shape)
    return [piece for part in parts for piece in (line, part)][1:]


def freeze_other_half(vae: VideoVAE, train_only: str | None) -> None:
    """Leave only the encoder or only the decoder, with the layer that joins it to the latents, to train."""
    if train_only is None:
        return
    for name, parameter in vae.named_parameters():
        if not name.startswith(_HALVES[train_only]):
            parameter.requires_grad_(False)


def build_lpips(section: LpipsSection, device: torch.device) -> LPIPS:
    """Frozen, from the files that the recipe names."""
    assert section.weights is not None
    tensors = dict(read_weights(Path(section.weights)).tensors)
    if section.heads is not None:
        tensors |= dict(read_weights(Path(section.heads)).tensors)
    model = LPIPS(section.channels)
    load_lpips(model, tensors)
    return model.to(device).eval()
