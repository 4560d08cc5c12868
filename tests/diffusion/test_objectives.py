"""Objectives at single values, and those that scheduler files describe."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from frameloom.builders.objective import read_scheduler
from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.diffusion.objectives import (
    DDPMObjective,
    EDMObjective,
    FlowObjective,
    add_noise,
    grid_time,
    min_snr_weight,
    normal_from_uniform,
    offset_noise,
    snr,
)
from frameloom.diffusion.samplers import run_sampler

SHAPE = (3, 4, 2, 4, 4)
COG = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "snr_shift_scale": 3.0,
}


def normal(purpose: str, *shape: int) -> Tensor:
    return torch.randn(shape or SHAPE, generator=stream(6, purpose))


LATENT, NOISE = normal("latent"), normal("noise")


def test_the_last_level_is_pure_noise_whose_v_is_minus_the_latent() -> None:
    noised = add_noise(DDPMObjective(snr_gamma=5.0), LATENT, NOISE, torch.full((3,), 0.999))
    assert torch.equal(noised.noisy_BCFHW, NOISE) and torch.equal(noised.target_BCFHW, -LATENT)
    assert noised.weight_B.tolist() == [0, 0, 0]
    leaky = add_noise(DDPMObjective(zero_terminal_snr=False), LATENT, NOISE, torch.full((3,), 0.999))
    assert not torch.equal(leaky.noisy_BCFHW, NOISE)


def test_min_snr_weights_of_the_released_schedule() -> None:
    alpha_bar = DDPMObjective(zero_terminal_snr=False).alpha_bar_T.double()
    ratio = snr(alpha_bar)
    # Error of the latent = error of epsilon / SNR = error of v * (1 - alpha_bar) = error of v / (SNR + 1).
    torch.testing.assert_close(min_snr_weight(alpha_bar, 5.0, "epsilon"), ratio.clamp_max(5.0) / ratio)
    picked = min_snr_weight(DDPMObjective().alpha_bar_T, 5.0, "v")[[0, 100, 500, 999]].tolist()
    assert picked == pytest.approx([5.0e-4, 0.528, 0.0752, 0.0], rel=2e-3)


def test_every_index_is_drawn_equally_often() -> None:
    draws = torch.rand(200_000, generator=stream(7, "timestep"))
    objective = DDPMObjective()
    index = objective.index(objective.timesteps(draws, LATENT))
    assert (index.min().item(), index.max().item()) == (0, 999)
    counted = torch.bincount(index // 40, minlength=25) / len(index)
    assert (counted - 1 / 25).abs().max() < 0.003
    skewed = torch.bincount(objective.index(objective.timesteps(draws**2, LATENT)) // 40, minlength=25) / len(index)
    assert (skewed - 1 / 25).abs().max() > 0.05


def test_leading_spacing_is_stable_diffusions() -> None:
    objective = DDPMObjective(zero_terminal_snr=False, prediction="epsilon", spacing="leading")
    visited = [round(1000 * now) for now, _ in objective.steps(40, LATENT)]
    assert visited[:2] + visited[-1:] == [976, 951, 1]
    assert max(now for now, _ in objective.steps(1000, LATENT)) == 0.999


def test_even_steps_are_those_of_the_schedule_only_where_they_divide_it() -> None:
    next_one, even = (DDPMObjective(step_to=rule) for rule in ("next", "even"))
    assert next_one.steps(50, LATENT) == even.steps(50, LATENT)
    next_one, even = (replace(objective, spacing="linspace") for objective in (next_one, even))
    assert next_one.steps(4, LATENT) != even.steps(4, LATENT)


def test_more_sampling_steps_than_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 to 1000"):
        DDPMObjective().steps(1001, LATENT)
    with pytest.raises(ConfigError, match="give 1 or more"):
        EDMObjective().steps(0, LATENT)


@pytest.mark.parametrize("shift", [None, 3.0, 0.5, "open_sora2"])
def test_flow_steps_run_exactly_from_one_to_zero_and_fall(shift: float | str | None) -> None:
    steps = FlowObjective(shift=shift).steps(9, torch.empty(SHAPE))  # type: ignore[arg-type]
    assert (steps[0][0], steps[-1][1], len(steps)) == (1.0, 0.0, 9)
    assert all(then < now for now, then in steps if then is not None)


def test_constant_velocity_ends_at_the_training_path_with_sigma_min() -> None:
    objective = FlowObjective(sigma_min=0.1, shift=2.0)
    velocity = add_noise(objective, LATENT, NOISE, torch.ones(3)).target_BCFHW
    counted: list[int] = []
    result = run_sampler(
        "default", objective, lambda *_: velocity, NOISE, num_steps=5, on_step=lambda count, x: counted.append(count)
    )
    torch.testing.assert_close(result, LATENT + 0.1 * NOISE, rtol=0, atol=2e-6)
    assert counted == [1, 2, 3, 4, 5]
    half = run_sampler("default", objective, lambda x, timestep_B: x.bfloat16(), NOISE.bfloat16(), num_steps=4)
    assert half.dtype == torch.float32


def test_logit_normal_times_follow_their_density() -> None:
    draws = torch.rand(200_000, generator=stream(3, "timestep"))
    times = FlowObjective().timesteps(draws, torch.empty(SHAPE))
    edges = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
    centres = (edges[1:] + edges[:-1]) / 2
    logit = (centres / (1 - centres)).log()
    density = (-logit.square() / 2).exp() / math.sqrt(2 * math.pi) / (centres * (1 - centres))
    counted = torch.histogram(times, edges)[0] / len(times) / (edges[1] - edges[0])
    assert (counted - density).abs().max() < 0.05
    assert (counted - 1).abs().max() > 0.5


def test_extreme_draws_stay_inside_the_open_interval() -> None:
    times = FlowObjective().timesteps(torch.tensor([0.0, 0.5, 1 - 2.0**-24]), torch.empty(SHAPE))
    assert 0 < times[0] < times[1] < times[2] < 1
    assert times[1] == 0.5
    assert normal_from_uniform(torch.tensor([0.975])).item() == pytest.approx(1.959964, abs=1e-5)


def test_grid_times_are_whole_levels_and_never_zero() -> None:
    times = grid_time(torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    assert float(times.min()) >= 0.001 and float(times.max()) <= 1
    assert torch.allclose((times * 1000).round(), times * 1000, atol=1e-3)


def test_a_noisy_latent_keeps_the_latent_dtype_and_the_rest_is_float32() -> None:
    noised = add_noise(FlowObjective(), LATENT.bfloat16(), NOISE, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    assert noised.noisy_BCFHW.dtype == torch.bfloat16
    assert {noised.target_BCFHW.dtype, noised.timestep_B.dtype, noised.weight_B.dtype} == {torch.float32}


def test_offset_noise_moves_the_mean_of_each_channel() -> None:
    draw = normal("offset", 3, 4)
    moved = offset_noise(NOISE, draw, 0.1)
    torch.testing.assert_close(moved.mean(dim=(2, 3, 4)), NOISE.mean(dim=(2, 3, 4)) + 0.1 * draw)
    assert torch.equal(offset_noise(NOISE, draw, 0.0), NOISE)


def test_training_ignores_the_shift_that_the_sampler_applies() -> None:
    training = read_scheduler(COG)
    sampler = replace(training, snr_shift=COG["snr_shift_scale"])  # type: ignore[arg-type]
    assert training.snr_shift == 1
    gap = (training.alpha_bar_T - sampler.alpha_bar_T.float()).abs()
    assert float(gap.max()) == pytest.approx(0.264, abs=0.001) and int(gap.argmax()) == 264
    assert sampler.alpha_bar_T.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prediction_type": "flow"}, "we know v_prediction, epsilon, sample"),
        ({"trained_betas": [0.1]}, "betas that follow a rule"),
        ({"prediction_type": "epsilon"}, "divides by zero"),
        ({"timestep_spacing": "leading"}, "choose 'trailing'"),
        ({"beta_schedule": "squaredcos_cap_v2"}, "beta_schedule is 'squaredcos_cap_v2'; we know linear"),
    ],
)
def test_scheduler_files_that_we_do_not_know_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_scheduler({**COG, **change})
