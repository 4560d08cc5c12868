"""Masks of known pixels and frames, for inpainting, image-to-video and video-to-video."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.diffusion.conditioning import (
    MaskRandom,
    draw_end_mask,
    draw_frame_mask,
    draw_region_mask,
    known_cells,
    known_frames,
    pick_kind,
    usable_kinds,
)
from frameloom.diffusion.tables import CLIP_SHARES, END_KINDS, END_SHARES, FRAME_SHARES, IMAGE_SHARES

CLIP = (9, 16, 24)


def dice(*counters: int) -> MaskRandom:
    return MaskRandom(stream(0, "mask", *counters))


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


@pytest.mark.parametrize(("causal", "long", "easy"), [(True, (9, 33), (17, 65)), (False, (8, 32), (16, 64))])
def test_long_stretches_are_those_of_the_published_table(causal, long, easy):
    assert known_cells("v2v_head", causal=causal) == (long[0], 0)
    assert known_cells("v2v_tail_easy", causal=causal) == (0, easy[0])
    assert int(known_frames("v2v_head", 129, stride=4, causal=causal).sum()) == long[1]
    assert int(known_frames("v2v_tail_easy", 129, stride=4, causal=causal).sum()) == easy[1]


def test_single_images_are_the_ends_of_the_clip():
    for kind, ends in (("t2v", []), ("i2v_head", [0]), ("i2v_tail", [8]), ("i2v_loop", [0, 8])):
        assert known_frames(kind, 9, stride=4, causal=True).nonzero().flatten().tolist() == ends
    assert not known_frames("i2v_head", 1, stride=4, causal=True).any()


def test_clips_that_are_too_short_lose_the_long_kinds_and_nothing_else():
    weights = dict.fromkeys(END_KINDS, 1.0)
    assert usable_kinds(weights, 18, causal=True) == weights
    assert set(weights) - set(usable_kinds(weights, 17, causal=True)) == {"v2v_head_easy", "v2v_tail_easy"}
    assert set(usable_kinds(weights, 9, causal=True)) == {"t2v", "i2v_head", "i2v_tail", "i2v_loop"}
    assert usable_kinds(weights, 9, causal=False).keys() >= {"v2v_head"}
    with pytest.raises(ConfigError, match="needs more than 33 frames"):
        known_frames("v2v_head", 33, stride=4, causal=True)


def test_kinds_come_as_often_as_their_weights_say():
    weights = {"t2v": 1.0, "i2v_head": 5.0, "i2v_loop": 1.0, "i2v_tail": 1.0}
    found = Counter(pick_kind(weights, draw / 800) for draw in range(800))
    assert found == {kind: 100 * weight for kind, weight in weights.items()}
    with pytest.raises(ConfigError, match="one must be above 0"):
        pick_kind({"t2v": 0.0}, 0.5)


def test_unknown_kinds_are_refused():
    with pytest.raises(ConfigError, match="i2v_head"):
        known_cells("i2v_hed", causal=True)


def test_a_draw_gives_a_mask_of_whole_frames_and_short_clips_lose_the_long_kinds():
    size = (9, 2, 3)
    masks = [draw_end_mask(size, draw / 8, END_SHARES, stride=4, causal=True) for draw in range(8)]
    assert [int(mask[:, 0, 0].sum()) for mask in masks] == [0, 1, 1, 1, 1, 1, 2, 1]
    assert all(mask.shape == size and bool((mask == mask[:, :1, :1]).all()) for mask in masks)
    assert not draw_end_mask(size, 0.5, {"v2v_head": 1.0}, stride=4, causal=True).any()
    assert draw_end_mask((65, 2, 2), 0.5, {"v2v_head": 1.0}, stride=4, causal=True)[:33].all()
