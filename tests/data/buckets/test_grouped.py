from __future__ import annotations

import numpy as np
import pytest

from frameloom.config.schema.buckets import GroupedSection
from frameloom.core.errors import ConfigError
from frameloom.data.buckets.grouped import Grouped
from frameloom.data.buckets.policy import UNUSED, Clips, counter_draw
from frameloom.models.vaes.config import LengthRule


def build(**settings: object) -> Grouped:
    return Grouped(GroupedSection(**settings), rule=LengthRule())


def clips(*rows: tuple[int, int, int, float]) -> Clips:
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(3)]
    return Clips(*columns, np.array([row[3] for row in rows]))


def decide(policy: Grouped, *rows: tuple[int, int, int, float]) -> list[tuple[int, int, int] | None]:
    chosen = policy.assign_clips(clips(*rows), np.arange(len(rows)), counter_draw(0, 0))
    found = [policy.buckets[i] if i != UNUSED else None for i in chosen]
    return [(bucket.frames, bucket.height, bucket.width) if bucket else None for bucket in found]


@pytest.mark.parametrize(
    ("max_hxw", "height", "width", "size"),
    [
        (409600, 720, 1280, (480, 832)),
        (409600, 1024, 1024, (640, 640)),
        (409600, 480, 640, (480, 640)),
        (236544, 720, 1280, (352, 640)),
        (236544, 480, 640, (416, 544)),
        (102400, 720, 1280, (224, 416)),
    ],
)
def test_dynamic_sizes_are_those_of_the_document(max_hxw: int, height: int, width: int, size: tuple[int, int]) -> None:
    assert decide(build(max_hxw=max_hxw), (200, height, width, 24.0)) == [(93, *size)]


def test_short_videos_are_kept_unless_as_published() -> None:
    assert decide(build(), (20, 480, 640, 24.0), (1, 480, 640, np.nan)) == [(17, 416, 544), (1, 416, 544)]
    assert decide(build(as_published=True), (20, 480, 640, 24.0), (1, 480, 640, np.nan)) == [None, (1, 416, 544)]
    assert decide(build(num_frames=1), (90, 480, 640, 24.0)) == [(1, 416, 544)]
    assert decide(build(num_frames=1, as_published=True), (90, 480, 640, 24.0)) == [None]


@pytest.mark.parametrize(("sp_size", "lengths"), [(1, [29, 33, 89]), (4, [29, 29, 77]), (8, [29, 29, 61])])
def test_lengths_are_split_by_the_sequence_group(sp_size: int, lengths: list[int]) -> None:
    policy = build(sp_size=sp_size, min_frames=29)
    rows = [(frames, 480, 640, 24.0) for frames in (29, 35, 92)]
    assert [shape[0] if shape else 0 for shape in decide(policy, *rows)] == lengths


def test_reasons_name_what_is_wrong() -> None:
    policy = build(max_hxw=236544)
    rows = clips(
        (93, 64, 64, 24.0), (93, 200, 1600, 24.0), (500, 480, 640, 24.0), (93, 480, 640, 24.0), (1, 480, 640, np.nan)
    )
    reasons = ["", *policy.reasons]
    assert [reasons[i] for i in policy.reject_reason(rows)] == ["too small", "wrong ratio", "too long", "", ""]
    assert [reasons[i] for i in build(sp_size=8).reject_reason(clips((20, 480, 640, 24.0)))] == ["too short"]
    chosen = policy.assign_clips(rows, np.arange(5), counter_draw(0, 0))
    assert (chosen == UNUSED).tolist() == [True, True, True, False, False]


def test_rare_shapes_are_left_out_on_request() -> None:
    counts = np.array([0, 3, 4, 100])
    assert build().keep_buckets(counts).all()
    assert build(min_group=4).keep_buckets(counts).tolist() == [False, False, True, True]
    assert build(as_published=True, batch=2).keep_buckets(counts).tolist() == [False, False, False, True]


def test_short_clips_are_dropped_at_the_asked_rate() -> None:
    rows = clips(*[(60, 480, 640, 24.0)] * 4000)
    policy = build(drop_short_ratio=0.7)
    chosen = policy.assign_clips(rows, np.arange(4000), counter_draw(0, 0))
    assert abs((chosen == UNUSED).mean() - 0.7) < 0.03
    assert (build(drop_short_ratio=1.0).assign_clips(rows, np.arange(4000), counter_draw(0, 0)) == UNUSED).all()
    (where, buckets), *_ = policy.possible_clips(rows)
    assert len(where) == 4000
    assert set(buckets) == set(chosen[chosen != UNUSED])


def test_forced_size_takes_only_near_ratios() -> None:
    policy = build(force_resolution=True, max_height=352, max_width=640)
    rows = [(93, 64, 64, 24.0), (93, 1280, 720, 24.0), (93, 100, 300, 24.0)]
    assert decide(policy, *rows) == [(93, 352, 640), None, (93, 352, 640)]


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="no size has sides that are multiples of hw_stride 32"):
        build(max_hxw=2000, min_hxw=1999)


def test_frame_rate_decides_the_length() -> None:
    slow, fast = decide(build(num_frames=93), (60, 480, 640, 12.0), (186, 480, 640, 48.0))
    assert slow == fast == (93, 416, 544)
    assert decide(build(num_frames=93, train_fps=12.0), (60, 480, 640, 12.0)) == [(57, 416, 544)]
