"""DDPM: discrete noise levels, v, epsilon or sample prediction, min-SNR weights, zero terminal SNR and DDIM sampling.

Shape letters: B batch, C channels, F frames, H height, W width, T training timesteps.

With a = alpha_bar at an index (0 = least noise):
    noisy = sqrt(a) * latent + sqrt(1 - a) * noise          SNR = a / (1 - a)
    v     = sqrt(a) * noise - sqrt(1 - a) * latent          (Salimans & Ho 2022)
so latent = sqrt(a) * noisy - sqrt(1 - a) * v and noise = sqrt(1 - a) * noisy + sqrt(a) * v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.diffusion.noise_levels import LevelBias, level_probabilities, pick_levels, running_sum
from frameloom.diffusion.objective import (
    PLAIN_NOISE,
    Mix,
    Noised,
    NoiseSettings,
    OnStep,
    Predict,
    level_of,
    per_sample,
    perturbed,
    weighted_error_B,
)

BetaSchedule = Literal["linear", "scaled_linear"]
Prediction = Literal["v", "epsilon", "sample"]
Spacing = Literal["trailing", "leading", "linspace"]


@dataclass(frozen=True)
class DDPMObjective:
    """A DDPM whose timesteps are drawn uniformly, unless `bias` favours some or `within` (end excluded) omits some.

    Defaults are Open-Sora-Plan 1.3's. `timestep_B` is index / num_train_timesteps (see `objective`). Zero terminal
    SNR excludes epsilon, because the last level holds no latent to find noise in, and trailing spacing, because
    sampling must begin at that level.
    """

    num_train_timesteps: int = 1000
    beta_schedule: BetaSchedule = "linear"
    beta_start: float = 1e-4
    beta_end: float = 0.02
    zero_terminal_snr: bool = True
    prediction: Prediction = "v"
    snr_gamma: float | None = None
    snr_shift: float = 1.0
    spacing: Spacing = "trailing"
    motion_share: float = 0.0
    # The level that a sampling step goes to: that of the next visited index, or ("even") the one that lies
    # num_train_timesteps // num_steps below, as diffusers' DDIM has it. They differ unless spacing is "trailing" and
    # the number of steps divides that of the levels.
    step_to: Literal["next", "even"] = "next"
    bias: LevelBias | None = None
    within: tuple[int, int] | None = None
    noise: NoiseSettings = PLAIN_NOISE
    alpha_bar_T: Tensor = field(init=False, repr=False, compare=False)
    running_T: Tensor = field(init=False, repr=False, compare=False)
    _on_device: dict[tuple[str, torch.device], Tensor] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self._refuse_mistakes()
        # Published models were trained with float32; CogVideoX's own sampler, which shifts, computes in float64.
        dtype = torch.float64 if self.snr_shift != 1 else torch.float32
        betas_T = make_betas(self.beta_schedule, self.beta_start, self.beta_end, self.num_train_timesteps, dtype)
        alpha_bar_T = shift_snr(torch.cumprod(1 - betas_T, dim=0), self.snr_shift)
        if self.zero_terminal_snr:
            alpha_bar_T = rescale_to_zero_terminal_snr(alpha_bar_T)
        object.__setattr__(self, "alpha_bar_T", alpha_bar_T)
        running_T = running_sum(level_probabilities(self.num_train_timesteps, self.bias, self.within))
        object.__setattr__(self, "running_T", running_T)

    def _refuse_mistakes(self) -> None:
        problems = []
        for name, allowed in (
            ("beta_schedule", ("linear", "scaled_linear")),
            ("prediction", ("v", "epsilon", "sample")),
            ("spacing", ("trailing", "leading", "linspace")),
            ("step_to", ("next", "even")),
        ):
            if getattr(self, name) not in allowed:
                problems.append(
                    f"ddpm objective: {name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}"
                )
        if self.zero_terminal_snr and self.prediction == "epsilon":
            problems.append(
                "ddpm objective: zero_terminal_snr with prediction 'epsilon' divides by zero at the last timestep; "
                "choose prediction 'v' or 'sample', or switch zero_terminal_snr off"
            )
        if self.zero_terminal_snr and self.spacing == "leading":
            problems.append(
                "ddpm objective: spacing 'leading' never visits the last timestep, which zero_terminal_snr needs; "
                "choose 'trailing'"
            )
        if self.snr_gamma is not None and self.snr_gamma <= 0:
            problems.append(
                f"ddpm objective: snr_gamma is {self.snr_gamma}; give a positive number (5 is usual) or null"
            )
        if problems:
            raise ConfigError(problems)

    @property
    def probability_T(self) -> Tensor:
        """How likely each index is, in float64."""
        return level_probabilities(self.num_train_timesteps, self.bias, self.within)

    def index_B(self, draw_B: Tensor) -> Tensor:
        """The timestep law; every index is equally likely unless `bias` or `within` says otherwise."""
        if self.bias is not None or self.within is not None:
            return pick_levels(draw_B, self._on("running_T", draw_B.device))
        index_B = (draw_B.double() * self.num_train_timesteps).long()
        return index_B.clamp(0, self.num_train_timesteps - 1)

    def place_B(self, draw_B: Tensor, latent_BCFHW: Tensor) -> Tensor:
        return self.index_B(draw_B)

    def place_at(self, level_B: Tensor) -> Tensor:
        level_T = level_of(self.mix_at(torch.arange(self.num_train_timesteps)))
        return (level_B.double().cpu()[:, None] - level_T).abs().argmin(dim=1).to(level_B.device)

    def mix_at(self, place_B: Tensor) -> Mix:
        alpha_bar_B = self.alpha_bar_T.double()[place_B.cpu()]
        signal_B, spread_B = alpha_bar_B.sqrt(), (1 - alpha_bar_B).sqrt()
        zero_B, one_B = torch.zeros_like(signal_B), torch.ones_like(signal_B)
        of = {"v": (-spread_B, signal_B), "epsilon": (zero_B, one_B), "sample": (one_B, zero_B)}[self.prediction]
        return Mix(signal_B, spread_B, *of)

    def weight_at(self, place_B: Tensor) -> Tensor:
        return self.weight_B(self.alpha_bar_T[place_B.cpu()])

    def density(self, level_B: Tensor, latent_BCFHW: Tensor) -> Tensor | None:
        """Levels are single points, so there is no density; `probability_T` is the law."""
        return None

    def add_noise(
        self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, draw_B: Tensor, perturbation_BCFHW: Tensor | None = None
    ) -> Noised:
        return self.add_noise_at(latent_BCFHW, noise_BCFHW, self.index_B(draw_B), perturbation_BCFHW)

    def add_noise_at(
        self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, place_B: Tensor, perturbation_BCFHW: Tensor | None = None
    ) -> Noised:
        """The example at a given index per sample."""
        latent, noise = latent_BCFHW.float(), noise_BCFHW.float()
        index_B = place_B.to(latent.device)
        alpha_bar_B = self._on("alpha_bar_T", latent.device)[index_B]
        alpha_bar = per_sample(alpha_bar_B, latent)
        noisy = alpha_bar.sqrt() * latent + (1 - alpha_bar).sqrt() * perturbed(noise, perturbation_BCFHW)
        return Noised(
            noisy_BCFHW=noisy.to(latent_BCFHW.dtype),
            timestep_B=self.timestep_B(index_B),
            target_BCFHW=self.target(latent, noise, alpha_bar),
            weight_B=self.weight_B(alpha_bar_B),
        )

    def target(self, latent: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
        """What the network has to predict."""
        if self.prediction == "v":
            return velocity(latent, noise, alpha_bar)
        return noise if self.prediction == "epsilon" else latent

    def _on(self, name: Literal["alpha_bar_T", "running_T"], device: torch.device) -> Tensor:
        # Kept per device: copying it every step would make the host wait for the accelerator.
        if (name, device) not in self._on_device:
            dtype = torch.float32 if name == "alpha_bar_T" else torch.float64
            self._on_device[name, device] = getattr(self, name).to(device, dtype)
        return self._on_device[name, device]

    def timestep_B(self, index_B: Tensor) -> Tensor:
        return (index_B.double() / self.num_train_timesteps).float()

    def weight_B(self, alpha_bar_B: Tensor) -> Tensor:
        if self.snr_gamma is None:
            return torch.ones_like(alpha_bar_B)
        return min_snr_weight(alpha_bar_B, self.snr_gamma, self.prediction)

    def loss_B(self, prediction_BCFHW: Tensor, noised: Noised) -> Tensor:
        return weighted_error_B(prediction_BCFHW, noised, motion_share=self.motion_share)

    def schedule(self, num_steps: int) -> list[int]:
        """The indices that `num_steps` sampling steps visit, from noisy to clean."""
        total = self.num_train_timesteps
        if not 1 <= num_steps <= total:
            raise ConfigError(f"sampling: {num_steps} steps, but the model has {total} noise levels; give 1 to {total}")
        if self.spacing == "linspace":
            return [round((total - 1) * (1 - step / max(num_steps - 1, 1))) for step in range(num_steps)]
        if self.spacing == "leading":
            # One up from a multiple: Stable Diffusion's published "steps_offset 1".
            return [min(step * (total // num_steps) + 1, total - 1) for step in reversed(range(num_steps))]
        return [round(total * (num_steps - step) / num_steps) - 1 for step in range(num_steps)]

    def split(self, x: Tensor, prediction: Tensor, alpha_bar: float) -> tuple[Tensor, Tensor]:
        """The (latent, noise) that a prediction at this noise level stands for."""
        signal, spread = alpha_bar**0.5, (1 - alpha_bar) ** 0.5
        if self.prediction == "v":
            return signal * x - spread * prediction, spread * x + signal * prediction
        if self.prediction == "sample":
            return prediction, (x - signal * prediction) / spread
        return (x - spread * prediction) / signal, prediction

    def levels(self, indices: list[int]) -> list[tuple[float, float]]:
        """alpha_bar before and after each sampling step; the last one goes to 1, the noise-free latent."""
        stride = self.num_train_timesteps // len(indices)
        targets = [index - stride for index in indices] if self.step_to == "even" else [*indices[1:], -1]
        pairs = zip(indices, targets, strict=True)
        return [
            (float(self.alpha_bar_T[now]), float(self.alpha_bar_T[then]) if then >= 0 else 1.0) for now, then in pairs
        ]

    def ddim_step(self, x: Tensor, prediction: Tensor, alpha_bar: float, next_alpha_bar: float) -> Tensor:
        """Deterministic step between two noise levels."""
        latent, noise = self.split(x, prediction, alpha_bar)
        signal, spread = math.sqrt(next_alpha_bar), math.sqrt(1 - next_alpha_bar)
        return signal * latent + spread * noise

    def begin(self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, *, num_steps: int, skip: int) -> Tensor:
        index_B = torch.full((latent_BCFHW.shape[0],), self.schedule(num_steps)[skip])
        return self.add_noise_at(latent_BCFHW, noise_BCFHW, index_B).noisy_BCFHW

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
        """Deterministic DDIM (Song et al. 2021, eta 0); the last step goes to the noise-free latent."""
        x_BCFHW = noise_BCFHW.to(torch.promote_types(noise_BCFHW.dtype, torch.float32))
        indices = self.schedule(num_steps)
        levels = self.levels(indices)
        for step, index in list(enumerate(indices))[skip:]:
            index_B = torch.full((x_BCFHW.shape[0],), index, device=x_BCFHW.device)
            prediction = predict(x_BCFHW, self.timestep_B(index_B)).to(x_BCFHW.dtype)
            x_BCFHW = self.ddim_step(x_BCFHW, prediction, *levels[step])
            if on_step is not None:
                on_step(step + 1, x_BCFHW)
        return x_BCFHW


def make_betas(schedule: BetaSchedule, start: float, end: float, num_steps: int, dtype: torch.dtype) -> Tensor:
    """Noise added per step: even in beta, or ("scaled_linear") even in its square root."""
    if schedule == "linear":
        return torch.linspace(start, end, num_steps, dtype=dtype)
    return torch.linspace(start**0.5, end**0.5, num_steps, dtype=dtype).square()


def shift_snr(alpha_bar_T: Tensor, shift: float) -> Tensor:
    """Divide the SNR of every level by `shift`; CogVideoX-2b samples with 3."""
    return alpha_bar_T / (shift + (1 - shift) * alpha_bar_T)


def rescale_to_zero_terminal_snr(alpha_bar_T: Tensor) -> Tensor:
    """Move sqrt(alpha_bar) linearly so that its first value stays and its last is 0 (Lin et al. 2023, alg. 1)."""
    root_T = alpha_bar_T.sqrt()
    first, last = root_T[0], root_T[-1]
    squared_T = ((root_T - last) * (first / (first - last))).square()
    # Published schedules store betas and multiply them up again; the same rounding makes ours equal to the bit.
    alphas_T = torch.cat([squared_T[:1], squared_T[1:] / squared_T[:-1]])
    return torch.cumprod(1 - (1 - alphas_T), dim=0)


def snr(alpha_bar: Tensor) -> Tensor:
    """Signal-to-noise ratio of the noisy latent."""
    return alpha_bar / (1 - alpha_bar)


def min_snr_weight(alpha_bar: Tensor, gamma: float, prediction: Prediction) -> Tensor:
    """Hang et al. 2023: the error of the latent counts min(SNR, gamma), whatever the network predicts."""
    ratio = snr(alpha_bar)
    if prediction == "sample":
        return ratio.clamp_max(gamma)
    return ratio.clamp_max(gamma) / (ratio + 1 if prediction == "v" else ratio)


def velocity(latent: Tensor, noise: Tensor, alpha_bar: Tensor) -> Tensor:
    return alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * latent
