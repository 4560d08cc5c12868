"""Clips of several sizes in one batch."""

from __future__ import annotations

import pytest
import torch

from frameloom.core.errors import DataError
from frameloom.data.padding import latent_cells, pad_clips, round_up_size

STRIDES = (4, 8, 8)


def test_sizes_are_rounded_up_to_what_models_take() -> None:
    assert round_up_size((33, 72, 80), STRIDES, (1, 2, 2)) == (33, 80, 80)
    assert round_up_size((30, 64, 64), STRIDES, (1, 2, 2)) == (33, 64, 64)
    assert round_up_size((30, 64, 65), STRIDES, (2, 2, 2)) == (33, 64, 80)
    assert latent_cells((1, 8, 9), STRIDES) == (1, 1, 2)


def test_pixels_stay_where_they_were_and_the_rest_is_grey_and_not_counted() -> None:
    clips = [torch.full((3, 5, 16, 24), 0.5), torch.full((3, 1, 32, 32), -0.5)]
    pixels, cells = pad_clips(clips, (5, 32, 32), STRIDES)
    assert pixels.shape == (2, 3, 5, 32, 32) and cells.shape == (2, 2, 4, 4)
    assert torch.equal(pixels[0, :, :, :16, :24], clips[0]) and not pixels[0, :, :, 16:].any()
    assert cells.sum(dim=(1, 2, 3)).tolist() == [2 * 2 * 3, 1 * 4 * 4]


def test_a_clip_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="larger than the batch's 5x16x16"):
        pad_clips([torch.zeros(3, 5, 16, 24)], (5, 16, 16), STRIDES)
