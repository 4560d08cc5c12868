"""What must hold of every objective, as functions that raise AssertionError. Each computes what it expects by itself.

The mutation tests show that each of them can fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from frameloom.core.random import stream
from frameloom.diffusion import noise_levels, objectives
from frameloom.diffusion.noise_levels import band_levels, band_shares
from frameloom.diffusion.objectives import (
    Coefficients,
    DDPMObjective,
    EDMObjective,
    FlowObjective,
    LevelBias,
    Noised,
    Objective,
    add_noise,
)
from frameloom.diffusion.samplers import run_sampler

SHAPE = (3, 4, 5, 2, 2)
SCALED = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
PREDICTIONS = ("v", "epsilon", "sample")


def normal(purpose: str, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=stream(11, purpose))


def close(found: Tensor | float, wanted: Tensor | float, tolerance: float = 1e-5) -> None:
    gap = (torch.as_tensor(found, dtype=torch.float64) - torch.as_tensor(wanted, dtype=torch.float64)).abs().max()
    assert float(gap) <= tolerance, f"off by {float(gap)}"


def make_ddpm(prediction: str, **settings: object) -> DDPMObjective:
    return DDPMObjective(**{"zero_terminal_snr": False, "prediction": prediction, **SCALED, **settings})


def make_objectives() -> dict[str, Objective]:
    return {
        **{prediction: make_ddpm(prediction) for prediction in PREDICTIONS},
        "v, zero terminal": DDPMObjective(**SCALED),
        "flow": FlowObjective(shift=3.0),
        "flow, sigma_min": FlowObjective(distribution="uniform", sigma_min=0.1),
        "edm": EDMObjective(),
    }


def numbers(made: Objective, timestep_B: Tensor) -> Coefficients:
    """Those of the first sample."""
    return Coefficients(*(float(part[0]) for part in made.coefficients(timestep_B)))  # type: ignore[arg-type]


def check_noisy_and_target(level: float = 0.4) -> None:
    """Both are the mix that the coefficients say, at the level that was asked for; levels of frames are independent."""
    latent, noise = normal("latent"), normal("noise")
    for name, made in make_objectives().items():
        timestep_B = made.timestep_at(torch.full((3,), level))
        noised, found = add_noise(made, latent, noise, timestep_B), numbers(made, timestep_B)
        close(noised.noisy_BCFHW, found.alpha * latent + found.sigma * noise)
        close(noised.target_BCFHW, found.target_latent * latent + found.target_noise * noise)
        assert abs(float(found.noise_level) - level) < 0.002, name
        for original, part in zip((latent, noise), found.split(noised.noisy_BCFHW, noised.target_BCFHW), strict=True):
            close(part, original, 1e-4 / min(level, 1 - level))
        timestep_BF = made.timestep_at(torch.tensor([level, 0.2, 0.5, 0.7, 0.9])).expand(3, -1)
        by_frame = add_noise(made, latent, noise, timestep_BF)
        close(by_frame.noisy_BCFHW[:, :, :1], noised.noisy_BCFHW[:, :, :1])
        close(
            by_frame.target_BCFHW[:, :, 3:4], add_noise(made, latent, noise, timestep_BF[:, 3]).target_BCFHW[:, :, 3:4]
        )


def check_ddpm_identities(index: int = 400) -> None:
    """Variance is preserved; every prediction gives latent and noise back; v turns by a right angle."""
    latent, noise = normal("latent"), normal("noise")
    for prediction in PREDICTIONS:
        made = make_ddpm(prediction)
        level, timestep_B = float(made.alpha_bar_T[index]), torch.full((3,), index / 1000)
        noised = add_noise(made, latent, noise, timestep_B)
        close(noised.noisy_BCFHW, math.sqrt(level) * latent + math.sqrt(1 - level) * noise)
        wanted = {"v": math.sqrt(level) * noise - math.sqrt(1 - level) * latent, "epsilon": noise, "sample": latent}
        close(noised.target_BCFHW, wanted[prediction])
        found = numbers(made, timestep_B).split(noised.noisy_BCFHW, noised.target_BCFHW)
        # Epsilon and sample divide by a number that is small at an end.
        tolerance = 1e-5 / min(math.sqrt(level), math.sqrt(1 - level))
        close(found[0], latent, tolerance)
        close(found[1], noise, tolerance)


def check_flow_identities(time: float = 0.3, sigma_min: float = 0.1) -> None:
    """The target is the slope of the path, whose ends are the noise and the latent with sigma_min of the noise."""
    latent, noise = normal("latent"), normal("noise")
    made = FlowObjective(sigma_min=sigma_min)

    def at(value: float) -> Noised:
        return add_noise(made, latent, noise, torch.full((3,), value))

    close(at(1.0).noisy_BCFHW, noise)
    close(at(0.0).noisy_BCFHW, latent + sigma_min * noise)
    close((at(time + 0.125).noisy_BCFHW - at(time).noisy_BCFHW) / 0.125, at(time).target_BCFHW, 1e-4)
    close(at(time).noisy_BCFHW - time * at(time).target_BCFHW, latent + sigma_min * noise)


def check_edm_identities(sigma: float = 0.7) -> None:
    """SDXL's own formulas: D = c_skip x + c_out F(c_in x, ln(sigma) / 4), loss = w (D - latent)^2."""
    made, data = EDMObjective(), 0.5
    latent, noise, output = normal("latent"), normal("noise"), normal("output")
    timestep_B = torch.full((3,), math.log(sigma) / 4000, dtype=torch.float64)
    noised = add_noise(made, latent, noise, timestep_B)
    size = math.sqrt(sigma**2 + data**2)
    x = latent + sigma * noise
    found = data**2 / size**2 * x + sigma * data / size * output
    weight = (sigma**2 + data**2) / (sigma * data) ** 2
    close(noised.noisy_BCFHW, x / size)
    loss_B = objectives.weighted_error_B(output, noised)
    close(loss_B, weight * (found - latent).square().mean(dim=(1, 2, 3, 4)), 1e-4)
    close(numbers(made, timestep_B).split(x / size, output)[0], found, 1e-4)
    close(made.timesteps(torch.tensor([0.5]), latent) * 4000, -1.2)
    close(EDMObjective(max_weight=5.0).weight(timestep_B[:1]), min(weight, 5.0) / weight)


