"""Golden cases of Open-Sora-Plan's batches: noise levels drawn in strata, and clips of several sizes filled up."""

from __future__ import annotations

import random
from typing import Any

import torch

from frameloom.core.parity import ParityCase, ParityOutput, compare_facts, compare_numbers
from frameloom.data.padding import Size, pad_clips, round_up_size
from frameloom.data.published_orders import unify_batch
from frameloom.diffusion.timesteps import level_in_stratum


def matches(case: ParityCase) -> bool:
    return {"explicit_uniform_sampling_v131", "collate"} <= case.config.keys()


def run(case: ParityCase) -> list[ParityOutput]:
    results = [
        _compare_levels(number, entry) for number, entry in enumerate(case.config["explicit_uniform_sampling_v131"])
    ]
    for number, entry in enumerate(case.config["collate"]):
        results += _compare_collate(number, entry)
    return results


def _compare_levels(number: int, entry: dict[str, Any]) -> ParityOutput:
    generator = random.Random(entry["python_random_seed"])
    # The published code draws the whole batch twice and uses the second.
    for _ in range(entry["bsz"]):
        generator.random()
    ours = [level_in_stratum(generator.random(), entry["rank"], entry["n"], entry["T"]) for _ in range(entry["bsz"])]
    return compare_numbers(f"noise levels {number}", ours, entry["timesteps"])


def _compare_collate(number: int, entry: dict[str, Any]) -> list[ParityOutput]:
    shapes = [tuple(shape) for shape in entry["samples_thw"]]
    picked = list(range(len(shapes)))
    is_whole = entry["group_data"] or len(shapes) == 1
    if is_whole:
        picked = unify_batch(picked, shapes, random.Random(entry["python_random_seed"]))
    clips = [torch.ones(3, *shapes[index]) for index in picked]
    strides: Size = tuple(entry["ae_stride_thw"])
    size: Size = (
        shapes[picked[0]] if is_whole else round_up_size(tuple(entry["max_thw"]), strides, tuple(entry["patch"]))
    )
    pixels_BCFHW, cells_BFHW = pad_clips(clips, size, strides)
    return [
        compare_facts(f"picked {number}", picked, entry["picked"]),
        compare_numbers(f"pixels {number}", list(pixels_BCFHW.shape), entry["pixel_shape"]),
        compare_numbers(f"cells {number}", list(cells_BFHW.shape), entry["mask_shape"]),
        compare_numbers(
            f"cells with picture {number}", [_extent(one) for one in cells_BFHW], entry["valid_latent_thw"]
        ),
        compare_numbers(
            f"pixels with picture {number}", [_extent(one[0]) for one in pixels_BCFHW], entry["valid_pixel_thw"]
        ),
    ]


def _extent(values_FHW: torch.Tensor) -> list[int]:
    """How far the ones reach along each axis; they must fill the whole box."""
    box = [int(values_FHW.amax(dim=[axis for axis in range(3) if axis != kept]).sum()) for kept in range(3)]
    filled = values_FHW[: box[0], : box[1], : box[2]]
    return box if bool((filled == 1).all()) and int(values_FHW.sum()) == filled.numel() else [-1, -1, -1]
