"""Frame selection: the published choices where goldens exist, and the edges between them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frameloom.core.errors import ConfigError, DataError
from frameloom.data.media.frames import (
    FrameRule,
    StartRule,
    Window,
    clip_window,
    pick_start,
    resample_window,
    select_frames,
    speed_up,
    spread_frames,
)
from frameloom.models.vaes.config import LengthRule

GOLDENS = Path(__file__).parents[2] / "goldens"
PLAN = json.loads((GOLDENS / "open-sora-plan" / "frame_index.json").read_text())
FUN = json.loads((GOLDENS / "cogvideox-fun" / "dataset_geometry.json").read_text())
SORA = json.loads((GOLDENS / "open-sora-v2" / "video_transform_geometry.json").read_text())
TEMPORAL = SORA["temporal_crop_[frames,num_frames,interval,python_seed,indices(first3,last3),first,last]"]
PLAN_MINIMUM = 29


def trim_plan(length: int, stride: int, multiple: int) -> int:
    """The valid length of Open-Sora-Plan, which takes no clip below 29 frames; 0 for none."""
    trimmed = int(LengthRule(stride=stride).trim(np.array([length]), multiple)[0])
    return trimmed if trimmed >= PLAN_MINIMUM else 0


def frame_indices(total: int, num_frames: int, interval: int, start_rule: StartRule, draw: float = 0.0) -> np.ndarray:
    """Indices spread over a window of `num_frames * interval`, as a policy with a highest frame rate wants them."""
    return select_frames(Window(0, total), num_frames, fps=0.0, interval=interval, start_rule=start_rule, draw=draw)


def draw_for(start: int, num_starts: int) -> float:
    """The draw that picks this start out of so many."""
    return (start + 0.5) / num_starts


def plan_indices(case: dict, seed: int, speed: float) -> list[int] | None:
    """The choice of Open-Sora-Plan 1.3 through our functions, with the random start that its seed gave."""
    window = clip_window(case["clip_total_frames"], case["start_frame_idx"])
    available = speed_up(resample_window(window, case["fps"], case["train_fps"]), speed, case["num_frames"])
    generator = random.Random(seed)
    if len(available) < case["num_frames"] and case["drop_short_ratio"] == 1:
        return None
    length = min(len(available), case["num_frames"])
    last = max(0, len(available) - length - 1)
    start = generator.randint(0, last) if len(available) > length else 0
    found = select_frames(
        window,
        length,
        fps=case["fps"],
        rule=FrameRule(fps=case["train_fps"], speed=speed, skip_last_start=True),
        start_rule="random",
        draw=draw_for(start, last + 1),
    )
    kept = trim_plan(len(found), case["ae_stride_t"], case["sp_size"])
    return found[:kept].tolist() if kept else None


@pytest.mark.parametrize("case", PLAN["clips"], ids=lambda case: f"{case['fps']}-{case['clip_total_frames']}")
def test_frames_equal_open_sora_plan(case: dict) -> None:
    too_long = (
        case["clip_total_frames"] > 5.0 * case["num_frames"] * case["fps"] / case["train_fps"] * case["speed_factor"]
    )
    built = None if too_long else plan_indices(case, case["python_random_seed"], 1.0)
    assert (built or "filtered") == case["index_build"]
    if "read_time" in case:
        assert plan_indices(case, case["read_time_seed"], case["speed_factor"]) == case["read_time"]


@pytest.mark.parametrize("case", PLAN["closest_valid_length[x,vae_stride_t,model_ds_t,result]"], ids=str)
def test_valid_lengths_equal_open_sora_plan(case: list[int]) -> None:
    length, stride, multiple, expected = case
    assert (trim_plan(length, stride, multiple) or -1) == expected


@pytest.mark.parametrize("case", FUN["frame_indices"], ids=lambda case: f"{case['video_frames']}-{case['stride']}")
def test_strides_equal_cogvideox_fun(case: dict) -> None:
    total, stride = case["video_frames"], case["stride"]
    end = int(case["drop_end"] * total)
    window = Window(int(case["drop_start"] * end), end)
    length = min(case["n_frames"], int(total * (case["drop_end"] - case["drop_start"]) // stride))
    last_start = window.end - window.start - ((length - 1) * stride + 1)
    start = random.Random(case["python_random_seed"]).randint(0, last_start)
    found = select_frames(
        window,
        length,
        fps=24,
        rule=FrameRule(stride=stride),
        start_rule="random",
        draw=draw_for(start, last_start + 1),
    )
    assert found.tolist() == case["idx"]


def test_the_last_start_is_used_unless_it_is_switched_off() -> None:
    draws = np.linspace(0, 0.9999, 400)
    assert {pick_start(3, "random", draw) for draw in draws} == {0, 1, 2, 3}
    assert {pick_start(3, "random", draw, skip_last=True) for draw in draws} == {0, 1, 2}
    assert pick_start(0, "random", 0.99, skip_last=True) == 0
    assert (pick_start(9, "first", 0.9), pick_start(9, "center", 0.9)) == (0, 4)


@given(
    total=st.integers(1, 400),
    num_frames=st.integers(1, 60),
    stride=st.integers(1, 6),
    draw=st.floats(0, 1, exclude_max=True),
    start=st.integers(0, 50),
    rule=st.sampled_from(["first", "center", "random"]),
)
def test_strided_frames_stay_inside_their_window(
    total: int, num_frames: int, stride: int, draw: float, start: int, rule: str
) -> None:
    window = Window(start, start + total)
    if (num_frames - 1) * stride + 1 > total:
        with pytest.raises(DataError, match="frames wanted"):
            select_frames(window, num_frames, fps=24, rule=FrameRule(stride=stride), start_rule=rule, draw=draw)
        return
    found = select_frames(window, num_frames, fps=24, rule=FrameRule(stride=stride), start_rule=rule, draw=draw)
    assert len(found) == num_frames
    assert window.start <= found[0] and found[-1] < window.end
    assert (np.diff(found) == stride).all()


@given(
    total=st.integers(1, 600),
    fps=st.floats(1, 240),
    target=st.floats(1, 60),
    start=st.integers(0, 100),
    speed=st.floats(1, 4),
    num_frames=st.integers(1, 90),
)
def test_resampled_frames_stay_inside_their_window_and_in_order(
    total: int, fps: float, target: float, start: int, speed: float, num_frames: int
) -> None:
    window = Window(start, start + total)
    every = resample_window(window, fps, target)
    assert every[0] == start and every[-1] < window.end
    assert (np.diff(every) >= 0).all()
    faster = speed_up(every, speed, num_frames)
    assert len(faster) >= min(num_frames, len(every))
    assert set(faster.tolist()) <= set(every.tolist())


def test_fractional_steps_are_the_published_ones() -> None:
    assert resample_window(Window(0, 40), 30, 16)[:6].tolist() == [0, 1, 3, 5, 7, 9]
    assert resample_window(Window(0, 40), 24, 16)[:6].tolist() == [0, 1, 3, 4, 6, 7]
    assert resample_window(Window(0, 40), 60, 16)[:6].tolist() == [0, 3, 7, 11, 15, 18]
    assert resample_window(Window(0, 4), 12, 24).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert resample_window(Window(0, 40), 23.95, 24).tolist() == list(range(40))


def test_windows_of_a_manifest_row() -> None:
    assert clip_window(20) == (0, 20)
    assert clip_window(20, 7) == (7, 27)
    assert clip_window(20, 7, 17) == (7, 17)
    assert clip_window(20, None, 90) == (0, 20)
    with pytest.raises(DataError, match="holds no frame"):
        clip_window(20, 7, 7)
    found = select_frames(clip_window(20, 7), 5, fps=24, start_rule="random", draw=0.999)
    assert found.tolist() == [22, 23, 24, 25, 26]
    assert frame_indices(20, 5, 1, "random", 0.999).tolist() == [15, 16, 17, 18, 19]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"stride": 2, "fps": 8.0}, "exclude each other"),
        ({"stride": 0}, "stride is 0"),
        ({"fps": -1.0}, r"fps is -1"),
        ({"speed": 2.0}, "speed is 2"),
        ({"fps": 8.0, "speed": 0.5}, r"speed is 0\.5"),
    ],
)
def test_impossible_rules_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FrameRule(**kwargs)


@pytest.mark.parametrize("case", TEMPORAL, ids=str)
def test_frames_in_a_window_equal_the_original(case: list) -> None:
    total, num_frames, interval, _, ends, first, last = case
    found = spread_frames(first, min(first + num_frames * interval, total), num_frames).tolist()
    assert [*found[:3], "...", *found[-3:]] == ends
    assert (found[0], found[-1]) == (first, last)


def test_start_rules() -> None:
    assert frame_indices(20, 5, 2, "first").tolist() == [0, 2, 4, 6, 9]
    assert frame_indices(20, 5, 2, "center").tolist() == [5, 7, 9, 11, 14]
    assert frame_indices(20, 5, 2, "random", 0.999)[0] == 10
    starts = {int(frame_indices(12, 9, 1, "random", draw)[0]) for draw in np.linspace(0, 0.999, 50)}
    assert starts == {0, 1, 2, 3}
    assert frame_indices(7, 1, 3, "first").tolist() == [0]
    with pytest.raises(DataError, match="9 frames wanted"):
        frame_indices(8, 9, 1, "first")
