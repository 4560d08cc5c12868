"""The interface of training objectives, and the weighted error that all of them share.

Shape letters: B batch, C channels, F frames, H height, W width.

Time convention, for every objective: `timestep_B` is float32 in [0, 1], 0 is data and 1 is noise. Flow matching
gives the time itself. DDPM gives index / num_train_timesteps, so 0 ... 0.999 for 1000 steps; a denoiser that
wants the integer takes `round(timestep * 1000)`. Timesteps must not pass through bfloat16 (999 becomes 1000). EDM is
the exception: its timestep is ln(sigma) / 4, divided by 1000 like an index.

The noise level, which compares objectives with each other, is a number in [0, 1]: with noisy = signal * latent +
spread * noise, up to a factor, it is spread / (signal + spread). Flow matching's time is that number (for sigma_min
0), the others' equivalent of it. The ratio of signal to noise is ((1 - level) / level)^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

Predict = Callable[[Tensor, Tensor], Tensor]
"""(x_BCFHW, timestep_B) -> prediction_BCFHW. A sampler calls it exactly once per step, in order."""

OnStep = Callable[[int, Tensor], None]
"""Called after each sampling step with the number of steps done and the latent so far."""


class Noised(NamedTuple):
    """One training example per sample. `noisy` has the dtype of the latent; the rest is float32."""

    noisy_BCFHW: Tensor
    timestep_B: Tensor
    target_BCFHW: Tensor
    weight_B: Tensor


class Mix(NamedTuple):
    """What an objective makes of latent and noise, per sample, in float64:

    noisy = signal * latent + spread * noise and target = of_latent * latent + of_noise * noise.
    """

    signal_B: Tensor
    spread_B: Tensor
    of_latent_B: Tensor
    of_noise_B: Tensor


@dataclass(frozen=True)
class NoiseSettings:
    """How the noise of a training sample is drawn; the objective itself takes what it is given.

    `offset` moves the mean of the noise by a normal number per sample or per channel. `perturbation` is noise on the
    noise that the target does not know of (Ning et al. 2023). Of `num_strata` samples that follow each other, each
    draws its noise level from its own part of the law.
    """

    offset: float = 0.0
    offset_per: Literal["channel", "sample"] = "channel"
    perturbation: float = 0.0
    num_strata: int = 1


PLAIN_NOISE = NoiseSettings()


class Objective(Protocol):
    """How latents become training targets, and how predictions become latents again.

    A place is the objective's own name of a noise level: a time, an index or a sigma.
    """

    @property
    def noise(self) -> NoiseSettings: ...

    def add_noise(
        self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, draw_B: Tensor, perturbation_BCFHW: Tensor | None = None
    ) -> Noised:
        """`draw_B` is uniform in [0, 1); the objective's timestep law turns it into a place.

        The noisy latent has `perturbation` in it besides the noise, the target has not.
        """
        ...

    def add_noise_at(
        self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, place_B: Tensor, perturbation_BCFHW: Tensor | None = None
    ) -> Noised:
        """The example at a given place per sample."""
        ...

    def place_B(self, draw_B: Tensor, latent_BCFHW: Tensor) -> Tensor:
        """The timestep law."""
        ...

    def place_at(self, level_B: Tensor) -> Tensor:
        """The place nearest to a noise level."""
        ...

    def mix_at(self, place_B: Tensor) -> Mix: ...

    def weight_at(self, place_B: Tensor) -> Tensor:
        """What the squared error of a sample is multiplied by."""
        ...

    def density(self, level_B: Tensor, latent_BCFHW: Tensor) -> Tensor | None:
        """Probability density of the law over noise levels, in closed form; None where there is none."""
        ...

    def loss_B(self, prediction_BCFHW: Tensor, noised: Noised) -> Tensor:
        """Weighted mean squared error of each sample; its mean over the batch is the training loss."""
        ...

    def begin(self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, *, num_steps: int, skip: int) -> Tensor:
        """A latent with the noise that `num_steps` sampling steps find after the first `skip` of them."""
        ...

    def sample(
        self,
        predict: Predict,
        noise_BCFHW: Tensor,
        *,
        num_steps: int,
        on_step: OnStep | None = None,
        skip: int = 0,
    ) -> Tensor:
        """Walk from noise to a latent, in float32 or the wider dtype of `noise`.

        With `skip`, the walk starts after that many steps, at what `begin` gave instead of noise.
        """
        ...


def per_sample(value_B: Tensor, like: Tensor) -> Tensor:
    """View one value per sample so that it broadcasts over the other dims of `like`."""
    return value_B.reshape(-1, *[1] * (like.ndim - 1))


def offset_noise(noise_BCFHW: Tensor, draw_BC: Tensor, strength: float) -> Tensor:
    """Noise whose mean per sample and channel is off by `strength` times a normal draw.

    It lets a model with non-zero terminal SNR learn very dark and very bright clips. A draw of shape (B, 1) moves
    all channels of a sample together.
    """
    return noise_BCFHW + strength * draw_BC[:, :, None, None, None]


def level_of(mix: Mix) -> Tensor:
    """The noise level of a mix; 0 is data, 1 is noise."""
    return mix.spread_B / (mix.signal_B + mix.spread_B)


def noise_error_factor(mix: Mix) -> Tensor:
    """The squared error of the target that a unit squared error of the noise it implies comes to.

    With the noisy latent known, an error e of the noise is one of -spread / signal * e of the latent.
    """
    return (mix.of_noise_B - mix.of_latent_B * mix.spread_B / mix.signal_B).square()


def perturbed(noise: Tensor, perturbation_BCFHW: Tensor | None) -> Tensor:
    return noise if perturbation_BCFHW is None else noise + perturbation_BCFHW.float()


def weighted_error_B(prediction_BCFHW: Tensor, noised: Noised, *, motion_share: float = 0.0) -> Tensor:
    """Squared error in float32, averaged over C, F, H, W, times the weight of the sample.

    `motion_share` is the part of the loss that goes to the error of frame-to-frame differences, for clips of more
    than two latent frames.
    """
    difference = prediction_BCFHW.float() - noised.target_BCFHW.float()
    error_B = difference.square().mean(dim=(1, 2, 3, 4))
    if motion_share and difference.shape[2] > 2:
        moved = difference[:, :, 1:] - difference[:, :, :-1]
        error_B = (1 - motion_share) * error_B + motion_share * moved.square().mean(dim=(1, 2, 3, 4))
    return noised.weight_B * error_B
