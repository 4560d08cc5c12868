"""Flow matching: straight paths from noise to data, learned as a velocity; timestep distributions and shifts.

Shape letters: B batch, C channels, F frames, H height, W width, S sampling steps.

With time 0 = data and 1 = noise, r = 1 - time and s = sigma_min (Lipman et al. 2023, eq. 22, time reversed):
    noisy  = r * latent + (1 - (1 - s) * r) * noise
    target = (1 - s) * noise - latent          (the velocity d noisy / d time)
The shift (Esser et al. 2024, eq. 23) moves times towards noise for large latents:
    time <- alpha * time / (1 + (alpha - 1) * time)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
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

Shift = None | float | Literal["open_sora2", "sd3"]
# Open-Sora 2.0's factor is a line through (256 patches, 1) and (4096 patches, 3), times sqrt(latent frames).
_SLOPE = (3 - 1) / (4096 - 256)
_INTERCEPT = 1 - 256 * _SLOPE
# Between these, mode_time runs one way from 1 to 0.
MODE_SCALES = (-1.0, 2 / (math.pi - 2))
# Keeps the normal quantile finite: draws within 1e-9 of 0 or 1 become -6 and +6 standard deviations.
_DRAW_MARGIN = 1e-9


@dataclass(frozen=True)
class FlowObjective:
    """Flow matching with a logit-normal, uniform or mode timestep law and an optional shift.

    `shift` is a constant factor, or depends on the size of the latent: "open_sora2", or "sd3", which is 1 at
    `base_tokens`. Published Open-Sora 2.0 always counts patches of area 4 in training but the model's own patches when
    sampling; `sampling_patch_area` exists for its checkpoints with patch size 1, None means the same as `patch_area`.
    `num_levels` puts times on a grid before they are shifted, as Open-Sora-Plan does with 1000; None: any time.
    """

    sigma_min: float = 1e-5
    law: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    num_levels: int | None = None
    shift: Shift = None
    patch_area: int = 4
    sampling_patch_area: int | None = None
    base_tokens: int = 256
    motion_share: float = 0.0
    # Weight of a sample by its time: "sigma_sqrt" is 1 / time^2, "cosmap" that of Esser et al. 2024, eq. 21.
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    noise: NoiseSettings = PLAIN_NOISE

    def __post_init__(self) -> None:
        problems = []
        if self.law not in ("logit_normal", "uniform", "mode"):
            problems.append(f"flow objective: law is {self.law!r}; choose 'logit_normal', 'uniform' or 'mode'")
        if not MODE_SCALES[0] <= self.mode_scale <= MODE_SCALES[1]:
            problems.append(
                f"flow objective: mode_scale is {self.mode_scale}; times run back outside of {MODE_SCALES[0]} to "
                f"{MODE_SCALES[1]:.4f}, choose one between"
            )
        if self.logit_std <= 0:
            problems.append(f"flow objective: logit_std is {self.logit_std}; give a positive number")
        if self.weighting not in ("none", "sigma_sqrt", "cosmap"):
            problems.append(f"flow objective: weighting is {self.weighting!r}; choose 'none', 'sigma_sqrt' or 'cosmap'")
        if isinstance(self.shift, str) and self.shift not in ("open_sora2", "sd3"):
            problems.append(
                f"flow objective: shift is {self.shift!r}; give a positive number, 'open_sora2', 'sd3' or null"
            )
        if isinstance(self.shift, (int, float)) and self.shift <= 0:
            problems.append(f"flow objective: shift is {self.shift}; it multiplies time, so give a positive number")
        if not 0 <= self.sigma_min < 1:
            problems.append(f"flow objective: sigma_min is {self.sigma_min}; give a number from 0 to below 1")
        if problems:
            raise ConfigError(problems)

    def alpha(self, latent: Tensor, *, patch_area: int | None = None) -> float:
        """The shift factor for a latent of this shape (..., F, H, W)."""
        if not isinstance(self.shift, str):
            return 1.0 if self.shift is None else float(self.shift)
        num_frames, height, width = latent.shape[-3:]
        area = patch_area or self.patch_area
        if self.shift == "open_sora2":
            return open_sora2_alpha(num_frames, height, width, patch_area=area)
        return sd3_alpha(num_frames * (height * width // area), self.base_tokens)

    def time_B(self, draw_B: Tensor, latent_BCFHW: Tensor) -> Tensor:
        """The timestep law: uniform draws become shifted times, computed in float64."""
        time_B = draw_B.double()
        if self.law == "logit_normal":
            time_B = logit_normal_time(normal_from_uniform(time_B), self.logit_mean, self.logit_std)
        elif self.law == "mode":
            time_B = mode_time(time_B, self.mode_scale)
        if self.num_levels is not None:
            time_B = grid_time(1 - time_B, self.num_levels)
        return shift_time(time_B, self.alpha(latent_BCFHW)).float()

    def place_B(self, draw_B: Tensor, latent_BCFHW: Tensor) -> Tensor:
        return self.time_B(draw_B, latent_BCFHW)

    def place_at(self, level_B: Tensor) -> Tensor:
        level = level_B.double()
        return 1 - (1 - level) / (1 - self.sigma_min + self.sigma_min * level)

    def mix_at(self, place_B: Tensor) -> Mix:
        rest_B, kept = 1 - place_B.double(), 1 - self.sigma_min
        one_B = torch.ones_like(rest_B)
        return Mix(rest_B, 1 - kept * rest_B, -one_B, kept * one_B)

    def weight_at(self, place_B: Tensor) -> Tensor:
        return self.weight_B(place_B)

    def density(self, level_B: Tensor, latent_BCFHW: Tensor) -> Tensor | None:
        if self.num_levels is not None or self.law == "mode":
            return None
        time_B, back = self.place_at(level_B), 1 / self.alpha(latent_BCFHW)
        before_B = shift_time(time_B, back)
        is_normal = self.law == "logit_normal"
        density_B = logit_normal_density(before_B, self.logit_mean, self.logit_std) if is_normal else 1.0
        slope_B = back / (1 + (back - 1) * time_B).square()
        return density_B * slope_B / (1 - self.sigma_min + self.sigma_min * level_B.double()).square()

    def add_noise(
        self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, draw_B: Tensor, perturbation_BCFHW: Tensor | None = None
    ) -> Noised:
        return self.add_noise_at(latent_BCFHW, noise_BCFHW, self.time_B(draw_B, latent_BCFHW), perturbation_BCFHW)

    def add_noise_at(
        self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, place_B: Tensor, perturbation_BCFHW: Tensor | None = None
    ) -> Noised:
        """The example at a given time per sample, already shifted."""
        latent, noise = latent_BCFHW.float(), noise_BCFHW.float()
        time_B = place_B.float()
        rest = 1 - per_sample(time_B, latent)
        noisy = rest * latent + (1 - (1 - self.sigma_min) * rest) * perturbed(noise, perturbation_BCFHW)
        return Noised(
            noisy_BCFHW=noisy.to(latent_BCFHW.dtype),
            timestep_B=time_B,
            target_BCFHW=(1 - self.sigma_min) * noise - latent,
            weight_B=self.weight_B(time_B),
        )

    def weight_B(self, time_B: Tensor) -> Tensor:
        if self.weighting == "sigma_sqrt":
            return time_B**-2
        if self.weighting == "cosmap":
            return 2 / (math.pi * (1 - 2 * time_B + 2 * time_B**2))
        return torch.ones_like(time_B)

    def loss_B(self, prediction_BCFHW: Tensor, noised: Noised) -> Tensor:
        return weighted_error_B(prediction_BCFHW, noised, motion_share=self.motion_share)

    def schedule(self, latent: Tensor, num_steps: int) -> list[float]:
        """num_steps + 1 times from 1 to 0, evenly spaced before the shift."""
        even_S = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
        alpha = self.alpha(latent, patch_area=self.sampling_patch_area)
        return [float(time) for time in shift_time(even_S, alpha)]

    def begin(self, latent_BCFHW: Tensor, noise_BCFHW: Tensor, *, num_steps: int, skip: int) -> Tensor:
        time_B = torch.full((latent_BCFHW.shape[0],), self.schedule(latent_BCFHW, num_steps)[skip])
        return self.add_noise_at(latent_BCFHW, noise_BCFHW, time_B.to(latent_BCFHW.device)).noisy_BCFHW

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
        """Euler steps along the predicted velocity."""
        x_BCFHW = noise_BCFHW.to(torch.promote_types(noise_BCFHW.dtype, torch.float32))
        times = self.schedule(x_BCFHW, num_steps)
        for step, (time, next_time) in list(enumerate(pairwise(times)))[skip:]:
            timestep_B = torch.full((x_BCFHW.shape[0],), time, dtype=torch.float32, device=x_BCFHW.device)
            velocity_BCFHW = predict(x_BCFHW, timestep_B).to(x_BCFHW.dtype)
            x_BCFHW = x_BCFHW + (next_time - time) * velocity_BCFHW
            if on_step is not None:
                on_step(step + 1, x_BCFHW)
        return x_BCFHW


def open_sora2_alpha(num_frames: int, height: int, width: int, *, patch_area: int = 4) -> float:
    """The shift factor for a latent of this size; 1 for one frame of 256 patches."""
    num_patches = height * width // patch_area
    return (_SLOPE * num_patches + _INTERCEPT) * math.sqrt(num_frames)


def shift_time(time: Tensor, alpha: float) -> Tensor:
    """Move times in [0, 1] towards 1 (alpha > 1) or 0 (alpha < 1); the ends stay."""
    return alpha * time / (1 + (alpha - 1) * time)


def sd3_alpha(num_tokens: int, base_tokens: int) -> float:
    """Esser et al. 2024, eq. 23: the same uncertainty at more tokens needs the root of their ratio as a shift."""
    return math.sqrt(num_tokens / base_tokens)


def logit_normal_time(normal_B: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Time from a standard normal draw, most often near the middle."""
    return torch.sigmoid(mean + std * normal_B)