def check_schedule() -> None:
    """alpha_bar by a plain loop; the rescaled one ends at 0 and keeps its start; a shift divides the SNR."""
    for kind, (start, end) in {"linear": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012)}.items():
        steps = np.linspace(0, 1, 1000)
        roots = np.sqrt(start) + (np.sqrt(end) - np.sqrt(start)) * steps
        betas = start + (end - start) * steps if kind == "linear" else roots**2
        wanted = torch.from_numpy(np.exp(np.cumsum(np.log1p(-betas))))
        settings = {"beta_schedule": kind, "beta_start": start, "beta_end": end}
        plain = make_ddpm("v", **settings)
        close(plain.alpha_bar_T, wanted, 1e-6)
        zero = make_ddpm("v", **settings, zero_terminal_snr=True)
        root = wanted.sqrt()
        close(zero.alpha_bar_T.sqrt(), (root - root[-1]) * root[0] / (root[0] - root[-1]), 1e-5)
        assert float(zero.alpha_bar_T[-1]) == 0
        shifted = make_ddpm("v", **settings, snr_shift=3.0).alpha_bar_T
        ratio = (wanted / (1 - wanted)) / (shifted / (1 - shifted))
        close(ratio, torch.full((1000,), 3.0, dtype=torch.float64), 1e-6)


