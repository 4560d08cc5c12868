"""PSNR and SSIM against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from frameloom.core.random import stream
from frameloom.evaluate.pair_metrics import psnr_db, ssim


def make_video(index: int = 0, frames: int = 3) -> torch.Tensor:
    return torch.rand(2, 3, frames, 16, 20, generator=stream(0, "test-metrics", index)) * 2 - 1


def test_psnr_of_a_constant_difference() -> None:
    # Difference 0.2 in a range of 2: 20 log10(2 / 0.2) = 20 dB; 0.02 gives 40 dB.
    video = make_video() * 0.5
    shifted = video.clone()
    shifted[0] += 0.2
    shifted[1] += 0.02
    assert psnr_db(shifted, video).tolist() == pytest.approx([20.0, 40.0], abs=1e-3)


def test_psnr_is_the_mean_over_frames() -> None:
    video = torch.zeros(1, 3, 2, 16, 16)
    other = video.clone()
    other[:, :, 0] = 0.2
    other[:, :, 1] = 0.02
    assert psnr_db(other, video).item() == pytest.approx(30.0, abs=1e-4)
    over_all_pixels = 10 * math.log10(4 / ((0.2**2 + 0.02**2) / 2))
    assert psnr_db(other, video).item() != pytest.approx(over_all_pixels, abs=1)


def test_equal_videos() -> None:
    video = make_video()
    assert psnr_db(video, video).tolist() == [math.inf, math.inf]
    assert ssim(video, video).tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    assert ssim(video, make_video(1)).max() < 0.2


def test_ssim_of_two_constant_videos() -> None:
    # Without variance only the luminance term is left: (2ab + c) / (a^2 + b^2 + c), c = (0.01 * 2)^2.
    a, b, c = 0.5, 0.1, (0.01 * 2) ** 2
    expected = (2 * a * b + c) / (a**2 + b**2 + c)
    shape = (1, 3, 2, 16, 16)
    assert ssim(torch.full(shape, a), torch.full(shape, b)).item() == pytest.approx(expected, abs=1e-5)


def test_ssim_has_one_number_per_clip() -> None:
    video = make_video()
    other = video.clone()
    other[1] = make_video(1)[1]
    values = ssim(other, video)
    assert values[0].item() == pytest.approx(1.0, abs=1e-6)
    assert values[1] < 0.2


def test_half_precision_is_compared_in_full() -> None:
    video = make_video().to(torch.bfloat16)
    other = video + 0.25
    assert psnr_db(other, video).dtype == torch.float32
    torch.testing.assert_close(psnr_db(other, video), psnr_db(other.float(), video.float()), rtol=0, atol=0)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        psnr_db(make_video(), make_video(frames=2))
    with pytest.raises(ValueError, match="11 pixels"):
        ssim(torch.zeros(1, 3, 1, 8, 8), torch.zeros(1, 3, 1, 8, 8))
