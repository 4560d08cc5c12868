"""Properties of all objectives, at many values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frameloom.diffusion.noise_levels import band_shares, profile_objective
from frameloom.diffusion.objectives import DDPMObjective, FlowObjective, LevelBias, pick_levels, shift_time
from tests.diffusion import properties

quick = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.mark.parametrize("name", properties.CHECKS)
def test_property_holds(name: str) -> None:
    properties.CHECKS[name]()


@quick
@given(st.floats(0.05, 0.9))
def test_noisy_latent_and_target_are_the_mix_at_every_level(level: float) -> None:
    properties.check_noisy_and_target(level)


@quick
@given(st.integers(0, 999))
def test_predictions_give_latent_and_noise_back_at_every_index(index: int) -> None:
    properties.check_ddpm_identities(index)


@quick
@given(st.floats(0, 0.85), st.floats(0, 0.5))
def test_flow_target_is_the_slope_of_the_path(time: float, sigma_min: float) -> None:
    properties.check_flow_identities(time, sigma_min)


@quick
@given(st.floats(0.01, 80))
def test_edm_is_the_published_preconditioning_at_every_sigma(sigma: float) -> None:
    properties.check_edm_identities(sigma)


@quick
@given(st.floats(0.1, 100))
def test_min_snr_counts_the_latents_error_for_every_gamma(gamma: float) -> None:
    properties.check_min_snr(gamma)


@quick
@given(st.floats(0.05, 20), st.floats(0.05, 20), st.floats(0, 1))
def test_shifts_multiply_and_can_be_undone(one: float, other: float, time: float) -> None:
    properties.check_shift(one)
    given_time = torch.tensor([time], dtype=torch.float64)
    torch.testing.assert_close(shift_time(shift_time(given_time, one), other), shift_time(given_time, one * other))
    torch.testing.assert_close(shift_time(shift_time(given_time, one), 1 / one), given_time)


@quick
@given(
    st.sampled_from(["none", "earlier", "later", "range"]),
    st.floats(0.1, 10),
    st.tuples(st.integers(0, 99), st.integers(1, 100)).map(sorted).filter(lambda pair: pair[0] < pair[1]),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_only_possible_levels_are_drawn(
    strategy: str, multiplier: float, pair: list[int], portion: float, draw: float
) -> None:
    bias = LevelBias(strategy, multiplier, *pair, portion)  # type: ignore[arg-type]
    probability_T = DDPMObjective(num_train_timesteps=100, bias=bias, within=(pair[0], pair[1])).probability_T
    (level,) = pick_levels(torch.tensor([draw], dtype=torch.float64), probability_T).tolist()
    assert pair[0] <= level < pair[1]
    running_T = torch.cumsum(probability_T, dim=0)
    before = float(running_T[level - 1]) if level else 0.0
    assert before <= draw <= float(running_T[level]) + 1e-12


def test_profile_of_a_discrete_law_is_that_of_its_probabilities() -> None:
    made = DDPMObjective(bias=LevelBias("later", 3.0, portion=0.5), snr_gamma=5.0)
    found = profile_objective(made, (1, 1, 1))
    band = (made.coefficients(torch.arange(1000) / 1000).noise_level * 50).long().clamp_max(49)
    wanted = torch.zeros(50, dtype=torch.float64).index_add(0, band, made.probability_T)
    torch.testing.assert_close(found.share_L, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.density_L, wanted * 50, rtol=0, atol=1e-3)
    plain = profile_objective(DDPMObjective(), (1, 1, 1))
    assert plain.mean(plain.level_L) < found.mean(found.level_L)
    assert torch.equal(plain.weight_L, torch.ones(50, dtype=torch.float64)) and plain.mean(
        plain.weight_L
    ) == pytest.approx(1)
    assert found.pull_middle() < 0.5 < plain.pull_middle()


def test_a_larger_shift_moves_the_whole_profile_up() -> None:
    middles = [profile_objective(FlowObjective(shift=shift), (1, 1, 1)).pull_middle() for shift in (0.5, 1.0, 3.0)]
    assert middles == pytest.approx([1 / 3, 0.5, 0.75], abs=2e-3)
    small, large = (profile_objective(FlowObjective(shift="sd3"), (1, side, side)) for side in (32, 64))
    assert small.pull_middle() == pytest.approx(0.5, abs=2e-3) and large.pull_middle() == pytest.approx(2 / 3, abs=2e-3)


def test_grid_times_have_no_density_and_lie_on_the_grid() -> None:
    latent = torch.empty(1, 1, 1, 4, 4, device="meta")
    made = FlowObjective(distribution="uniform", num_levels=10, sigma_min=0.0)
    assert made.density(torch.tensor([0.5]), latent) is None
    times = made.timesteps(torch.linspace(0, 0.999, 500), latent)
    assert sorted({round(float(time), 4) for time in times}) == [round(0.1 * place, 4) for place in range(1, 11)]
    assert band_shares(made, latent, 20).count_nonzero() == 10
    smooth = band_shares(FlowObjective(distribution="uniform", sigma_min=0.0), latent, 20)
    assert smooth.count_nonzero() == 20