def check_min_snr(gamma: float = 5.0) -> None:
    """Whatever is predicted, the squared error of the latent counts min(SNR, gamma)."""
    index = torch.arange(0, 1000, 37)
    for prediction in PREDICTIONS:
        made = make_ddpm(prediction, snr_gamma=gamma)
        found, alpha_bar = made.coefficients(index / 1000), made.alpha_bar_T[index].double()
        of_latent = (found.target_latent - found.target_noise * found.alpha / found.sigma).square()
        wanted = (alpha_bar / (1 - alpha_bar)).clamp_max(gamma)
        close(made.weight(index / 1000) * of_latent / wanted, torch.ones(len(index)), 1e-4)
        plain = make_ddpm(prediction).weight(index / 1000)
        assert torch.equal(plain, torch.ones_like(plain))


def check_flow_weights() -> None:
    time = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    close(FlowObjective(weighting="sigma_sqrt").weight(time), torch.tensor([16.0, 4.0, 16 / 9]))
    wanted = [2 / (math.pi * ((1 - value) ** 2 + value**2)) for value in time.tolist()]
    close(FlowObjective(weighting="cosmap").weight(time), torch.tensor(wanted))
    close(FlowObjective().weight(time), torch.ones(3))


def check_noise_error_factor() -> None:
    """A prediction that is off in the noise alone, as far as the noisy latent allows, is off by this in the target."""
    for made in make_objectives().values():
        found = numbers(made, made.timestep_at(torch.tensor([0.3])))
        noise_error = 0.01
        latent_error = -found.sigma / found.alpha * noise_error
        wanted = (found.target_latent * latent_error + found.target_noise * noise_error) ** 2
        factor = made.coefficients(made.timestep_at(torch.tensor([0.3]))).noise_error_factor()
        close(float(factor) * noise_error**2, wanted, 1e-9)


def check_shift(alpha: float = 3.0) -> None:
    """A shift multiplies the odds of the time; sizes give the published factors."""
    time = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    moved = objectives.shift_time(time, alpha)
    close(moved / (1 - moved), alpha * time / (1 - time), 1e-6)
    drawn = FlowObjective(distribution="uniform", shift=alpha).timesteps(torch.tensor([0.5]), torch.empty(SHAPE))
    close(drawn, alpha / (1 + alpha))
    assert FlowObjective(shift=alpha).steps(2, torch.empty(SHAPE))[1][0] > 0.5 or alpha <= 1


def check_size_shift() -> None:
    sizes = {(1, 32, 32): 1.0, (1, 128, 128): 3.0, (4, 32, 32): 2.0, (33, 32, 32): 5.7446}
    for (frames, height, width), wanted in sizes.items():
        latent = torch.empty(1, 1, frames, height, width, device="meta")
        close(FlowObjective(shift="open_sora2").shift_factor(latent), wanted, 1e-4)
    square = {(1, 32, 32): 1.0, (1, 64, 64): 2.0, (1, 128, 128): 4.0, (4, 64, 64): 4.0}
    for (frames, height, width), wanted in square.items():
        latent = torch.empty(1, 1, frames, height, width, device="meta")
        close(FlowObjective(shift="sd3", shift_tokens=256).shift_factor(latent), wanted)


LAWS: dict[str, Callable[[], Objective]] = {
    "uniform": lambda: FlowObjective(distribution="uniform"),
    "uniform, shifted": lambda: FlowObjective(distribution="uniform", shift=4.0),
    "logit-normal": lambda: FlowObjective(logit_mean=-0.5, logit_std=0.7),
    "logit-normal, shifted": lambda: FlowObjective(shift=0.4, sigma_min=0.05, logit_mean=0.3),
    "edm": lambda: EDMObjective(),
}


def check_densities() -> None:
    """Closed forms against the law itself: equal shares of draws, and a whole of 1."""
    latent = torch.empty(1, 1, 1, 32, 32, device="meta")
    for name, make in LAWS.items():
        made = make()
        shares = band_shares(made, latent, 20)
        fine = band_levels(20 * 50)
        density = made.density(fine, latent)
        assert density is not None
        close(density.reshape(20, 50).mean(dim=1) / 20, shares, 2e-4)
        middle = _middle(name)
        found = made.coefficients(made.timesteps(torch.tensor([0.5]), latent)).noise_level
        close(found, middle, 1e-3)


