from __future__ import annotations

import torch

from frameloom.core.random import stream
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


def test_offset_noise_moves_the_mean_of_each_channel():
    noise, draw = normal(2, 3, 4, 5, 6), normal(2, 3, purpose="offset")
    moved = offset_noise(noise, draw, 0.1)
    torch.testing.assert_close(moved.mean(dim=(2, 3, 4)), noise.mean(dim=(2, 3, 4)) + 0.1 * draw)
    assert torch.equal(offset_noise(noise, draw, 0.0), noise)
