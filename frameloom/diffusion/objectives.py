"""Training objectives: flow matching, DDPM and EDM, as coefficients, distributions of noise levels and weights.

Shape letters: B batch, C channels, F frames, H height, W width, N noise levels of a sample, T training timesteps.

With coefficients alpha, sigma and two for the target, all objectives are the same:

    noisy  = alpha * latent + sigma * noise
    target = target_latent * latent + target_noise * noise         (what the network predicts)

Time convention: a timestep is in [0, 1], 0 is data and 1 is noise. Flow matching has the time itself, DDPM index /
num_train_timesteps, so 0 ... 0.999 for 1000 steps; a denoiser that wants the integer takes `round(timestep * 1000)`.
EDM is the exception: its timestep is ln(sigma) / 4, divided by 1000 like an index. Denoisers see float32; timesteps
must not pass through bfloat16 (999 becomes 1000).

The noise level, which compares objectives with each other, is sigma / (alpha + sigma), a number in [0, 1]. Flow
matching's time is that number (for sigma_min 0). The ratio of signal to noise is ((1 - level) / level)^2.

Timesteps, coefficients and weights are float64 on the host, [B] or, with a level for each frame or cell of a latent,
[B, N]; `add_noise` brings them to the device of the latent at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError


class Coefficients(NamedTuple):
    """noisy = alpha * latent + sigma * noise; target = target_latent * latent + target_noise * noise."""

    alpha: Tensor
    sigma: Tensor
    target_latent: Tensor
    target_noise: Tensor

    @property
    def noise_level(self) -> Tensor:
        """0 is data, 1 is noise."""
        return self.sigma / (self.alpha + self.sigma)

    def noise_error_factor(self) -> Tensor:
        """The squared error of the target that a unit squared error of the noise it implies comes to.

        With the noisy latent known, an error e of the noise is one of -sigma / alpha * e of the latent.
        """
        return (self.target_noise - self.target_latent * self.sigma / self.alpha).square()

    def split(self, noisy: Tensor, prediction: Tensor) -> tuple[Tensor, Tensor]:
        """The (latent, noise) that a prediction stands for, x0 and epsilon of the papers; all must broadcast."""
        alpha, sigma, of_latent, of_noise = self
        size = alpha * of_noise - sigma * of_latent
        return (of_noise * noisy - sigma * prediction) / size, (alpha * prediction - of_latent * noisy) / size


class Noised(NamedTuple):
    """One training example per sample. `noisy` has the dtype of the latent; the rest is float32."""

    noisy_BCFHW: Tensor
    timestep_B: Tensor
    target_BCFHW: Tensor
    weight_B: Tensor


@dataclass(frozen=True)
class NoiseSettings:
    """How the noise of a training sample is drawn.

    `noise_offset` moves the mean of the noise by a normal number per sample or per channel. `input_perturbation` is
    noise on the noise that the target does not contain (Ning et al. 2023). Of `stratified_levels` samples that follow
    each other, each draws its noise level from its own part of the distribution.
    """

    noise_offset: float = 0.0
    noise_offset_per: Literal["channel", "sample"] = "channel"
    input_perturbation: float = 0.0
    stratified_levels: int = 1


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """What a denoiser learns. A new objective needs `timesteps`, `coefficients`, `timestep_at` and `steps`.

    motion_share  part of the loss that goes to the error of frame-to-frame differences
    kind          row of the table of samplers
    is_rescaled   whether paths are straight in noisy / alpha instead of in noisy, which Heun's method follows
    """

    motion_share: float = 0.0
    noise: NoiseSettings = field(default_factory=NoiseSettings)
    kind: ClassVar[str]
    is_rescaled: ClassVar[bool] = False

    @abstractmethod
    def timesteps(self, uniform_B: Tensor, latent_BCFHW: Tensor) -> Tensor:
        """The distribution of noise levels: timesteps from uniform numbers in [0, 1), by the size of the latent."""

    @abstractmethod
    def coefficients(self, timestep_B: Tensor) -> Coefficients: ...

    def weight(self, timestep_B: Tensor) -> Tensor:
        """What the squared error of a sample is multiplied by."""
        return torch.ones_like(timestep_B, dtype=torch.float64)

    @abstractmethod
    def timestep_at(self, level_B: Tensor) -> Tensor:
        """The timestep nearest to a noise level."""

    def density(self, level_B: Tensor, latent_BCFHW: Tensor) -> Tensor | None:
        """Probability density of the distribution over noise levels in closed form; None where there is none."""
        return None

    @abstractmethod
    def steps(self, num_steps: int, latent_BCFHW: Tensor) -> list[tuple[float, float | None]]:
        """Timesteps from which and to which each sampling step goes; None is the latent without noise."""

    def scheduler_settings(self, latent_BCFHW: Tensor) -> dict[str, Any]:
        """The same for a scheduler of diffusers."""
        raise NotImplementedError(f"{self.kind} has no schedule in diffusers")


def spread(value: Tensor, like_BCFHW: Tensor) -> Tensor:
    """View one value per sample, or per frame or cell of each sample, so that it broadcasts over the other dims."""
    if value.ndim < 2:
        return value.reshape(-1, *[1] * (like_BCFHW.ndim - 1))
    num_samples, num_levels = value.shape
    shape = like_BCFHW.shape[2:] if num_levels == math.prod(like_BCFHW.shape[2:]) else (num_levels, 1, 1)
    return value.reshape(num_samples, 1, *shape)


def add_noise(
    objective: Objective,
    latent_BCFHW: Tensor,
    noise_BCFHW: Tensor,
    timestep_B: Tensor,
    perturbation_BCFHW: Tensor | None = None,
) -> Noised:
    """The training example at these timesteps; the noisy latent contains `perturbation`, the target does not."""
    timestep_B = timestep_B.double().cpu()
    numbers = [timestep_B, objective.weight(timestep_B), *objective.coefficients(timestep_B)]
    # One small copy to the device, for which the host need not wait.
    timestep_B, weight_B, *parts = torch.stack([part.float() for part in numbers]).to(latent_BCFHW.device)
    latent, noise = latent_BCFHW.float(), noise_BCFHW.float()
    alpha, sigma, of_latent, of_noise = (spread(part, latent) for part in parts)
    added = noise if perturbation_BCFHW is None else noise + perturbation_BCFHW.float()
    return Noised(
        noisy_BCFHW=torch.addcmul(alpha * latent, sigma, added).to(latent_BCFHW.dtype),
        timestep_B=timestep_B,
        target_BCFHW=torch.addcmul(of_latent * latent, of_noise, noise),
        weight_B=weight_B,
    )


def offset_noise(noise_BCFHW: Tensor, draw_BC: Tensor, strength: float) -> Tensor:
    """Noise whose mean per sample and channel is off by `strength` times a normal draw.

    It lets a model with non-zero terminal SNR learn very dark and very bright clips. A draw of shape (B, 1) moves
    all channels of a sample together.
    """
    return noise_BCFHW + strength * draw_BC[:, :, None, None, None]


def weighted_error_B(prediction_BCFHW: Tensor, noised: Noised, *, motion_share: float = 0.0) -> Tensor:
    """Weighted squared error in float32, averaged over C, F, H, W; its mean over the batch is the training loss.

    `motion_share` is the part of the loss that goes to the error of frame-to-frame differences, for clips of more
    than two latent frames.
    """
    difference = prediction_BCFHW.float() - noised.target_BCFHW.float()
    weight = spread(noised.weight_B, difference)
    error_B = (weight * difference.square()).mean(dim=(1, 2, 3, 4))
    if motion_share and difference.shape[2] > 2:
        moved = difference[:, :, 1:] - difference[:, :, :-1]
        weight = weight if weight.shape[2] == 1 else weight[:, :, 1:]
        error_B = (1 - motion_share) * error_B + motion_share * (weight * moved.square()).mean(dim=(1, 2, 3, 4))
    return error_B


# Flow matching

Shift = None | float | Literal["open_sora2", "sd3"]
# Open-Sora 2.0's factor is a line through (256 patches, 1) and (4096 patches, 3), times sqrt(latent frames).
_SLOPE = (3 - 1) / (4096 - 256)
_INTERCEPT = 1 - 256 * _SLOPE
# Keeps the normal quantile finite: draws within 1e-9 of 0 or 1 become -6 and +6 standard deviations.
_DRAW_MARGIN = 1e-9


@dataclass(frozen=True, kw_only=True)
class FlowObjective(Objective):
    """Straight paths from noise to data, learned as a velocity, with an optional shift of times.

    With r = 1 - time and s = sigma_min (Lipman et al. 2023, eq. 22, time reversed):
        noisy  = r * latent + (1 - (1 - s) * r) * noise
        target = (1 - s) * noise - latent          (the velocity d noisy / d time)
    The shift (Esser et al. 2024, eq. 23) moves times towards noise for large latents:
        time <- factor * time / (1 + (factor - 1) * time)

    `shift` is a constant factor, or depends on the size of the latent: "open_sora2", or "sd3", which is 1 at
    `shift_tokens`. Published Open-Sora 2.0 always counts patches of area 4 in training but the model's own patches when
    sampling; `sampling_shift_patch` exists for its checkpoints with patch size 1, None means the same as `shift_patch`.
    `num_levels` puts times on a grid before they are shifted, as Open-Sora-Plan does with 1000; None: any time.
    `weighting` "sigma_sqrt" is 1 / time^2, "cosmap" that of Esser et al. 2024, eq. 21.
    """

    sigma_min: float = 1e-5
    distribution: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    num_levels: int | None = None
    shift: Shift = None
    shift_patch: int = 4
    sampling_shift_patch: int | None = None
    shift_tokens: int = 256
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    kind: ClassVar[str] = "flow"

    def timesteps(self, uniform_B: Tensor, latent_BCFHW: Tensor) -> Tensor:
        time_B = uniform_B.double()
        if self.distribution == "logit_normal":
            time_B = logit_normal_time(normal_from_uniform(time_B), self.logit_mean, self.logit_std)
        elif self.distribution == "mode":
            time_B = mode_time(time_B, self.mode_scale)
        if self.num_levels is not None:
            time_B = grid_time(1 - time_B, self.num_levels)
        return shift_time(time_B, self.shift_factor(latent_BCFHW))

    def coefficients(self, timestep_B: Tensor) -> Coefficients:
        rest_B, kept = 1 - timestep_B.double(), 1 - self.sigma_min
        one_B = torch.ones_like(rest_B)
        return Coefficients(rest_B, 1 - kept * rest_B, -one_B, kept * one_B)

    def weight(self, timestep_B: Tensor) -> Tensor:
        time_B = timestep_B.double()
        if self.weighting == "sigma_sqrt":
            return time_B**-2
        if self.weighting == "cosmap":
            return 2 / (math.pi * (1 - 2 * time_B + 2 * time_B**2))
        return torch.ones_like(time_B)

    def timestep_at(self, level_B: Tensor) -> Tensor:
        level_B = level_B.double()
        return 1 - (1 - level_B) / (1 - self.sigma_min + self.sigma_min * level_B)

    def density(self, level_B: Tensor, latent_BCFHW: Tensor) -> Tensor | None:
        if self.num_levels is not None or self.distribution == "mode":
            return None
        time_B, back = self.timestep_at(level_B), 1 / self.shift_factor(latent_BCFHW)
        before_B = shift_time(time_B, back)
        is_normal = self.distribution == "logit_normal"
        density_B = logit_normal_density(before_B, self.logit_mean, self.logit_std) if is_normal else 1.0
        slope_B = back / (1 + (back - 1) * time_B).square()
        return density_B * slope_B / (1 - self.sigma_min + self.sigma_min * level_B.double()).square()

    def steps(self, num_steps: int, latent_BCFHW: Tensor) -> list[tuple[float, float | None]]:
        """Evenly spaced from 1 to 0 before the shift."""
        even_S = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
        factor = self.shift_factor(latent_BCFHW, shift_patch=self.sampling_shift_patch)
        times: list[float] = shift_time(even_S, factor).tolist()
        return list(pairwise(times))

    def scheduler_settings(self, latent_BCFHW: Tensor) -> dict[str, Any]:
        factor = self.shift_factor(latent_BCFHW, shift_patch=self.sampling_shift_patch)
        return {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": factor}

    def shift_factor(self, latent: Tensor, *, shift_patch: int | None = None) -> float:
        """The shift for a latent of this shape (..., F, H, W)."""
        if not isinstance(self.shift, str):
            return 1.0 if self.shift is None else float(self.shift)
        num_frames, height, width = latent.shape[-3:]
        area = shift_patch or self.shift_patch
        if self.shift == "open_sora2":
            return open_sora2_shift(num_frames, height, width, patch_area=area)
        return sd3_shift(num_frames * (height * width // area), self.shift_tokens)


def open_sora2_shift(num_frames: int, height: int, width: int, *, patch_area: int = 4) -> float:
    """The shift factor for a latent of this size; 1 for one frame of 256 patches."""
    num_patches = height * width // patch_area
    return (_SLOPE * num_patches + _INTERCEPT) * math.sqrt(num_frames)


def sd3_shift(num_tokens: int, base_tokens: int) -> float:
    """Esser et al. 2024, eq. 23: the same uncertainty at more tokens needs the root of their ratio as a shift."""
    return math.sqrt(num_tokens / base_tokens)


def shift_time(time: Tensor, factor: float) -> Tensor:
    """Move times in [0, 1] towards 1 (factor > 1) or 0 (factor < 1); the ends stay."""
    return factor * time / (1 + (factor - 1) * time)


def logit_normal_time(normal_B: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Time from a standard normal draw, most often near the middle."""
    return torch.sigmoid(mean + std * normal_B)


