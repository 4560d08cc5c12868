"""What a discriminator adds to the training of an autoencoder: its own loss, and its weight in the autoencoder's.

A step trains the autoencoder (`generator_term`), the discriminator (`discriminator_loss`), or one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from frameloom.core.errors import ConfigError

# Keeps the ratio of gradients finite, and a discriminator that hardly matters from being blown up.
_RATIO_EPS = 1e-4
_MOST_RATIO = 1e4


@dataclass(frozen=True)
class AdversarialSettings:
    """Defaults are Open-Sora-Plan 1.3's. Before step `start` the discriminator has no say; steps count from 0.

    With `turns` "both" a step trains both networks, as Open-Sora 2 does it. Without `adaptive` gradients are not
    balanced, and `weight` stands alone.
    """

    start: int = 0
    weight: float = 0.5
    factor: float = 1.0
    loss: Literal["hinge", "vanilla"] = "hinge"
    turns: Literal["alternate", "both"] = "alternate"
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.loss not in ("hinge", "vanilla"):
            raise ConfigError(f"discriminator: loss is {self.loss!r}; choose 'hinge' or 'vanilla'")

    def factor_at(self, step: int) -> float:
        """How much the discriminator counts at a step: nothing before `start`."""
        return self.factor if step >= self.start else 0.0

    def trains_discriminator(self, step: int) -> bool:
        """Whether a step is one of the discriminator's: from `start` on, every second one or all."""
        return (self.turns == "both" or step % 2 == 1) and step >= self.start

    def trains_autoencoder(self, step: int) -> bool:
        return self.turns == "both" or not self.trains_discriminator(step)


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
