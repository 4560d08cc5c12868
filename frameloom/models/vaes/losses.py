"""Losses of autoencoder training: reconstruction, KL, wavelet, and adversarial terms.

Shape letters: B batch, C channels, F frames, H height, W width.

The divisors are those of the Open-Sora-Plan 1.3 trainer, so its weights (KL 1e-6, wavelet 0.1) can be used as they are.

A step trains the autoencoder (`generator_term`), the discriminator (`discriminator_loss`), or one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from frameloom.core.errors import ConfigError
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
    spread = logvar.to(error_BCFHW) if isinstance(logvar, Tensor) else error_BCFHW.new_tensor(logvar)
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

    Zero for a model without coefficients.
    """
    if not encoded_BCFHW:
        return torch.zeros(())
    gaps = [(a - b).abs().sum() for a, b in zip(encoded_BCFHW, decoded_BCFHW, strict=True)]
    return torch.stack(gaps).sum() / encoded_BCFHW[0].shape[0]


# Keeps the ratio of gradients finite, and a discriminator that hardly matters from being blown up.
_RATIO_EPS = 1e-4
_MOST_RATIO = 1e4


@dataclass(frozen=True)
class AdversarialSettings:
    """Defaults are Open-Sora-Plan 1.3's. The GAN loss starts at step `start`, counted from 0.

    With `update` "both" a step trains both networks, as Open-Sora 2 does it. Without `adaptive` gradients are not
    balanced, and `weight` stands alone.
    """

    start: int = 0
    weight: float = 0.5
    factor: float = 1.0
    loss: Literal["hinge", "vanilla"] = "hinge"
    update: Literal["alternate", "both"] = "alternate"
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.loss not in ("hinge", "vanilla"):
            raise ConfigError(f"discriminator: loss is {self.loss!r}; choose 'hinge' or 'vanilla'")

    def factor_at(self, step: int) -> float:
        """How much the discriminator counts at a step: nothing before `start`."""
        return self.factor if step >= self.start else 0.0

    def trains_discriminator(self, step: int) -> bool:
        """Whether a step is one of the discriminator's: from `start` on, every second one or all."""
        return (self.update == "both" or step % 2 == 1) and step >= self.start

    def trains_autoencoder(self, step: int) -> bool:
        return self.update == "both" or not self.trains_discriminator(step)


class GeneratorTerm(NamedTuple):
    """`loss` is what is added; `made` is the discriminator's opinion, `weight` what balances its gradient."""

    loss: Tensor
    made: Tensor
    weight: Tensor
    factor: float


def generator_term(
    logits_made: Tensor, reconstruction_loss: Tensor, last_layer: Tensor, settings: AdversarialSettings, step: int
) -> GeneratorTerm:
    """The discriminator's part in the autoencoder's loss: it should take reconstructions for real.

    Its weight makes its gradient at `last_layer`, the weight of the decoder's last convolution, as large as that of the
    reconstruction.
    """
    zero = logits_made.new_zeros(())
    if step < settings.start:
        return GeneratorTerm(zero, zero, zero, 0.0)
    made = -logits_made.mean()
    if settings.factor <= 0:
        return GeneratorTerm(zero, made, torch.ones_like(zero), 0.0)
    ratio = balance_gradients(reconstruction_loss, made, last_layer) if settings.adaptive else torch.ones_like(zero)
    weight = ratio * settings.weight
    return GeneratorTerm(weight * settings.factor * made, made, weight, settings.factor)


def balance_gradients(reconstruction_loss: Tensor, generator_loss: Tensor, last_layer: Tensor) -> Tensor:
    """The ratio of the two gradients' norms at `last_layer`, at most 10,000; no gradient flows through it."""
    (of_reconstruction,) = torch.autograd.grad(reconstruction_loss, last_layer, retain_graph=True)
    (of_generator,) = torch.autograd.grad(generator_loss, last_layer, retain_graph=True)
    norms = [torch.linalg.vector_norm(gradient) for gradient in (of_reconstruction, of_generator)]
    ratio: Tensor = norms[0] / (norms[1] + _RATIO_EPS)
    return ratio.clamp(0.0, _MOST_RATIO).detach()


def discriminator_loss(logits_real: Tensor, logits_made: Tensor, settings: AdversarialSettings, step: int) -> Tensor:
    """The discriminator's own loss; the clips that it was given must be detached from the autoencoder."""
    loss = hinge_loss if settings.loss == "hinge" else vanilla_loss
    return settings.factor_at(step) * loss(logits_real, logits_made)


def hinge_loss(logits_real: Tensor, logits_made: Tensor, weight_B: Tensor | None = None) -> Tensor:
    """Real clips should be above 1 and made ones below -1; `weight_B` lets some samples count more."""
    real, made = F.relu(1.0 - logits_real), F.relu(1.0 + logits_made)
    if weight_B is None:
        return 0.5 * (real.mean() + made.mean())
    real_B, made_B = real.flatten(1).mean(1), made.flatten(1).mean(1)
    total = weight_B.sum()
    return 0.5 * ((weight_B * real_B).sum() / total + (weight_B * made_B).sum() / total)


def vanilla_loss(logits_real: Tensor, logits_made: Tensor) -> Tensor:
    """The cross-entropy of a discriminator whose logits are log-odds."""
    return 0.5 * (F.softplus(-logits_real).mean() + F.softplus(logits_made).mean())