def _middle(name: str) -> float:
    """The median by hand."""

    def logistic(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    if name == "logit-normal, shifted":
        time = logistic(0.3 + math.log(0.4))
        rest = 1 - time
        return (1 - 0.95 * rest) / (1 + 0.05 * rest)
    return {"uniform": 0.5, "uniform, shifted": 0.8, "logit-normal": logistic(-0.5), "edm": logistic(-1.2)}[name]


def check_mode_law() -> None:
    """Symmetric, from 1 to 0, and slow in the middle, where times are then dense."""
    draw = torch.linspace(0, 1, 101, dtype=torch.float64)
    time = objectives.mode_time(draw, 1.0)
    close(time[[0, 50, 100]], torch.tensor([1.0, 0.5, 0.0]))
    close(time + time.flip(0), torch.ones(101))
    # The slope in the middle is -1 - s (1 - pi / 2).
    close((time[51] - time[49]) / 0.02, -(2 - math.pi / 2), 1e-3)


def check_index_law() -> None:
    """Draws fall on indices as often as they should, all of them and no others; the ends of [0, 1) on the end ones."""
    draw = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000
    for bias, within, first, last in (
        (None, None, 0, 999),
        (LevelBias("later", 2.0, portion=0.25), None, 0, 999),
        (LevelBias("range", 2.0, begin=200, end=500), None, 0, 999),
        (None, (200, 500), 200, 499),
    ):
        made = DDPMObjective(bias=bias, within=within)
        index = made.index(made.timesteps(draw, normal("latent")))
        counted = torch.bincount(index, minlength=1000) / len(index)
        wanted = torch.ones(1000, dtype=torch.float64)
        if bias is not None:
            wanted[slice(750, 1000) if bias.strategy == "later" else slice(200, 500)] = 2
        if within is not None:
            wanted[:200], wanted[500:] = 0, 0
        close(counted, wanted / wanted.sum(), 1e-5)
        ends = made.timesteps(torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64), normal("latent"))
        assert made.index(ends).tolist() == [first, last]


def check_bias() -> None:
    """The published numbers: 40% of draws in the biased quarter, 46.15% in 200 to 500."""
    quarter = {"earlier": slice(0, 250), "later": slice(750, 1000)}
    for strategy, part in quarter.items():
        found = DDPMObjective(bias=LevelBias(strategy, 2.0, portion=0.25)).probability_T
        close(found[part].sum(), 0.4)
    found = DDPMObjective(bias=LevelBias("range", 2.0, begin=200, end=500)).probability_T
    close(found[200:500].sum(), 600 / 1300, 1e-9)
    assert float(found[500]) < float(found[499]) and float(found[199]) < float(found[200])
    close(DDPMObjective(bias=LevelBias()).probability_T, torch.full((1000,), 1e-3))


def check_strata() -> None:
    """Parts are equal, in order, and full: over all of them the draws are uniform again."""
    draw = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    parts = [noise_levels.stratify(draw, torch.full((100,), stratum), 8) for stratum in range(8)]
    for stratum, part in enumerate(parts):
        assert stratum / 8 <= float(part.min()) and float(part.max()) < (stratum + 1) / 8
    close(torch.cat(parts), (torch.arange(800, dtype=torch.float64) + 0.5) / 800, 1e-9)


def check_timesteps() -> None:
    """A denoiser is given the timestep in float32, and the index comes back from it."""
    index = torch.arange(3) * 400
    for made in make_objectives().values():
        timestep_B = made.timestep_at(torch.tensor([0.1, 0.5, 0.9]))
        close(add_noise(made, normal("latent"), normal("noise"), timestep_B).timestep_B, timestep_B, 1e-7)
    assert torch.equal(make_ddpm("v").index((index / 1000).float()), index)


