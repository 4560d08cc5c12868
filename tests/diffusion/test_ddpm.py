from __future__ import annotations

import pytest
import torch

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.diffusion.ddpm import DDPMObjective, min_snr_weight, snr
from frameloom.diffusion.objective import offset_noise

SHAPE = (3, 4, 2, 4, 4)
# Levels that end at no signal go through square roots, whose last bit torch rounds in each processor's own way.
LAST_BITS = 5e-7
SCALED = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
CASES = {
    "main_masked": {},
    "main_masked_v130": {},
    "main_unmasked": {},
    "no_snr_gamma": {},
    "no_snr_gamma_unmasked": {},
    "vpred_no_zero_snr": {},
    "epsilon_min_snr": {"prediction": "epsilon"},
    "v1_5_scheduler": SCALED,
    "cogvideox_scheduler": SCALED | {"snr_shift": 3.0},
}


def normal(*shape: int, purpose: str) -> torch.Tensor:
    return torch.randn(shape, generator=stream(6, purpose))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_match_open_sora_plan(golden, case):
    tensors, config = golden("open-sora-plan", "train_loss_v13")
    run = config["run"][case]
    objective = DDPMObjective(
        zero_terminal_snr=run["rescale_betas_zero_snr"], snr_gamma=run["snr_gamma"], **CASES[case]
    )
    noise = offset_noise(tensors["in.base_noise"], tensors["in.offset_noise"][:, :, 0, 0, 0], run["noise_offset"])
    noised = objective.add_noise_at(tensors["in.model_input"], noise, tensors["in.timesteps"])
    prediction = tensors["in.model_output"].clone().requires_grad_()
    loss = objective.loss_B(prediction, noised, tensors["in.attention_mask"] if run["masked"] else None).mean()
    loss.backward()

    expected = {name: tensors.get(f"out.{case}.{name}") for name in ("noise", "noisy_model_input", "target", "loss")}
    assert torch.equal(noise, expected["noise"])
    torch.testing.assert_close(noised.noisy_BCFHW, expected["noisy_model_input"], rtol=0, atol=1e-6)
    target = noise if expected["target"] is None else expected["target"]
    torch.testing.assert_close(noised.target_BCFHW, target, rtol=0, atol=1e-6)
    torch.testing.assert_close(loss.detach(), expected["loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(prediction.grad, tensors[f"out.{case}.grad_model_output"], rtol=1e-5, atol=1e-9)
    other = DDPMObjective(snr_gamma=2.0).add_noise_at(tensors["in.model_input"], noise, tensors["in.timesteps"])
    assert not torch.allclose(objective.loss_B(prediction, other).mean(), expected["loss"], rtol=1e-3)


def test_noise_levels_equal_open_sora_plan(golden):
    tensors, _ = golden("open-sora-plan", "train_loss_v13")
    plain, zero = DDPMObjective(zero_terminal_snr=False).alpha_bar_T, DDPMObjective().alpha_bar_T
    assert torch.equal(plain, tensors["out.schedule.alphas_cumprod_plain"])
    published = tensors["out.schedule.alphas_cumprod_zero_snr"]
    torch.testing.assert_close(zero, published, rtol=0, atol=LAST_BITS)
    torch.testing.assert_close(snr(published), tensors["out.schedule.snr_all_t_zero_snr"], rtol=1e-6, atol=0)
    assert not torch.equal(plain, zero)


@pytest.mark.parametrize(("size", "shift"), [("2b", 3.0), ("5b", 1.0)])
def test_noise_levels_match_cogvideox(golden, size, shift):
    tensors, _ = golden("cogvideox-fun", "scheduler")
    train = DDPMObjective(**SCALED).alpha_bar_T
    torch.testing.assert_close(train, tensors[f"out.{size}.train_ddpm.alphas_cumprod"], rtol=0, atol=LAST_BITS)
    sampling = DDPMObjective(**SCALED, snr_shift=shift).alpha_bar_T.double()
    torch.testing.assert_close(sampling, tensors[f"out.{size}.ddim_cog.alphas_cumprod"], rtol=0, atol=2 * LAST_BITS)
    assert torch.allclose(train.double(), sampling, atol=1e-6) == (shift == 1)


@pytest.mark.parametrize("spacing", ["trailing", "linspace"])
@pytest.mark.parametrize("num_steps", [7, 25, 50])
def test_sampling_indices_match_cogvideox(golden, spacing, num_steps):
    tensors, _ = golden("cogvideox-fun", "scheduler")
    expected = tensors[f"out.5b.{spacing}.ddim_origin.timesteps{num_steps}"].tolist()
    assert DDPMObjective(spacing=spacing).schedule(num_steps) == expected


def test_leading_spacing_is_stable_diffusions():
    objective = DDPMObjective(**SCALED, zero_terminal_snr=False, prediction="epsilon", spacing="leading")
    assert objective.schedule(40)[:2] + objective.schedule(40)[-1:] == [976, 951, 1]
    assert max(objective.schedule(1000)) == 999


@pytest.mark.parametrize(("size", "shift", "sampler"), [("2b", 3.0, "ddim_cog"), ("5b", 1.0, "ddim_origin")])
def test_ddim_trajectory_matches_cogvideox(golden, size, shift, sampler):
    tensors, config = golden("cogvideox-fun", "scheduler")
    num_steps = config["trajectory_steps"]
    outputs = iter([tensors[f"in.trajectory.model_output.{step}"] for step in range(num_steps)])
    states: list[torch.Tensor] = []
    DDPMObjective(**SCALED, snr_shift=shift).sample(
        lambda x, timestep_B: next(outputs),
        tensors["in.trajectory.start"],
        num_steps=num_steps,
        on_step=lambda done, x: states.append(x),
    )
    for step, state in enumerate(states):
        expected = tensors[f"out.{size}.trailing.{sampler}.trajectory.{step}"]
        torch.testing.assert_close(state, expected, rtol=0, atol=3e-6)
    assert not torch.allclose(states[0], states[1], atol=0.01)


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
