"""Motion and flicker of constructed clips whose answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from frameloom.core.random import stream
from frameloom.evaluate.clip_metrics import measure_flicker, measure_motion


def moving_square(right: int, down: int = 0, *, frames: int = 5, side: int = 64, square: int = 20) -> Tensor:
    """A textured square that goes `right` and `down` pixels a frame over a plain background."""
    texture = torch.randint(100, 256, (3, square, square), generator=stream(0, "test motion"), dtype=torch.uint8)
    video = torch.full((3, frames, side, side), 50, dtype=torch.uint8)
    for frame in range(frames):
        top, left = 6 + down * frame, 6 + right * frame
        video[:, frame, top : top + square, left : left + square] = texture
    return video


@pytest.mark.parametrize(
    ("right", "down", "expected"), [(0, 0, 0.0), (1, 0, 1.0), (4, 0, 4.0), (0, 7, 7.0), (3, 4, 5.0)]
)
def test_a_shape_that_moves_k_pixels_a_frame_has_motion_k(right: int, down: int, expected: float) -> None:
    assert measure_motion(moving_square(right, down)) == pytest.approx(expected, abs=1e-6)


def test_plain_shapes_count_wherever_their_edges_lie() -> None:
    video = torch.full((3, 2, 64, 64), 40, dtype=torch.uint8)
    for left in range(8, 17):  # at 8 and 16 all edges lie between cells of 8 pixels
        video[:] = 40
        for frame in range(2):
            video[:, frame, 16:40, left + 5 * frame : left + 5 * frame + 24] = 220
        assert measure_motion(video) == pytest.approx(5.0, abs=1e-6), left


def test_motion_of_large_pictures_is_told_in_their_own_pixels() -> None:
    small = moving_square(3, 0)
    large = small.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    assert measure_motion(large) == pytest.approx(12.0, abs=1e-6)


def test_noise_does_not_count_as_motion() -> None:
    still = moving_square(0).int()
    noisy = (still + torch.randint(-3, 4, still.shape, generator=stream(0, "test noise"))).clamp(0, 255).to(torch.uint8)
    found = measure_motion(noisy)
    assert found is not None and found < 0.5


def test_flicker_is_the_step_of_the_still_parts_and_ignores_what_moves() -> None:
    video = moving_square(4)
    assert measure_flicker(video) == 0.0
    flickering = video.clone()
    flickering[:, 1::2] = (flickering[:, 1::2].int() + 6).clamp(max=255).to(torch.uint8)
    assert measure_flicker(flickering) == pytest.approx(6.0)


def test_steady_fading_is_flicker_of_its_slope_until_it_leaves_the_still_range() -> None:
    slow = torch.arange(0, 10, 2, dtype=torch.uint8).reshape(1, 5, 1, 1).expand(3, 5, 16, 16)
    assert measure_flicker(slow) == pytest.approx(2.0)
    assert measure_flicker(slow * 10) is None


def test_pictures_have_neither_motion_nor_flicker() -> None:
    picture = moving_square(0, frames=1)
    assert measure_motion(picture) is None and measure_flicker(picture) is None
    assert measure_motion(torch.zeros(3, 4, 12, 40, dtype=torch.uint8)) is None
