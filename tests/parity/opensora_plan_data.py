"""Golden cases of Open-Sora-Plan 1.3's data: lengths, sizes, which entries are kept at which shape, captions."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from frameloom.config.schema.buckets import GroupedSection
from frameloom.data.buckets.grouped import PUBLISHED_GROUP_BATCHES, TOO_LONG, Grouped
from frameloom.data.buckets.policy import UNUSED, Draw
from frameloom.data.media.frames import Window, pick_start, resample_window, speed_up
from frameloom.data.media.transforms import CenterCrop
from frameloom.models.text.cleaning import clean_caption
from frameloom.models.vaes.config import LengthRule
from tests.parity.cases import Found, ParityCase, ParityOutput, compare_facts, golden, golden_table, leave_out
from tests.parity.opensora2_data import to_clips

_ASSUMED_FPS = 24.0


def _policy(stride: int = 4, **settings: Any) -> Grouped:
    return Grouped(GroupedSection(as_published=True, **settings), rule=LengthRule(stride=stride))


@golden_table("index_build", "clips")
def compare_index(case: dict[str, Any]) -> Found:
    rows = case["closest_valid_length[x,vae_stride_t,model_ds_t,result]"]
    valid = [_policy(stride, sp_size=sp).valid_lengths(np.array([frames])) for frames, stride, sp, _ in rows]
    yield "valid length", [int(found[0]) or -1 for found in valid], [row[3] for row in rows]
    ours, wanted = [], []
    for row in case["resize_and_stride_crop"]:
        policy = _policy(max_hxw=row["max_hxw"], hw_stride=row["stride"])
        resized = policy.shrink(np.array([row["h"]]), np.array([row["w"]]))
        cut = policy.cut_sides(*resized)
        center = CenterCrop()
        offsets = [center.offset(int(whole[0] - part[0])) for whole, part in zip(resized, cut, strict=True)]
        ours.append([*(int(side[0]) for side in (*resized, *cut)), *offsets])
        wanted.append([*row["resized"], *row["crop_hw"], *row["crop_top_left"]])
    yield "size", ours, wanted
    yield from _compare_clips(case["clips"])
    for number, build in enumerate(case["index_build"]):
        yield from _compare_build(case["index_build_entries"], build, number)


def _compare_clips(entries: list[dict[str, Any]]) -> Found:
    """Frames of single clips as they are chosen when the list is made, and again when a clip is read."""
    for number, entry in enumerate(entries):
        names = ("num_frames", "train_fps", "speed_factor", "sp_size", "drop_short_ratio")
        policy = _policy(entry["ae_stride_t"], **{name: entry[name] for name in names})
        clips = to_clips([(entry["clip_total_frames"], 480, 640, float(entry["fps"]))])
        # Its generator is fixed, so the first short clip always has the same draw.
        chosen = int(policy.assign_clips(clips, np.zeros(1, dtype=np.int64), _torch_draws())[0])
        frames = policy.buckets[chosen].frames if chosen != UNUSED else 0
        wanted = [] if entry["index_build"] == "filtered" else entry["index_build"]
        window = Window(entry["start_frame_idx"], entry["start_frame_idx"] + entry["clip_total_frames"])
        found = _crop(policy, window, entry["fps"], random.Random(entry["python_random_seed"]))[:frames]
        yield compare_facts(f"clip {number} in the list", found.tolist(), wanted)
        if "read_time" in entry:
            yield _compare_reading(entry, policy, window, frames, f"clip {number} when read")


def _compare_reading(entry: dict[str, Any], policy: Grouped, window: Window, frames: int, name: str) -> ParityOutput:
    generator = random.Random(entry["read_time_seed"])
    found = _crop(policy, window, entry["fps"], generator, speed=entry["speed_factor"])[:frames]
    if isinstance(entry["read_time"], str):
        # The name of an error: its own rounding left it one frame short.
        return leave_out(name, "speed-up-that-falls-short")
    return compare_facts(name, found.tolist(), entry["read_time"])


def _crop(
    policy: Grouped, window: Window, fps: float, generator: random.Random, speed: float = 1.0
) -> NDArray[np.int64]:
    found = resample_window(window, fps, policy.settings.train_fps)
    found = speed_up(found, speed, policy.settings.num_frames)
    spare = len(found) - policy.settings.num_frames
    if spare <= 0:
        return found
    last = max(0, spare - 1)
    start = pick_start(spare, "random", (generator.randint(0, last) + 0.5) / (last + 1), skip_last=True)
    return found[start : start + policy.settings.num_frames]


def _compare_build(entries: list[dict[str, Any]], build: dict[str, Any], number: int) -> Found:
    settings = dict(build["settings"])
    group = PUBLISHED_GROUP_BATCHES * settings.pop("total_batch_size")
    policy = _policy(min_group=group, **settings)
    usable = [entry for entry in entries if _is_whole(entry)]
    clips = to_clips([_facts(entry) for entry in usable])
    chosen = policy.assign_clips(clips, np.arange(len(usable)), _torch_draws())
    counts = np.bincount(chosen[chosen != UNUSED], minlength=len(policy.buckets))
    kept = (chosen != UNUSED) & policy.keep_buckets(counts)[chosen]
    shapes = {entry["path"]: [entry["n"], *entry["sample_hw"]] for entry in build["kept"]}
    ours = [_shape(policy, int(bucket)) if used else [0, 0, 0] for bucket, used in zip(chosen, kept, strict=True)]
    yield f"list {number}", ours, [shapes.get(entry["path"], [0, 0, 0]) for entry in usable]
    strings = ["x".join(map(str, shape)) for shape, used in zip(ours, kept, strict=True) if used]
    yield compare_facts(f"list {number} shapes", strings, build["lengths"])
    ends = _find_ends(policy, usable, chosen, random.Random(build["python_random_seed"]))
    found = [[path, *ends[path]] for entry in build["kept"] if (path := entry["path"]) in ends]
    wanted = [[entry[key] for key in ("path", "first", "last")] for entry in build["kept"]]
    yield compare_facts(f"list {number} first and last frames", found, wanted)


def _find_ends(
    policy: Grouped, entries: list[dict[str, Any]], chosen: NDArray[np.int32], generator: random.Random
) -> dict[str, tuple[int, int]]:
    """First and last frame of every entry; the generator goes on from one clip to the next."""
    clips = to_clips([_facts(entry) for entry in entries])
    fits = (policy.fit_sizes(clips)[2] == 0) & (policy.fit_lengths(clips)[2] != TOO_LONG)
    ends = {}
    for entry, fit, bucket in zip(entries, fits, chosen.tolist(), strict=True):
        frames, _, _, fps = _facts(entry)
        if math.isnan(fps):
            ends[entry["path"]] = (0, 0)
        elif fit:
            start = (entry.get("cut") or [0])[0]
            # Clips that turn out too short for any legal length have drawn their start all the same.
            found = _crop(policy, Window(start, start + frames), fps, generator)
            if bucket != UNUSED:
                length = policy.buckets[bucket].frames
                ends[entry["path"]] = (int(found[0]), int(found[length - 1]))
    return ends


def _shape(policy: Grouped, index: int) -> list[int]:
    bucket = policy.buckets[index]
    return [bucket.frames, bucket.height, bucket.width]


def _is_whole(entry: dict[str, Any]) -> bool:
    """Entries without caption or size never become rows of a manifest."""
    size = entry.get("resolution") or {}
    return "cap" in entry and bool(size.get("height")) and bool(size.get("width"))


def _facts(entry: dict[str, Any]) -> tuple[int, int, int, float]:
    size, is_video = entry["resolution"], entry["path"].endswith(".mp4")
    fps = float(entry.get("fps", _ASSUMED_FPS)) if is_video else float("nan")
    return entry.get("num_frames", 1), size["height"], size["width"], fps


def _torch_draws() -> Draw:
    """The next numbers of the original's generator, which always starts from 42."""
    generator = torch.Generator().manual_seed(42)
    return lambda rows, _: np.array([float(torch.rand(1, generator=generator)) for _ in rows])


@golden_table("samples_thw", "per_rank_batches", in_cases=True)
def compare_orders(case: dict[str, Any]) -> Found:
    for number in range(len(case["cases"])):
        for name in ("order", "batches of each process", "length"):
            yield leave_out(f"{name} {number}", "published-orders")


@golden(lambda case: case.config.get("function") == "v1.3 caption cleaning")
def run_cleaning(case: ParityCase) -> list[ParityOutput]:
    """Every text must be equal, with Chinese kept and removed."""
    return [
        compare_facts(
            name,
            # A list is written out, as the original does with it.
            [clean_caption(str(item["input"]), keep_chinese=keep_chinese) for item in case.config["cases"]],
            [item[name] for item in case.config["cases"]],
        )
        for name, keep_chinese in (("out_support_chinese_true", True), ("out_support_chinese_false", False))
    ]