def check_offset() -> None:
    noise, draw = normal("noise"), normal("offset", (3, 4))
    for offset in (draw, draw[:, :1]):
        moved = objectives.offset_noise(noise, offset, 0.1) - noise
        close(moved, (0.1 * offset)[:, :, None, None, None].expand(SHAPE))


def check_perturbation() -> None:
    """It is in the noisy latent as the noise is, and the target does not know of it."""
    latent, noise, extra = normal("latent"), normal("noise"), normal("extra")
    for made in make_objectives().values():
        timestep_B = made.timestep_at(torch.tensor([0.3, 0.5, 0.7]))
        plain, moved = (add_noise(made, latent, noise, timestep_B, part) for part in (None, extra))
        sigma = made.coefficients(timestep_B).sigma.float()[:, None, None, None, None]
        close(moved.noisy_BCFHW - plain.noisy_BCFHW, sigma * extra)
        assert torch.equal(moved.target_BCFHW, plain.target_BCFHW)


def check_loss() -> None:
    """Weights go to samples, or to frames; a part of the loss may go to differences between frames."""
    noised = Noised(normal("noisy"), torch.full((3,), 0.5), normal("target"), torch.tensor([1.0, 2.0, 0.5]))
    prediction = normal("prediction")
    off = prediction - noised.target_BCFHW
    found = objectives.weighted_error_B(prediction.bfloat16().float(), noised)
    assert torch.equal(objectives.weighted_error_B(prediction.bfloat16(), noised), found)
    found = objectives.weighted_error_B(prediction, noised)
    moving = objectives.weighted_error_B(prediction, noised, motion_share=0.25)
    for sample, weight in enumerate(noised.weight_B):
        close(found[sample], weight * off[sample].square().mean(), 1e-5)
        moved = off[sample].diff(dim=1).square().mean()
        close(moving[sample], 0.75 * found[sample] + 0.25 * weight * moved, 1e-5)
    weight_BF = torch.rand(3, 5, generator=stream(11, "weights"))
    by_frame = objectives.weighted_error_B(prediction, noised._replace(weight_B=weight_BF))
    close(by_frame, (off.square().mean(dim=(1, 3, 4)) * weight_BF).mean(dim=1), 1e-5)


def check_sampling_follows_training() -> None:
    """With a network that knows the answer, sampling passes training's noisy latents and ends at the latent."""
    latent, noise = normal("latent"), normal("noise")
    for name, made in make_objectives().items():
        if name == "flow, sigma_min":
            continue  # ends at the latent with sigma_min of the noise, see the identities
        seen: list[float] = []

        def predict(x: Tensor, timestep_B: Tensor, made: Objective = made, seen: list[float] = seen) -> Tensor:
            trained = add_noise(made, latent, noise, timestep_B)
            close(x, trained.noisy_BCFHW, 2e-3)
            seen.append(float(made.coefficients(timestep_B).noise_level[0]))
            return trained.target_BCFHW

        start = noise
        if made.kind != "flow":
            first, _ = made.steps(12, latent)[0]
            found = numbers(made, torch.tensor([first], dtype=torch.float64))
            start = (found.alpha * latent + found.sigma * noise) / math.hypot(found.alpha, found.sigma)
        close(run_sampler("default", made, predict, start, num_steps=12), latent, 2e-3)
        assert len(seen) == 12 and seen == sorted(seen, reverse=True) and len(set(seen)) == 12
        top = made.coefficients(made.timestep_at(torch.tensor([1.0 - 1e-9]))).noise_level
        assert made.kind == "edm" or abs(seen[0] - float(top)) < 1e-4


CHECKS: dict[str, Callable[[], None]] = {
    name: value for name, value in list(globals().items()) if name.startswith("check_")
}
