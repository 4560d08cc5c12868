"""Loss terms of an autoencoder: sums over pixels or latents, divided by batch or by batch and frames.

Shape letters: B batch, C channels, F frames, H height, W width.

The divisors are those of the Open-Sora-Plan 1.3 trainer, so its weights (KL 1e-6, wavelet 0.1) can be used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from frameloom.models.vaes.base import Moments


def reconstruction_nll(
    pixels_BCFHW: Tensor,
    reconstruction_BCFHW: Tensor,
    *,
    logvar: Tensor | float = 0.0,
    kind: Literal["l1", "l2"] = "l1",
) -> Tensor:
    """Negative log-likelihood of the pixels up to a constant: sum(error / exp(logvar) + logvar) / (batch * frames)."""
    error_BCFHW = pixels_BCFHW - reconstruction_BCFHW
    error_BCFHW = error_BCFHW.abs() if kind == "l1" else error_BCFHW.square()
    spread = torch.as_tensor(logvar, dtype=error_BCFHW.dtype, device=error_BCFHW.device)
    num_frames = pixels_BCFHW.shape[0] * pixels_BCFHW.shape[2]
    return (error_BCFHW.sum() * torch.exp(-spread) + spread * error_BCFHW.numel()) / num_frames


def kl_divergence(moments: Moments) -> Tensor:
    """Nats per clip: summed over all latent numbers, divided by the batch."""
    return moments.kl_B().mean()


def wavelet_loss(encoded_BCFHW: Sequence[Tensor], decoded_BCFHW: Sequence[Tensor]) -> Tensor:
    """How far the decoder's coefficients are from the encoder's, level by level: sum of |difference| / batch.

    A model without coefficients has nothing to lose here: zero.
    """
    if not encoded_BCFHW:
        return torch.zeros(())
    gaps = [(a - b).abs().sum() for a, b in zip(encoded_BCFHW, decoded_BCFHW, strict=True)]
    return torch.stack(gaps).sum() / encoded_BCFHW[0].shape[0]