def logit_normal_density(time_B: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Of the time whose logit is normal (Esser et al. 2024, eq. 19); 0 at both ends."""
    inside_B = time_B.clamp(1e-12, 1 - 1e-12)
    standard_B = (torch.logit(inside_B) - mean) / std
    return torch.exp(-standard_B.square() / 2) / (math.sqrt(2 * math.pi) * std * inside_B * (1 - inside_B))


def mode_time(draw_B: Tensor, scale: float) -> Tensor:
    """Time that favours the middle (scale > 0) or the ends (< 0) and reaches both ends (Esser et al. 2024, eq. 20)."""
    return 1 - draw_B - scale * (torch.cos(math.pi / 2 * draw_B).square() - 1 + draw_B)


def grid_time(draw_B: Tensor, num_levels: int = 1000) -> Tensor:
    """Time on a grid of `num_levels`, from 1 (draw 0) down and never 0, as Open-Sora-Plan's flow branch draws it."""
    return (num_levels - (draw_B * num_levels).floor().clamp_max(num_levels - 1)) / num_levels


def normal_from_uniform(draw_B: Tensor) -> Tensor:
    """The standard normal quantile of a uniform draw, in float64."""
    normal_B: Tensor = torch.special.ndtri(draw_B.double().clamp(_DRAW_MARGIN, 1 - _DRAW_MARGIN))
    return normal_B
