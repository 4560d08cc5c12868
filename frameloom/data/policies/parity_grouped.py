"""Golden cases of Open-Sora-Plan 1.3: legal lengths, sizes, and which entries of a list are kept at which shape."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from frameloom.config.bucket_policies import GroupedSection
from frameloom.data.buckets import UNUSED, Clips, Draw
from frameloom.data.frames import Window, pick_start, resample_window
from frameloom.data.policies.grouped import PUBLISHED_GROUP_BATCHES, Grouped
from frameloom.data.policies.lengths import LengthRule

Found = Iterator[tuple[str, Any, Any]]
_ASSUMED_FPS = 24.0


def _policy(stride: int = 4, **settings: Any) -> Grouped:
    return Grouped(GroupedSection(as_published=True, **settings), rule=LengthRule(stride=stride))


def compare_index(case: dict[str, Any]) -> Found:
    rows = case["closest_valid_length[x,vae_stride_t,model_ds_t,result]"]
    valid = [_policy(stride, sp_size=sp).valid_lengths(np.array([frames])) for frames, stride, sp, _ in rows]
    yield "valid length", [int(found[0]) or -1 for found in valid], [row[3] for row in rows]
    ours, wanted = [], []
    for row in case["resize_and_stride_crop"]:
        policy = _policy(max_hxw=row["max_hxw"], hw_stride=row["stride"])
        resized = policy.shrink(np.array([row["h"]]), np.array([row["w"]]))
        cut = policy.cut_sides(*resized)
        ours.append([int(side[0]) for side in (*resized, *cut)])
        wanted.append([*row["resized"], *row["crop_hw"]])
    yield "size", ours, wanted
    yield from _compare_clips(case["clips"])
    for number, build in enumerate(case["index_build"]):
        yield from _compare_build(case["index_build_entries"], build, number)


def _compare_clips(entries: list[dict[str, Any]]) -> Found:
    """Frames of single clips, and the first and the last index with the original's start."""
    lengths, wanted_lengths, ends, wanted_ends = [], [], [], []
    for entry in entries:
        names = ("num_frames", "train_fps", "speed_factor", "sp_size", "drop_short_ratio")
        policy = _policy(entry["ae_stride_t"], **{name: entry[name] for name in names})
        clips = _to_clips([(entry["clip_total_frames"], 480, 640, float(entry["fps"]))])
        # Its generator is fixed, so the first short clip always has the same draw.
        chosen = int(policy.assign_clips(clips, np.zeros(1, dtype=np.int64), _torch_draws())[0])
        frames = policy.buckets[chosen].frames if chosen != UNUSED else 0
        lengths.append(frames)
        wanted_lengths.append(0 if entry["index_build"] == "filtered" else len(entry["index_build"]))
        if frames:
            window = Window(entry["start_frame_idx"], entry["start_frame_idx"] + entry["clip_total_frames"])
            found = _crop(policy, window, entry["fps"], random.Random(entry["python_random_seed"]))[:frames]
            ends.append(found[[0, 1, -1]].tolist())
            wanted_ends.append([entry["index_build"][i] for i in (0, 1, -1)])
    yield "clip lengths", lengths, wanted_lengths
    yield "clip ends", ends, wanted_ends


def _crop(policy: Grouped, window: Window, fps: float, generator: random.Random) -> NDArray[np.int64]:
    found = resample_window(window, fps, policy.settings.train_fps)
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
    clips = _to_clips([_facts(entry) for entry in usable])
    chosen = policy.assign_clips(clips, np.arange(len(usable)), _torch_draws())
    counts = np.bincount(chosen[chosen != UNUSED], minlength=len(policy.buckets))
    kept = (chosen != UNUSED) & policy.keep_buckets(counts)[chosen]
    shapes = {entry["path"]: [entry["n"], *entry["sample_hw"]] for entry in build["kept"]}
    ours = [_shape(policy, int(bucket)) if used else [0, 0, 0] for bucket, used in zip(chosen, kept, strict=True)]
    yield f"list {number}", ours, [shapes.get(entry["path"], [0, 0, 0]) for entry in usable]


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


def _to_clips(rows: list[tuple[int, int, int, float]]) -> Clips:
    frames, height, width = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
    return Clips(frames, height, width, np.array([row[3] for row in rows]))


def _torch_draws() -> Draw:
    """The next numbers of the original's generator, which always starts from 42."""
    generator = torch.Generator().manual_seed(42)
    return lambda rows, _: np.array([float(torch.rand(1, generator=generator)) for _ in rows])
