from __future__ import annotations

import math

import pytest
import torch

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.diffusion.flow import FlowObjective, normal_from_uniform

SHAPE = (2, 4, 3, 6, 8)


def normal(*shape: int, purpose: str) -> torch.Tensor:
    return torch.randn(shape, generator=stream(2, purpose))


def test_schedule_runs_exactly_from_one_to_zero_and_falls():
    for shift in (None, 3.0, 0.5, "open_sora2"):
        times = FlowObjective(shift=shift).schedule(torch.empty(SHAPE), 9)
        assert (times[0], times[-1], len(times)) == (1.0, 0.0, 10)
        assert times == sorted(times, reverse=True)


def test_target_is_the_derivative_of_the_path():
    objective = FlowObjective(sigma_min=0.01)
    latent, noise = normal(*SHAPE, purpose="latent"), normal(*SHAPE, purpose="noise")
    early = objective.add_noise_at(latent, noise, torch.full((2,), 0.25))
    late = objective.add_noise_at(latent, noise, torch.full((2,), 0.75))
    slope = (late.noisy_BCFHW - early.noisy_BCFHW) / 0.5
    torch.testing.assert_close(slope, early.target_BCFHW, rtol=0, atol=1e-5)
    assert torch.equal(early.target_BCFHW, late.target_BCFHW)
    assert not torch.allclose(slope, noise - latent, atol=1e-3)


def test_path_begins_at_the_latent_and_ends_at_the_noise():
    latent, noise = normal(*SHAPE, purpose="latent"), normal(*SHAPE, purpose="noise")
    noised = FlowObjective(sigma_min=0.0).add_noise_at(latent, noise, torch.tensor([0.0, 1.0]))
    assert torch.equal(noised.noisy_BCFHW[0], latent[0])
    assert torch.equal(noised.noisy_BCFHW[1], noise[1])


@pytest.mark.parametrize("shift", [None, 3.0, "open_sora2"])
def test_perfect_predictor_samples_the_latent_along_the_training_path(shift):
    objective = FlowObjective(sigma_min=0.0, shift=shift)
    latent, noise = normal(*SHAPE, purpose="latent"), normal(*SHAPE, purpose="noise")
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def predict(x, timestep_B):
        seen.append((x, timestep_B))
        return (x - latent) / timestep_B[:, None, None, None, None]

    result = objective.sample(predict, noise, num_steps=8)
    torch.testing.assert_close(result, latent, rtol=0, atol=2e-6)
    assert not torch.allclose(result, noise, atol=0.1)
    for x, timestep_B in seen:
        trained = objective.add_noise_at(latent, noise, timestep_B)
        torch.testing.assert_close(x, trained.noisy_BCFHW, rtol=0, atol=2e-6)


def test_constant_velocity_ends_at_the_training_path_with_sigma_min():
    objective = FlowObjective(sigma_min=0.1, shift=2.0)
    latent, noise = normal(*SHAPE, purpose="latent"), normal(*SHAPE, purpose="noise")
    velocity = objective.add_noise_at(latent, noise, torch.ones(2)).target_BCFHW
    result = objective.sample(lambda x, timestep_B: velocity, noise, num_steps=5)
    torch.testing.assert_close(result, latent + 0.1 * noise, rtol=0, atol=2e-6)


def test_sampler_reports_each_step_and_keeps_bfloat16_noise_in_float32():
    counted: list[int] = []
    noise = normal(*SHAPE, purpose="noise").bfloat16()
    result = FlowObjective().sample(
        lambda x, timestep_B: x.bfloat16(), noise, num_steps=4, on_step=lambda done, x: counted.append(done)
    )
    assert counted == [1, 2, 3, 4]
    assert result.dtype == torch.float32


def test_logit_normal_times_follow_their_density():
    draws = torch.rand(200_000, generator=stream(3, "timestep"))
    times = FlowObjective(law="logit_normal").time_B(draws, torch.empty(SHAPE)).double()
    edges = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
    centres = (edges[1:] + edges[:-1]) / 2
    logit = (centres / (1 - centres)).log()
    density = (-logit.square() / 2).exp() / math.sqrt(2 * math.pi) / (centres * (1 - centres))
    counted = torch.histogram(times, edges)[0] / len(times) / (edges[1] - edges[0])
    assert (counted - density).abs().max() < 0.05
    assert (counted - 1).abs().max() > 0.5


def test_shifted_uniform_times_follow_their_density():
    alpha = 4.0
    draws = torch.rand(200_000, generator=stream(4, "timestep"))
    times = FlowObjective(law="uniform", shift=alpha).time_B(draws, torch.empty(SHAPE)).double()
    edges = torch.linspace(0, 1, 26, dtype=torch.float64)
    # The inverse of the shift is the cumulative distribution of a shifted uniform time.
    cumulative = edges / (alpha - (alpha - 1) * edges)
    counted = torch.histogram(times, edges)[0] / len(times)
    assert (counted - cumulative.diff()).abs().max() < 0.003
    assert (counted - 1 / 25).abs().max() > 0.05


def test_extreme_draws_stay_inside_the_open_interval():
    draws = torch.tensor([0.0, 0.5, 1 - 2.0**-24])
    times = FlowObjective().time_B(draws, torch.empty(SHAPE))
    assert 0 < times[0] < times[1] < times[2] < 1
    assert times[1] == 0.5
    assert normal_from_uniform(torch.tensor([0.975])).item() == pytest.approx(1.959964, abs=1e-5)


def test_noisy_latent_keeps_the_latent_dtype_and_target_is_float32():
    latent, noise = normal(*SHAPE, purpose="latent").bfloat16(), normal(*SHAPE, purpose="noise")
    noised = FlowObjective().add_noise(latent, noise, torch.tensor([0.1, 0.9]))
    assert noised.noisy_BCFHW.dtype == torch.bfloat16
    assert {noised.target_BCFHW.dtype, noised.timestep_B.dtype, noised.weight_B.dtype} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"law": "normal"}, "law"),
        ({"shift": "flux"}, "shift"),
        ({"shift": -1.0}, "shift"),
        ({"sigma_min": 1.0}, "sigma"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, word):
    with pytest.raises(ConfigError, match=word):
        FlowObjective(**settings)
