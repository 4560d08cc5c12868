"""Which parts of a clip are given."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.diffusion.mask_kinds import CLIP_SHARES, FRAME_SHARES, IMAGE_SHARES
from frameloom.diffusion.masks import StreamDice, draw_frame_mask, draw_region_mask

CLIP = (9, 16, 24)


def dice(*counters: int) -> StreamDice:
    return StreamDice(stream(0, "mask", *counters))


@pytest.mark.parametrize("kind", CLIP_SHARES)
def test_every_kind_gives_a_mask_of_zeros_and_ones_in_the_clips_shape(kind: str) -> None:
    for number in range(20):
        known, found = draw_region_mask(CLIP, dice(number), {kind: 1.0})
        assert found == kind and known.shape == CLIP
        assert set(known.unique().tolist()) <= {0, 1}
    if kind == "all":
        assert not known.any()
    if kind in ("head", "ends"):
        assert bool(known[0].all()) and not known[4].any()
        assert bool(known[-1].all()) == (kind == "ends")


def test_the_mask_of_a_sample_follows_from_its_stream_alone() -> None:
    first = [draw_region_mask(CLIP, dice(number))[0] for number in range(20)]
    again = [draw_region_mask(CLIP, dice(number))[0] for number in reversed(range(20))][::-1]
    others = [draw_region_mask(CLIP, dice(number))[0] for number in range(20, 40)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, others, strict=True))


def test_kinds_come_as_often_as_their_shares_say() -> None:
    found = Counter(draw_region_mask((5, 8, 8), dice(number))[1] for number in range(4000))
    for kind, share in CLIP_SHARES.items():
        assert found[kind] / 4000 == pytest.approx(share, abs=0.02)


def test_images_have_two_kinds() -> None:
    kinds = {draw_region_mask((1, 16, 16), dice(number))[1] for number in range(200)}
    assert kinds == set(IMAGE_SHARES)
    with pytest.raises(ConfigError, match="an image has the kinds"):
        draw_region_mask((1, 16, 16), dice(0), CLIP_SHARES)


def test_tiny_frames_are_no_trouble() -> None:
    for number in range(300):
        known, _ = draw_region_mask((2, 4, 4), dice(number))
        assert known.shape == (2, 4, 4)


@pytest.mark.parametrize("kind", FRAME_SHARES)
def test_frame_masks_give_whole_frames(kind: str) -> None:
    counts = set()
    for number in range(50):
        known, found = draw_frame_mask(CLIP, dice(number), {kind: 1.0})
        per_frame = known.flatten(1).float().mean(1)
        assert found == kind and set(per_frame.tolist()) <= {0.0, 1.0}
        counts.add(int(per_frame.sum()))
    wanted = {"all": {0}, "head": {1}, "ends": {2}, "none": {9}}
    assert counts == wanted.get(kind, counts)
    if kind in ("continuation", "scattered frames"):
        assert len(counts) > 4


def test_known_share_bounds_a_continuation() -> None:
    for number in range(50):
        known, _ = draw_frame_mask((20, 2, 2), dice(number), {"continuation": 1.0}, known_share=(0.25, 0.5))
        assert 5 <= int(known[:, 0, 0].sum()) <= 10
        assert known[:5].all() and not known[10:].any()