def logit_normal_density(time_B: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Of the time whose logit is normal (Esser et al. 2024, eq. 19); 0 at both ends."""
    inside_B = time_B.clamp(1e-12, 1 - 1e-12)
    standard_B = (torch.logit(inside_B) - mean) / std
    return torch.exp(-standard_B.square() / 2) / (math.sqrt(2 * math.pi) * std * inside_B * (1 - inside_B))


def mode_time(uniform_B: Tensor, scale: float) -> Tensor:
    """Time that favours the middle (scale > 0) or the ends (< 0) and reaches both ends (Esser et al. 2024, eq. 20)."""
    return 1 - uniform_B - scale * (torch.cos(math.pi / 2 * uniform_B).square() - 1 + uniform_B)


def grid_time(uniform_B: Tensor, num_levels: int = 1000) -> Tensor:
    """Time on a grid of `num_levels`, from 1 (draw 0) down and never 0, as Open-Sora-Plan's flow branch draws it."""
    return (num_levels - (uniform_B * num_levels).floor().clamp_max(num_levels - 1)) / num_levels


def normal_from_uniform(uniform_B: Tensor) -> Tensor:
    """The standard normal quantile, in float64."""
    normal_B: Tensor = torch.special.ndtri(uniform_B.double().clamp(_DRAW_MARGIN, 1 - _DRAW_MARGIN))
    return normal_B


# DDPM


@dataclass(frozen=True)
class LevelBias:
    """Some noise levels drawn `multiplier` times as often as the others, as SDXL's `timestep_bias_*` options say it.

    "earlier" are the first levels, of least noise, "later" the last ones: `portion` of all. "range" is `begin` up to,
    and not including, `end`.
    """

    strategy: Literal["none", "earlier", "later", "range"] = "none"
    multiplier: float = 1.0
    begin: int = 0
    end: int = 1000
    portion: float = 0.25

    def weights_T(self, num_levels: int) -> Tensor:
        """How often each level comes, relative to a level that is not favoured."""
        count = int(self.portion * num_levels)
        favoured = {
            "none": slice(0),
            "earlier": slice(count),
            "later": slice(num_levels - count, None),
            "range": slice(self.begin, self.end),
        }
        weights_T = torch.ones(num_levels, dtype=torch.float64)
        weights_T[favoured[self.strategy]] *= self.multiplier
        return weights_T


@dataclass(frozen=True, kw_only=True)
class DDPMObjective(Objective):
    """Discrete noise levels, of which all are equally likely, unless `bias` favours some or `within` omits some.

    With a = alpha_bar at an index (0 = least noise):
        noisy = sqrt(a) * latent + sqrt(1 - a) * noise          SNR = a / (1 - a)
        v     = sqrt(a) * noise - sqrt(1 - a) * latent          (Salimans & Ho 2022)

    Defaults are Open-Sora-Plan 1.3's. The end of `within` is excluded. A sampling step goes to the next visited index,
    or (`step_to` "even") to the one that lies num_train_timesteps // num_steps below, as diffusers' DDIM has it; they
    differ unless spacing is "trailing" and the number of steps divides that of the levels.
    """

    num_train_timesteps: int = 1000
    beta_schedule: Literal["linear", "scaled_linear"] = "linear"
    beta_start: float = 1e-4
    beta_end: float = 0.02
    zero_terminal_snr: bool = True
    prediction: Literal["v", "epsilon", "sample"] = "v"
    snr_gamma: float | None = None
    snr_shift: float = 1.0
    spacing: Literal["trailing", "leading", "linspace"] = "trailing"
    step_to: Literal["next", "even"] = "next"
    bias: LevelBias | None = None
    within: tuple[int, int] | None = None
    kind: ClassVar[str] = "v"

    @cached_property
    def alpha_bar_T(self) -> Tensor:
        # Published models were trained with float32; CogVideoX's own sampler, which shifts, computes in float64.
        dtype = torch.float64 if self.snr_shift != 1 else torch.float32
        betas_T = make_betas(self.beta_schedule, self.beta_start, self.beta_end, self.num_train_timesteps, dtype)
        alpha_bar_T = shift_snr(torch.cumprod(1 - betas_T, dim=0), self.snr_shift)
        return rescale_to_zero_terminal_snr(alpha_bar_T) if self.zero_terminal_snr else alpha_bar_T

    @cached_property
    def probability_T(self) -> Tensor:
        """How likely each index is, in float64."""
        weights_T = (self.bias or LevelBias()).weights_T(self.num_train_timesteps)
        if self.within is not None:
            weights_T[: self.within[0]], weights_T[self.within[1] :] = 0, 0
        return weights_T / weights_T.sum()

    def index(self, timestep_B: Tensor) -> Tensor:
        return (timestep_B.double().cpu() * self.num_train_timesteps).round().long()

    def timesteps(self, uniform_B: Tensor, latent_BCFHW: Tensor) -> Tensor:
        uniform_B = uniform_B.double().cpu()
        if self.bias is not None or self.within is not None:
            index_B = pick_levels(uniform_B, self.probability_T)
        else:
            index_B = (uniform_B * self.num_train_timesteps).long().clamp(0, self.num_train_timesteps - 1)
        return index_B.double() / self.num_train_timesteps

    def coefficients(self, timestep_B: Tensor) -> Coefficients:
        alpha_bar_B = self.alpha_bar_T.double()[self.index(timestep_B)]
        alpha_B, sigma_B = alpha_bar_B.sqrt(), (1 - alpha_bar_B).sqrt()
        zero_B, one_B = torch.zeros_like(alpha_B), torch.ones_like(alpha_B)
        of = {"v": (-sigma_B, alpha_B), "epsilon": (zero_B, one_B), "sample": (one_B, zero_B)}[self.prediction]
        return Coefficients(alpha_B, sigma_B, *of)

    def weight(self, timestep_B: Tensor) -> Tensor:
        alpha_bar_B = self.alpha_bar_T.double()[self.index(timestep_B)]
        if self.snr_gamma is None:
            return torch.ones_like(alpha_bar_B)
        return min_snr_weight(alpha_bar_B, self.snr_gamma, self.prediction)

    def timestep_at(self, level_B: Tensor) -> Tensor:
        every_T = torch.arange(self.num_train_timesteps, dtype=torch.float64) / self.num_train_timesteps
        level_T = self.coefficients(every_T).noise_level
        return every_T[(level_B.double().cpu()[:, None] - level_T).abs().argmin(dim=1)]

    def steps(self, num_steps: int, latent_BCFHW: Tensor) -> list[tuple[float, float | None]]:
        """DDIM (Song et al. 2021, eta 0); the last step goes to the noise-free latent."""
        total = self.num_train_timesteps
        if not 1 <= num_steps <= total:
            raise ConfigError(f"sampling: {num_steps} steps, but the model has {total} noise levels; give 1 to {total}")
        if self.spacing == "linspace":
            visited = [round((total - 1) * (1 - step / max(num_steps - 1, 1))) for step in range(num_steps)]
        elif self.spacing == "leading":
            # One up from a multiple: Stable Diffusion's published "steps_offset 1".
            visited = [min(step * (total // num_steps) + 1, total - 1) for step in reversed(range(num_steps))]
        else:
            visited = [round(total * (num_steps - step) / num_steps) - 1 for step in range(num_steps)]
        is_even = self.step_to == "even"
        reached = [index - total // num_steps for index in visited] if is_even else [*visited[1:], -1]
        return [(now / total, then / total if then >= 0 else None) for now, then in zip(visited, reached, strict=True)]

    def scheduler_settings(self, latent_BCFHW: Tensor) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "num_train_timesteps": self.num_train_timesteps,
            "beta_schedule": self.beta_schedule,
            "beta_start": self.beta_start,
            "beta_end": self.beta_end,
            "rescale_betas_zero_snr": self.zero_terminal_snr,
            "prediction_type": {"v": "v_prediction"}.get(self.prediction, self.prediction),
            "timestep_spacing": self.spacing,
            "steps_offset": 1 if self.spacing == "leading" else 0,
            "clip_sample": False,
        }
        if self.snr_shift != 1:
            # Without the terminal rescaling, which diffusers does itself.
            size = self.num_train_timesteps
            betas_T = make_betas(self.beta_schedule, self.beta_start, self.beta_end, size, torch.float64)
            alpha_bar_T = shift_snr(torch.cumprod(1 - betas_T, dim=0), self.snr_shift)
            before_T = torch.cat([alpha_bar_T.new_ones(1), alpha_bar_T[:-1]])
            settings["trained_betas"] = (1 - alpha_bar_T / before_T).numpy()
        return settings


def pick_levels(uniform_B: Tensor, probability_T: Tensor) -> Tensor:
    """The level that each uniform number in [0, 1) falls on."""
    last = int(probability_T.nonzero().max())
    running_T = torch.cumsum(probability_T[: last + 1], dim=0)
    # The sum may end a rounding error below 1.
    return torch.searchsorted(running_T, uniform_B.double(), right=True).clamp_max(last)


def make_betas(schedule: str, start: float, end: float, num_steps: int, dtype: torch.dtype) -> Tensor:
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


def min_snr_weight(alpha_bar: Tensor, gamma: float, prediction: str) -> Tensor:
    """Hang et al. 2023: the error of the latent counts min(SNR, gamma), whatever the network predicts."""
    ratio = snr(alpha_bar)
    if prediction == "sample":
        return ratio.clamp_max(gamma)
    return ratio.clamp_max(gamma) / (ratio + 1 if prediction == "v" else ratio)


# EDM

_INPUT_PER_TIMESTEP = 1000


@dataclass(frozen=True, kw_only=True)
class EDMObjective(Objective):
    """EDM (Karras et al. 2022): log-normal noise levels and a network whose input and target have unit variance.

    With d = sigma_data and h = sqrt(sigma^2 + d^2) (their table 1, last column):
        noisy = (latent + sigma * noise) / h                 what the network sees
        latent found = d^2 / h^2 * (latent + sigma * noise) + sigma * d / h * output
    so the output to learn is (sigma / d * latent - d * noise) / h. Their weight of the latent's error, h^2 / (sigma
    d)^2, is then a weight of 1 for the output's. The network's input is ln(sigma) / 4; a timestep is a thousandth of
    it, as it is of an index, and must not be rounded to one.

    Defaults are those of SDXL's EDM variant, which are Karras et al.'s. `max_weight` limits the weight of the latent's
    error, which is what SDXL's `snr_gamma` does here.
    """

    p_mean: float = -1.2
    p_std: float = 1.2
    sigma_data: float = 0.5
    max_weight: float | None = None
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    kind: ClassVar[str] = "edm"
    is_rescaled: ClassVar[bool] = True

    def timesteps(self, uniform_B: Tensor, latent_BCFHW: Tensor) -> Tensor:
        """ln(sigma) is normal."""
        return (self.p_mean + self.p_std * normal_from_uniform(uniform_B)) / 4 / _INPUT_PER_TIMESTEP

    def coefficients(self, timestep_B: Tensor) -> Coefficients:
        sigma_B, data = self._sigma(timestep_B), self.sigma_data
        size_B = (sigma_B.square() + data**2).sqrt()
        return Coefficients(1 / size_B, sigma_B / size_B, sigma_B / (data * size_B), -data / size_B)

    def weight(self, timestep_B: Tensor) -> Tensor:
        sigma_B, data = self._sigma(timestep_B), self.sigma_data
        if self.max_weight is None:
            return torch.ones_like(sigma_B)
        of_latent_B = (sigma_B.square() + data**2) / (sigma_B * data).square()
        return (self.max_weight / of_latent_B).clamp_max(1)

    def timestep_at(self, level_B: Tensor) -> Tensor:
        return torch.logit(level_B.double()) / 4 / _INPUT_PER_TIMESTEP

    def density(self, level_B: Tensor, latent_BCFHW: Tensor) -> Tensor | None:
        """The logit of the noise level is ln(sigma)."""
        return logit_normal_density(level_B.double(), self.p_mean, self.p_std)

    def steps(self, num_steps: int, latent_BCFHW: Tensor) -> list[tuple[float, float | None]]:
        """From sigma_max to sigma_min, dense where there is little noise, and to the latent (their eq. 5)."""
        if num_steps < 1:
            raise ConfigError(f"sampling: {num_steps} steps; give 1 or more")
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        shares = [step / max(num_steps - 1, 1) for step in range(num_steps)]
        visited = [math.log(high + share * (low - high)) * self.rho / 4 / _INPUT_PER_TIMESTEP for share in shares]
        return list(zip(visited, [*visited[1:], None], strict=True))

    def _sigma(self, timestep_B: Tensor) -> Tensor:
        return (4 * _INPUT_PER_TIMESTEP * timestep_B.double()).exp()
