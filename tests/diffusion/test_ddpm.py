from __future__ import annotations

import pytest
import torch

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.diffusion.ddpm import DDPMObjective, min_snr_weight, snr

SHAPE = (3, 4, 2, 4, 4)
SCALED = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def normal(*shape: int, purpose: str) -> torch.Tensor:
    return torch.randn(shape, generator=stream(6, purpose))


def test_leading_spacing_is_stable_diffusions():
    objective = DDPMObjective(**SCALED, zero_terminal_snr=False, prediction="epsilon", spacing="leading")
    assert objective.schedule(40)[:2] + objective.schedule(40)[-1:] == [976, 951, 1]
    assert max(objective.schedule(1000)) == 999


def test_prediction_identities_return_latent_and_noise():
    latent, noise = normal(*SHAPE, purpose="latent"), normal(*SHAPE, purpose="noise")
    for kind in ("v", "epsilon"):
        objective = DDPMObjective(zero_terminal_snr=False, prediction=kind)
        noised = objective.add_noise_at(latent, noise, torch.full((3,), 400))
        level = float(objective.alpha_bar_T[400])
        found_latent, found_noise = objective.split(noised.noisy_BCFHW, noised.target_BCFHW, level)
        torch.testing.assert_close(found_latent, latent, rtol=0, atol=1e-5)
        torch.testing.assert_close(found_noise, noise, rtol=0, atol=1e-5)
        wrong_latent, _ = objective.split(noised.noisy_BCFHW, noised.target_BCFHW, level / 2)
        assert not torch.allclose(wrong_latent, latent, atol=0.01)


def test_terminal_level_is_pure_noise_whose_v_is_minus_the_latent():
    latent, noise = normal(*SHAPE, purpose="latent"), normal(*SHAPE, purpose="noise")
    noised = DDPMObjective(snr_gamma=5.0).add_noise_at(latent, noise, torch.full((3,), 999))
    assert torch.equal(noised.noisy_BCFHW, noise)
    assert torch.equal(noised.target_BCFHW, -latent)
    assert noised.weight_B.tolist() == [0, 0, 0]
    leaky = DDPMObjective(zero_terminal_snr=False).add_noise_at(latent, noise, torch.full((3,), 999))
    assert not torch.equal(leaky.noisy_BCFHW, noise)


def test_min_snr_weights_are_the_same_error_of_the_latent():
    alpha_bar = DDPMObjective(zero_terminal_snr=False).alpha_bar_T.double()
    ratio = snr(alpha_bar)
    # Error of the latent = error of epsilon / SNR = error of v * (1 - alpha_bar) = error of v / (SNR + 1).
    torch.testing.assert_close(min_snr_weight(alpha_bar, 5.0, "epsilon"), ratio.clamp_max(5.0) / ratio)
    torch.testing.assert_close(min_snr_weight(alpha_bar, 5.0, "v"), ratio.clamp_max(5.0) * (1 - alpha_bar))
    zero = DDPMObjective().alpha_bar_T
    picked = min_snr_weight(zero, 5.0, "v")[[0, 100, 500, 999]].tolist()
    assert picked == pytest.approx([5.0e-4, 0.528, 0.0752, 0.0], rel=2e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"spacing": "linspace"},
        SCALED | {"snr_shift": 3.0},
        {"zero_terminal_snr": False, "prediction": "epsilon"},
    ],
)
def test_perfect_predictor_samples_the_latent_along_the_training_path(settings):
    objective = DDPMObjective(**settings)
    latent, noise = normal(*SHAPE, purpose="latent"), normal(*SHAPE, purpose="noise")
    first = objective.add_noise_at(latent, noise, torch.full((3,), 999)).noisy_BCFHW
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def predict(x, timestep_B):
        index_B = (timestep_B * 1000).round().long()
        seen.append((x, index_B))
        return objective.add_noise_at(latent, noise, index_B).target_BCFHW

    result = objective.sample(predict, first, num_steps=12)
    # Epsilon divides rounding errors by sqrt(alpha_bar), which is 0.006 at the first step.
    torch.testing.assert_close(result, latent, rtol=0, atol=1e-4)
    assert seen[0][1].tolist() == [999] * 3
    for x, index_B in seen:
        trained = objective.add_noise_at(latent, noise, index_B)
        torch.testing.assert_close(x, trained.noisy_BCFHW, rtol=0, atol=1e-4)
    shifted = objective.sample(lambda x, timestep_B: predict(x, timestep_B) + 0.1, first, num_steps=12)
    assert not torch.allclose(shifted, latent, atol=0.01)


def test_timesteps_are_index_over_thousand_and_give_the_index_back():
    objective = DDPMObjective()
    index = torch.arange(1000)
    timestep = objective.timestep_B(index)
    assert timestep.dtype == torch.float32
    assert (timestep[0].item(), timestep[-1].item()) == (0.0, pytest.approx(0.999))
    assert torch.equal((timestep * 1000).round().long(), index)


def test_every_index_is_drawn_equally_often():
    draws = torch.rand(200_000, generator=stream(7, "timestep"))
    index = DDPMObjective().index_B(draws)
    assert (index.min().item(), index.max().item()) == (0, 999)
    counted = torch.bincount(index // 40, minlength=25) / len(index)
    assert (counted - 1 / 25).abs().max() < 0.003
    skewed = torch.bincount(DDPMObjective().index_B(draws**2) // 40, minlength=25) / len(index)
    assert (skewed - 1 / 25).abs().max() > 0.05


def test_draw_chooses_the_index_that_add_noise_uses():
    latent, noise = normal(*SHAPE, purpose="latent"), normal(*SHAPE, purpose="noise")
    objective = DDPMObjective(snr_gamma=5.0)
    drawn = objective.add_noise(latent, noise, torch.tensor([0.0, 0.5, 0.99999]))
    fixed = objective.add_noise_at(latent, noise, torch.tensor([0, 500, 999]))
    assert all(torch.equal(a, b) for a, b in zip(drawn, fixed, strict=True))
    other = objective.add_noise_at(latent, noise, torch.tensor([1, 501, 998]))
    assert not any(torch.equal(a, b) for a, b in zip(drawn, other, strict=True))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"prediction": "epsilon"}, "divides by zero"),
        ({"spacing": "leading"}, "trailing"),
        ({"beta_schedule": "cosine"}, "beta_schedule"),
        ({"prediction": "x0"}, "prediction"),
        ({"snr_gamma": 0.0}, "snr_gamma"),
    ],
)
def test_wrong_settings_are_refused_with_the_remedy(settings, word):
    with pytest.raises(ConfigError, match=word):
        DDPMObjective(**settings)


def test_more_sampling_steps_than_levels_are_refused():
    with pytest.raises(ConfigError, match="1 to 1000"):
        DDPMObjective().schedule(1001)
