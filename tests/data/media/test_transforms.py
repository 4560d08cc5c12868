"""Sizes, cuts and pixels of the published transforms, and lists that make no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from frameloom.config.schema.data import TransformSection
from frameloom.core.errors import ConfigError
from frameloom.data.media.transforms import (
    CenterCrop,
    RandomCrop,
    Rescale,
    Resize,
    Transforms,
    cover_rule,
    parse_transforms,
)
from tests.float_pixels import apply_transforms, resize_and_cut

GOLDENS = Path(__file__).parents[2] / "goldens"
PLAN = json.loads((GOLDENS / "open-sora-plan" / "frame_index.json").read_text())
SORA = json.loads((GOLDENS / "open-sora-v2" / "video_transform_geometry.json").read_text())
FUN = json.loads((GOLDENS / "cogvideox-fun" / "collate_geometry.json").read_text())
SHRINK = json.loads((GOLDENS / "cogvideox-fun" / "dataset_geometry.json").read_text())
FUN_TRANSFORMS = Transforms((Resize(rounding="down"), CenterCrop("even"), Rescale()))


@pytest.mark.parametrize("case", PLAN["resize_and_stride_crop"], ids=str)
def test_area_resize_equals_open_sora_plan(case: dict) -> None:
    transforms = Transforms((Resize("area", max_area=case["max_hxw"]), CenterCrop()))
    place = transforms.place(case["h"], case["w"], *case["crop_hw"])
    assert [place.height, place.width] == case["resized"]
    assert [place.top, place.left] == case["crop_top_left"]


@pytest.mark.parametrize("case", FUN["cases"], ids=lambda case: str(case["rng_seed_PCG64"]))
def test_cover_equals_the_collate_of_cogvideox_fun(case: dict) -> None:
    """Without ratio crops the original takes the size of the first example for all."""
    own_size = case["args"]["random_ratio_crop"]
    for found in case["transforms"]:
        source = found if own_size else case["transforms"][0]
        place = FUN_TRANSFORMS.place(*source["input_fhw"][1:], *found["center_crop_hw"])
        assert [place.height, place.width] == found["resize_hw"]


@pytest.mark.parametrize("case", SHRINK["resize_frame_[h,w,target_short_side,out_h,out_w]"], ids=str)
def test_short_side_equals_the_reader_of_cogvideox_fun(case: list[int]) -> None:
    height, width, side, out_height, out_width = case
    if min(height, width) <= side:
        assert (height, width) == (out_height, out_width)
        return
    assert Resize("short_side", "down").scale(height, width, side, side) == (out_height, out_width)


def test_pixels_equal_the_collate_of_cogvideox_fun() -> None:
    tensors = load_file(GOLDENS / "cogvideox-fun" / "collate_pixels.safetensors")
    for number, num_examples in ((0, 1), (1, 1), (2, 2), (3, 1)):
        expected_BFCHW = tensors[f"out.{number}.pixel_values"]
        num_frames, height, width = expected_BFCHW.shape[1], *expected_BFCHW.shape[3:]
        first = tensors[f"in.{number}.example0_fhwc"]
        place = FUN_TRANSFORMS.place(*first.shape[1:3], height, width)
        for example in range(num_examples):
            pixels_CFHW = tensors[f"in.{number}.example{example}_fhwc"].permute(3, 0, 1, 2)[:, :num_frames]
            ours_CFHW = resize_and_cut(pixels_CFHW, place, height, width)
            error = (ours_CFHW.transpose(0, 1) - expected_BFCHW[example]).abs().max()
            assert error <= 1e-5
            if pixels_CFHW.shape[2] > place.height:  # enlarging is the same with and without antialiasing
                off = resize_and_cut(pixels_CFHW, place, height, width, antialias=False)
                assert (off.transpose(0, 1) - expected_BFCHW[example]).abs().max() > 1e-3


def test_pixels_at_hand_equal_the_place_that_a_decoder_gets() -> None:
    pixels_CFHW = torch.randint(0, 256, (3, 2, 48, 80), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    transforms = Transforms((Resize(), RandomCrop()))
    draws = (0.3, 0.9)
    place = transforms.place(48, 80, 32, 32, draws)
    assert (place.height, place.width, place.top) == (32, 53, 0)
    assert place.left == int(0.9 * 22)
    found = apply_transforms(transforms, pixels_CFHW, 32, 32, draws=draws)
    assert torch.equal(found, resize_and_cut(pixels_CFHW, place, 32, 32))
    assert not torch.equal(found, apply_transforms(transforms, pixels_CFHW, 32, 32, draws=(0.3, 0.1)))
    assert found.shape == (3, 2, 32, 32)
    assert found.min() >= -1 and found.max() <= 1


def test_a_cut_before_scaling_is_the_same_region() -> None:
    """A ramp from left to right shows where the cut lies, to a pixel of the result."""
    ramp_CFHW = torch.arange(200).clamp(max=255).to(torch.uint8).expand(3, 1, 90, 200)
    transforms = Transforms((CenterCrop("even"), Resize("stretch")))
    box = transforms.source_box(90, 200, 64, 64)
    assert (box.height, box.width, box.top, box.left) == (90, 90, 0, 55)
    cut_first = apply_transforms(transforms, ramp_CFHW, 64, 64)
    scale_first = resize_and_cut(ramp_CFHW, transforms.place(90, 200, 64, 64), 64, 64)
    one_pixel = 2 / 255 * (90 / 64)
    assert (cut_first - scale_first)[..., 1:-1].abs().max() <= one_pixel
    stretched = apply_transforms(Transforms((Resize("stretch"),)), ramp_CFHW, 64, 64)
    assert (cut_first - stretched).abs().max() > 5 * one_pixel


@pytest.mark.parametrize("case", SORA["resize_crop_[h,w,target_h,target_w,resize_hw,crop_i_j_h_w]"], ids=str)
def test_cover_equals_the_original(case: list) -> None:
    height, width, wanted_height, wanted_width, scaled, crop = case
    place = cover_rule(wanted_height, wanted_width)(height, width)
    assert [place.height, place.width] == scaled
    assert [place.top, place.left, wanted_height, wanted_width] == crop


@given(
    height=st.integers(8, 3000),
    width=st.integers(8, 3000),
    wanted_height=st.integers(8, 600),
    wanted_width=st.integers(8, 600),
    draws=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    rounding=st.sampled_from(["nearest", "down", "up"]),
)
def test_every_cover_holds_its_cut(
    height: int, width: int, wanted_height: int, wanted_width: int, draws: tuple[float, float], rounding: str
) -> None:
    lists = [Transforms((Resize("cover", rounding), crop)) for crop in (CenterCrop(), CenterCrop("even"), RandomCrop())]
    for transforms in [*lists, Transforms((Resize("stretch"),))]:
        place = transforms.place(height, width, wanted_height, wanted_width, draws)
        assert 0 <= place.top <= place.height - wanted_height
        assert 0 <= place.left <= place.width - wanted_width


def test_random_crops_reach_every_place() -> None:
    transforms = Transforms((Resize("short_side", "up"), RandomCrop()))
    places = {transforms.place(64, 67, 32, 32, (draw / 50, draw / 50)) for draw in range(50)}
    assert {(place.height, place.width, place.top) for place in places} == {(32, 34, 0)}
    assert {place.left for place in places} == {0, 1, 2}
    assert transforms.is_random and not Transforms().is_random


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((), "needs one resize"),
        ((CenterCrop(),), "needs one resize"),
        ((Resize(), CenterCrop(), RandomCrop()), "at most one"),
        ((RandomCrop(), Resize("stretch")), "random_crop comes after"),
        ((CenterCrop(), Resize()), "fit stretch"),
        ((Rescale(), Resize()), "rescale must be the last"),
        ((Resize("area"), CenterCrop()), "max_area belongs to fit area"),
        ((Resize(max_area=100), CenterCrop()), "max_area belongs to fit area"),
    ],
)
def test_lists_that_make_no_sense_are_refused(steps: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Transforms(steps)


def test_a_recipe_names_the_steps() -> None:
    sections = (
        TransformSection(name="resize", fit="area", max_area=236544),
        TransformSection(name="center_crop", rounding="even"),
        TransformSection(name="rescale"),
    )
    assert parse_transforms(sections) == (Resize("area", max_area=236544), CenterCrop("even"), Rescale())
    assert parse_transforms((TransformSection(name="resize"), TransformSection(name="center_crop"))) == (
        Resize(),
        CenterCrop(),
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "random_crop", "fit": "cover"}, r"transforms\.0: random_crop has no setting fit; it has no settings"),
        ({"name": "center_crop", "max_area": 9}, "center_crop has no setting max_area; it has rounding"),
        ({"name": "center_crop", "rounding": "up"}, "center_crop cannot round up; use down or even"),
        ({"name": "resize", "rounding": "even"}, "resize cannot round even; use nearest or down or up"),
    ],
)
def test_settings_of_another_step_are_refused(section: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_transforms((TransformSection(**section),))
