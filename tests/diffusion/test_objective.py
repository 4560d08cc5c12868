from __future__ import annotations

import pytest
import torch

from frameloom.core.random import stream
from frameloom.diffusion.ddpm import DDPMObjective
from frameloom.diffusion.objective import Noised, offset_noise, weighted_error_B


def normal(*shape: int, purpose: str = "latent") -> torch.Tensor:
    return torch.randn(shape, generator=stream(1, purpose))


def example(weight_B: torch.Tensor) -> tuple[torch.Tensor, Noised]:
    shape = (3, 4, 5, 2, 2)
    noised = Noised(normal(*shape), torch.full((3,), 0.5), normal(*shape, purpose="target"), weight_B)
    return normal(*shape, purpose="prediction"), noised


def test_error_is_the_weighted_mean_square_of_each_sample():
    prediction, noised = example(torch.tensor([1.0, 2.0, 0.0]))
    error = weighted_error_B(prediction, noised)
    plain = (prediction - noised.target_BCFHW).square().flatten(1).mean(dim=1)
    torch.testing.assert_close(error, plain * noised.weight_B)
    assert error[2] == 0
    assert not torch.allclose(error, plain)


def test_error_of_bfloat16_predictions_is_float32():
    prediction, noised = example(torch.ones(3))
    error = weighted_error_B(prediction.bfloat16(), noised)
    assert error.dtype == torch.float32
    torch.testing.assert_close(error, weighted_error_B(prediction.bfloat16().float(), noised), rtol=0, atol=0)


def test_batch_mean_of_masked_error_divides_by_the_whole_mask():
    prediction, noised = example(torch.tensor([1.0, 0.5, 2.0]))
    mask = (torch.rand(3, 5, 2, 2, generator=stream(1, "mask")) > 0.4).float()
    mask[0] = 1
    squared = (prediction - noised.target_BCFHW).square() * mask[:, None] * noised.weight_B[:, None, None, None, None]
    expected = squared.sum() / (mask.sum() * prediction.shape[1])
    torch.testing.assert_close(weighted_error_B(prediction, noised, mask).mean(), expected)
    assert not torch.allclose(weighted_error_B(prediction, noised).mean(), expected)


def test_full_mask_changes_nothing_and_empty_mask_gives_zero():
    prediction, noised = example(torch.ones(3))
    plain = weighted_error_B(prediction, noised)
    torch.testing.assert_close(weighted_error_B(prediction, noised, torch.ones(3, 5, 2, 2)), plain)
    assert weighted_error_B(prediction, noised, torch.zeros(3, 5, 2, 2)).tolist() == [0, 0, 0]
    assert plain.min() > 0


def test_masked_cells_do_not_reach_the_error_or_its_motion_part():
    prediction, noised = example(torch.ones(3))
    mask = torch.ones(3, 5, 2, 2)
    mask[:, 3:] = 0
    disturbed = prediction.clone()
    disturbed[:, :, 3:] += 7
    before = weighted_error_B(prediction, noised, mask, motion_share=0.25)
    assert torch.equal(weighted_error_B(disturbed, noised, mask, motion_share=0.25), before)
    assert not torch.equal(weighted_error_B(disturbed, noised, motion_share=0.25), before)


def test_offset_noise_moves_the_mean_of_each_channel():
    noise, draw = normal(2, 3, 4, 5, 6), normal(2, 3, purpose="offset")
    moved = offset_noise(noise, draw, 0.1)
    torch.testing.assert_close(moved.mean(dim=(2, 3, 4)), noise.mean(dim=(2, 3, 4)) + 0.1 * draw)
    assert torch.equal(offset_noise(noise, draw, 0.0), noise)


@pytest.mark.parametrize("case", range(12))
def test_motion_loss_matches_cogvideox_fun(golden, case):
    tensors, config = golden("cogvideox-fun", "loss")
    settings = config["cases"][case]
    given = {name: tensors[f"in.{case}.{name}"] for name in ("latents", "noise", "noise_pred", "timesteps")}
    # The original's layout has frames before channels.
    latents, noise, prediction = (given[name].transpose(1, 2) for name in ("latents", "noise", "noise_pred"))
    share = settings["motion_sub_loss_ratio"] if settings["motion_sub_loss"] else 0.0
    scheduler = config["scheduler"]
    is_v = settings["prediction_type"] == "v_prediction"
    objective = DDPMObjective(
        beta_schedule="scaled_linear",
        beta_start=scheduler["beta_start"],
        beta_end=scheduler["beta_end"],
        zero_terminal_snr=True,
        prediction="v",
        motion_share=share,
    )
    noised = objective.add_noise_at(latents, noise, given["timesteps"])
    noised = noised if is_v else noised._replace(target_BCFHW=noise)
    expected = {name: tensors[f"out.{case}.{name}"] for name in ("noisy_latents", "target", "loss")}
    torch.testing.assert_close(noised.noisy_BCFHW, expected["noisy_latents"].transpose(1, 2), rtol=0, atol=1e-6)
    torch.testing.assert_close(noised.target_BCFHW, expected["target"].transpose(1, 2), rtol=0, atol=1e-6)
    loss = objective.loss_B(prediction, noised).mean()
    torch.testing.assert_close(loss, expected["loss"][0], rtol=1e-6, atol=0)
    if share and latents.shape[2] > 2:
        assert not torch.allclose(weighted_error_B(prediction, noised).mean(), expected["loss"][0], rtol=1e-4)
