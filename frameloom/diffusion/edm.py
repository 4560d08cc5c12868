"""EDM (Karras et al. 2022): log-normal noise levels and a network whose input and target have unit variance.

Shape letters: B batch, C channels, F frames, H height, W width.

With d = sigma_data and h = sqrt(sigma^2 + d^2) (their table 1, last column):
    noisy = (latent + sigma * noise) / h                 what the network sees
    latent found = d^2 / h^2 * (latent + sigma * noise) + sigma * d / h * output
so the output to learn is (sigma / d * latent - d * noise) / h. Their weight of the latent's error, h^2 / (sigma d)^2,
is then a weight of 1 for the output's. The network's input is ln(sigma) / 4; `timestep_B` is a thousandth of it, as it
is of an index, and must not be rounded to one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.diffusion.flow import logit_normal_density, normal_from_uniform
from frameloom.diffusion.objective import (
    PLAIN_NOISE,
    Mix,
    Noised,
    NoiseSettings,
    OnStep,
    Predict,
    per_sample,
    perturbed,
    weighted_error_B,
)

_INPUT_PER_TIMESTEP = 1000


@dataclass(frozen=True)
class EDMObjective:
    """Defaults are those of SDXL's EDM variant, which are Karras et al.'s.

    `max_weight` limits the weight of the latent's error, which is what SDXL's `snr_gamma` does here.
    """

    p_mean: float = -1.2
    p_std: float = 1.2
    sigma_data: float = 0.5
    max_weight: float | None = None
    motion_share: float = 0.0
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    noise: NoiseSettings = PLAIN_NOISE

    def __post_init__(self) -> None:
        problems = [
            f"edm objective: {name} is {value}; give a positive number"
            for name in ("p_std", "sigma_data", "sigma_min", "rho", "max_weight")
            if (value := getattr(self, name)) is not None and value <= 0
        ]
        if self.sigma_max <= self.sigma_min:
            problems.append(
                f"edm objective: sigma_max is {self.sigma_max}, sigma_min {self.sigma_min}; give a larger sigma_max"
            )
        if problems:
            raise ConfigError(problems)

    def place_B(self, draw_B: Tensor, latent_BCFHW: Tensor) -> Tensor:
        """The law: ln(sigma) is normal."""
        return torch.exp(self.p_mean + self.p_std * normal_from_uniform(draw_B))

    def place_at(self, level_B: Tensor) -> Tensor:
        return level_B.double() / (1 - level_B.double())

    def mix_at(self, place_B: Tensor) -> Mix:
        sigma_B, data = place_B.double(), self.sigma_data
        size_B = (sigma_B.square() + data**2).sqrt()
        return Mix(1 / size_B, sigma_B / size_B, sigma_B / (data * size_B), -data / size_B)

    def weight_at(self, place_B: Tensor) -> Tensor:
        if self.max_weight is None:
            return torch.ones_like(place_B)
        sigma_B, data = place_B.double(), self.sigma_data
        of_latent_B = (sigma_B.square() + data**2) / (sigma_B * data).square()
        return (self.max_weight / of_latent_B).clamp_max(1)

    def density(self, level_B: Tensor, latent_BCFHW: Tensor) -> Tensor | None:
        """The logit of the noise level is ln(sigma)."""
        return logit_normal_density(level_B.double(), self.p_mean, self.p_std)

    def add_noise(
        self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, draw_B: Tensor, perturbation_BCFHW: Tensor | None = None
    ) -> Noised:
        place_B = self.place_B(draw_B, latent_BCFHW)
        return self.add_noise_at(latent_BCFHW, noise_BCFHW, place_B, perturbation_BCFHW)

    def add_noise_at(
        self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, place_B: Tensor, perturbation_BCFHW: Tensor | None = None
    ) -> Noised:
        """The example at a given sigma per sample."""
        latent, noise = latent_BCFHW.float(), noise_BCFHW.float()
        signal, spread, of_latent, of_noise = (per_sample(part_B.float(), latent) for part_B in self.mix_at(place_B))
        noisy = signal * latent + spread * perturbed(noise, perturbation_BCFHW)
        return Noised(
            noisy_BCFHW=noisy.to(latent_BCFHW.dtype),
            timestep_B=self.timestep_B(place_B),
            target_BCFHW=of_latent * latent + of_noise * noise,
            weight_B=self.weight_at(place_B).float(),
        )

    def timestep_B(self, place_B: Tensor) -> Tensor:
        return (place_B.double().log() / 4 / _INPUT_PER_TIMESTEP).float()

    def loss_B(self, prediction_BCFHW: Tensor, noised: Noised) -> Tensor:
        return weighted_error_B(prediction_BCFHW, noised, motion_share=self.motion_share)

    def schedule(self, num_steps: int) -> list[float]:
        """num_steps sigmas from sigma_max to sigma_min, dense where there is little noise, and 0 (their eq. 5)."""
        if num_steps < 1:
            raise ConfigError(f"sampling: {num_steps} steps; give 1 or more")
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        shares = [step / max(num_steps - 1, 1) for step in range(num_steps)]
        return [(high + share * (low - high)) ** self.rho for share in shares] + [0.0]

    def find_latent(self, x: Tensor, output: Tensor, sigma: float) -> Tensor:
        """The latent that an output of the network stands for; `x` is latent + sigma * noise."""
        size, data = math.hypot(sigma, self.sigma_data), self.sigma_data
        return (data / size) ** 2 * x + sigma * data / size * output

    def begin(self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, *, num_steps: int, skip: int) -> Tensor:
        return latent_BCFHW.float() + self.schedule(num_steps)[skip] * noise_BCFHW.float()

    @torch.no_grad()
    def sample(
        self,
        predict: Predict,
        noise_BCFHW: Tensor,
        *,
        num_steps: int,
        on_step: OnStep | None = None,
        skip: int = 0,
    ) -> Tensor:
        """Euler steps of the probability flow (their algorithm 1 without churn and correction)."""
        sigmas = self.schedule(num_steps)
        noise = noise_BCFHW.to(torch.promote_types(noise_BCFHW.dtype, torch.float32))
        # The first latent is as wide as training's at sigma_max with data of unit size, as SDXL's samplers have it.
        x_BCFHW = noise if skip else noise * math.hypot(1, sigmas[0])
        for step, (sigma, next_sigma) in list(enumerate(pairwise(sigmas)))[skip:]:
            sigma_B = torch.full((x_BCFHW.shape[0],), sigma, dtype=torch.float64, device=x_BCFHW.device)
            seen_BCFHW = x_BCFHW / math.hypot(sigma, self.sigma_data)
            output = predict(seen_BCFHW, self.timestep_B(sigma_B)).to(x_BCFHW.dtype)
            slope = (x_BCFHW - self.find_latent(x_BCFHW, output, sigma)) / sigma
            x_BCFHW = x_BCFHW + (next_sigma - sigma) * slope
            if on_step is not None:
                on_step(step + 1, x_BCFHW)
        return x_BCFHW
