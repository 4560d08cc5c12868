"""Golden cases of CogVideoX-Fun's reading and collating: frame indices, sizes and real pixels."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from frameloom.data.buckets.ratio_tokens import CROP_WEIGHTS
from frameloom.data.media.frames import FrameRule, Window, select_frames
from frameloom.data.media.transforms import CenterCrop, Resize, Transforms
from tests.float_pixels import resize_and_cut
from tests.parity.cases import (
    Found,
    ParityCase,
    ParityOutput,
    compare,
    compare_facts,
    compare_numbers,
    golden,
    golden_table,
)
from tests.parity.cogvideox_fun_data import assign_batch, compare_collate, compare_lengths

# Sides that follow from the ratio are cut off, not rounded; torchvision rounds the place of a crop to even.
TRANSFORMS = Transforms((Resize(rounding="down"), CenterCrop(rounding="even")))
_DEVIATION = "scaled-like-the-first-clip"


@golden_table("frame_indices")
def compare_reading(case: dict[str, Any]) -> Found:
    yield from compare_lengths(case)
    shrink = Resize(fit="short_side", rounding="down")
    rows = case["resize_frame_[h,w,target_short_side,out_h,out_w]"]
    ours = [shrink.scale(h, w, side, side) if min(h, w) > side else (h, w) for h, w, side, *_ in rows]
    yield compare_numbers("shrinking on reading", ours, [row[3:] for row in rows])
    for number, entry in enumerate(case["frame_indices"]):
        yield compare_facts(f"frames {number}", _select(entry), entry["idx"])


def _select(entry: dict[str, Any]) -> list[int]:
    """The published start as the uniform draw that leads to it."""
    total, stride = entry["video_frames"], entry["stride"]
    share = entry["drop_end"] - entry["drop_start"]
    count = min(entry["n_frames"], int(total * share // stride))
    end = int(entry["drop_end"] * total)
    window = Window(int(entry["drop_start"] * end), end)
    last = end - min(end, (count - 1) * stride + 1)
    # With a single possible start the original begins at frame 0.
    start = random.Random(entry["python_random_seed"]).randint(window.start, last) if last != window.start else 0
    draw = (start - window.start + 0.5) / (last - window.start + 1)
    rule = FrameRule(stride=stride)
    found = select_frames(window, count, fps=0.0, rule=rule, start_rule="random", draw=draw)
    indices: list[int] = found.tolist()
    return indices


@golden(lambda case: "cases" in case.config and any(name.endswith("example0_fhwc") for name in case.inputs))
def run_pixels(case: ParityCase) -> list[ParityOutput]:
    return [_collate(case, number, entry) for number, entry in enumerate(case.config["cases"])]


def _collate(case: ParityCase, number: int, entry: dict[str, Any]) -> ParityOutput:
    clips_CFHW = [
        case.inputs[f"{number}.example{place}_fhwc"].permute(3, 0, 1, 2) for place in range(len(entry["types"]))
    ]
    pairs = list(zip(entry["types"], clips_CFHW, strict=True))
    examples = [[kind, clip.shape[1], clip.shape[2], clip.shape[3]] for kind, clip in pairs]
    own_ratio = entry["args"].get("random_ratio_crop", False)
    choices = _replay_choices(entry["rng_seed_PCG64"]) if own_ratio else []
    bucket = assign_batch(entry.get("patch_size_t"), entry["args"], examples, choices)
    # As published: without a ratio crop all clips of a batch are scaled like the first one.
    sources = [clip if own_ratio else clips_CFHW[0] for clip in clips_CFHW]
    places = [TRANSFORMS.place(source.shape[2], source.shape[3], bucket.height, bucket.width) for source in sources]
    cut = [
        resize_and_cut(clip[:, : bucket.frames], place, bucket.height, bucket.width).transpose(0, 1)
        for clip, place in zip(clips_CFHW, places, strict=True)
    ]
    name = f"{number}.pixel_values"
    is_stretched = any(source.shape[2:] != clip.shape[2:] for source, clip in zip(sources, clips_CFHW, strict=True))
    deviation = _DEVIATION if is_stretched else ""
    return compare(name, torch.stack(cut), case.outputs[name], 1e-5, deviation=deviation)


def _replay_choices(seed: int) -> list[list[Any]]:
    """The ratio that the published generator picks: its first draw when nothing else is random."""
    ratios, weights = list(CROP_WEIGHTS), np.array(list(CROP_WEIGHTS.values()), dtype=np.float64)
    picked = np.random.Generator(np.random.PCG64(seed)).choice(ratios, p=weights / weights.sum())
    return [["ratios, weighted", str(picked)]]


@golden_table("examples_[type,frames,h,w]", "transforms", in_cases=True)
def compare_collate_sizes(case: dict[str, Any]) -> Found:
    yield from compare_collate(case)
    for number, entry in enumerate(case["cases"]):
        height, width = entry["stacked_shape_bfchw"][3:]
        examples, own_ratio = entry["examples_[type,frames,h,w]"], entry["args"]["random_ratio_crop"]
        for place, (example, wanted) in enumerate(zip(examples, entry["transforms"], strict=True)):
            source = example if own_ratio else examples[0]
            scaled = TRANSFORMS.place(source[2], source[3], height, width)[:2]
            output = compare_numbers(
                f"{number} clip {place} sizes", [*scaled, height, width], wanted["resize_hw"] + wanted["center_crop_hw"]
            )
            deviation = _DEVIATION if source[2:] != example[2:] else ""
            yield ParityOutput(output.name, output.ours, output.expected, 0.0, deviation=deviation)
        budget = entry["args"]["video_sample_n_frames"] * entry["args"]["token_sample_size"] ** 2
        yield compare_numbers(f"{number} token length", budget, entry["target_token_length"])
