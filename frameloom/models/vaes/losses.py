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
    perceptual_BF: Tensor | None = None,
    weight_BF: Tensor | None = None,
) -> Tensor:
    """Negative log-likelihood of the pixels up to a constant: sum(error / exp(logvar) + logvar) / (batch * frames).

    `perceptual_BF` is a distance of whole frames, already weighted; as in the original it counts once for every number
    of a frame. `weight_BF` lets some frames count more.
    """
    error_BCFHW = pixels_BCFHW - reconstruction_BCFHW
    error_BCFHW = error_BCFHW.abs() if kind == "l1" else error_BCFHW.square()
    spread = torch.as_tensor(logvar, dtype=error_BCFHW.dtype, device=error_BCFHW.device)
    B, C, F, H, W = pixels_BCFHW.shape
    if perceptual_BF is None and weight_BF is None:
        return (error_BCFHW.sum() * torch.exp(-spread) + spread * error_BCFHW.numel()) / (B * F)
    error_BF = error_BCFHW.sum((1, 3, 4))
    if perceptual_BF is not None:
        error_BF = error_BF + perceptual_BF * (C * H * W)
    nll_BF = error_BF * torch.exp(-spread) + spread * (C * H * W)
    return (nll_BF if weight_BF is None else weight_BF * nll_BF).sum() / (B * F)


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
