"""CogVideoX-Fun: given pixels as a mask and a latent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.core.random import stream
from frameloom.models.denoisers.cogvideox_fun.conditioning import (
    add_noise_to_known,
    blank_unknown,
    pack_known,
    resize_known,
)
from frameloom.models.denoisers.cogvideox_fun.config import SIZES

CONFIG = replace(SIZES["2b-inpaint"], in_channels=3)


def encode(pixels_BCFHW: Tensor) -> Tensor:
    """A latent whose numbers can be told from the pixels: means of 8x8 blocks of every fourth frame."""
    return F.avg_pool3d(pixels_BCFHW[:, :, ::4], (1, 8, 8))


def make_clip(batch: int = 1, frames: int = 17) -> Tensor:
    return torch.rand(batch, 3, frames, 16, 24, generator=stream(0, "test clip"))


@pytest.mark.parametrize(
    ("head", "tail", "expected"),
    [
        (1, 0, [1, 0, 0, 0, 0]),
        (2, 0, [1, 0, 0, 0, 0]),
        (3, 0, [1, 0.5, 0, 0, 0]),
        (4, 0, [1, 1, 0, 0, 0]),
        (1, 1, [1, 0, 0, 0, 0]),
        (2, 2, [1, 0, 0, 0, 0.5]),
        (3, 3, [1, 0.5, 0, 0, 1]),
    ],
)
def test_given_frames_become_the_published_mask(head: int, tail: int, expected: list[float]) -> None:
    known = torch.zeros(1, 1, 17, 16, 24)
    known[:, :, :head] = 1
    known[:, :, 17 - tail :] = 1
    resized = resize_known(known, (5, 2, 3))
    assert resized.shape == (1, 1, 5, 2, 3)
    assert resized[0, 0, :, 0, 0].tolist() == expected
    assert (resized == resized[..., :1, :1]).all()


def test_a_single_image_has_a_mask_of_one_frame() -> None:
    known = torch.zeros(1, 1, 1, 16, 16)
    known[..., :8, :] = 1
    assert resize_known(known, (1, 2, 2)).flatten().tolist() == [1, 1, 0, 0]


def test_the_mask_comes_first_and_is_scaled() -> None:
    clip, known = make_clip(), torch.zeros(1, 1, 17, 16, 24)
    known[:, :, 0] = 1
    beside = pack_known(CONFIG, clip, known, encode)
    assert beside.shape == (1, 4, 5, 2, 3)
    assert CONFIG.mask_scale == 1.15258426
    assert torch.equal(beside[:, 0], 1.15258426 * resize_known(known, (5, 2, 3))[:, 0])
    assert torch.equal(beside[:, 1:, 0], encode(clip)[:, :, 0])
    assert (beside[:, 1:, 1:] == -1).all()


def test_a_clip_of_which_nothing_is_given_leaves_no_trace() -> None:
    clip, known = make_clip(batch=3), torch.zeros(3, 1, 17, 16, 24)
    known[1, :, 5, 3, 3] = 1
    beside = pack_known(CONFIG, clip, known, encode)
    assert not beside[0].any() and beside[1].any() and not beside[2].any()
    kept = pack_known(CONFIG, clip, known, encode, keep_empty_B=torch.tensor([True, False, False]))
    assert (kept[0, 1:] == -1).all() and not kept[0, 0].any()
    assert torch.equal(kept[1:], beside[1:])


def test_noise_spares_black_pixels() -> None:
    clip, known = make_clip(batch=2), torch.zeros(2, 1, 17, 16, 24)
    known[:, :, :4] = 1
    noise = torch.ones_like(clip)
    noisy = add_noise_to_known(blank_unknown(clip, known), noise, torch.tensor([0.5, 2.0]))
    assert (noisy[:, :, 4:] == -1).all()
    assert torch.equal(noisy[0, :, :4], clip[0, :, :4] + 0.5)
    assert torch.equal(noisy[1, :, :4], clip[1, :, :4] + 2.0)
    beside = pack_known(CONFIG, clip, known, encode, noise_BCFHW=noise, sigma_B=torch.tensor([0.5, 2.0]))
    assert not torch.equal(beside, pack_known(CONFIG, clip, known, encode))


def test_sizes_say_what_stands_beside() -> None:
    assert [SIZES[size].condition for size in ("5b", "5b-inpaint", "5b-control")] == ["none", "inpaint", "control"]
    assert [SIZES[size].input_channels for size in ("5b", "5b-inpaint", "5b-control")] == [16, 33, 32]


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.float32])
def test_masks_of_any_type_are_taken(kind: torch.dtype) -> None:
    clip, known = make_clip(), torch.zeros(1, 1, 17, 16, 24)
    known[:, :, :3] = 1
    assert torch.equal(pack_known(CONFIG, clip, known.to(kind), encode), pack_known(CONFIG, clip, known, encode))
