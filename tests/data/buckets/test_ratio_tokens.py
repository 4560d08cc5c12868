from __future__ import annotations

import numpy as np
import pytest

from frameloom.config.schema.buckets import RatioTokensSection
from frameloom.core.errors import ConfigError
from frameloom.data.buckets.policy import Clips, counter_draw
from frameloom.data.buckets.ratio_tokens import RatioTokens
from frameloom.models.vaes.config import LengthRule

SEED = {"video_sample_size": 256, "image_sample_size": 1024, "token_sample_size": 512}


def build(*, stride: int = 16, patch: int = 1, **settings: object) -> RatioTokens:
    section = RatioTokensSection(**{"video_sample_n_frames": 49, "video_sample_stride": 3, **SEED, **settings})
    return RatioTokens(section, stride=stride, rule=LengthRule(patch=patch))


def clips(*rows: tuple[int, int, int, float]) -> Clips:
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(3)]
    return Clips(*columns, np.array([row[3] for row in rows]))


MANY = clips(
    *(
        (int(frames), int(height), int(width), 24.0 if frames > 1 else np.nan)
        for frames, height, width in np.random.default_rng(0).integers((1, 60, 60), (300, 2000, 2000), (2000, 3))
    )
)
ROWS = np.arange(2000)
ALL = {
    "random_hw_adapt": True,
    "training_with_video_token_length": True,
    "random_frame_crop": True,
    "keep_all_node_same_token_length": True,
}


def test_nine_frames_fit_where_the_original_takes_thirteen() -> None:
    sides = np.array([256.0, 512.0, 768.0, 1024.0])
    tokens = {"training_with_video_token_length": True}
    assert build(**tokens).longest_frames(sides).tolist() == [49, 49, 21, 9]
    assert build(**tokens, as_published=True).longest_frames(sides).tolist() == [49, 49, 21, 13]


@pytest.mark.parametrize("patch", [1, 2])
def test_no_clip_exceeds_the_budget_unless_as_published(patch: int) -> None:
    def most_pixels(**settings: object) -> float:
        policy = build(patch=patch, training_with_video_token_length=True, random_hw_adapt=True, **settings)
        chosen = policy.assign_clips(MANY, ROWS, counter_draw(1, 0))
        assert (chosen >= 0).mean() > 0.98
        # Sizes of other ratios may have up to 3% more pixels than the square.
        return max(policy.buckets[i].num_pixels for i in chosen[chosen >= 0]) / policy.pixel_budget

    assert most_pixels() <= 1.03
    assert most_pixels(as_published=True) > 1.03


def test_a_clip_as_long_as_its_window_is_used_whole() -> None:
    exact = clips((145, 512, 512, 24.0))
    lengths = [build(as_published=published).available_frames(exact.frames).tolist() for published in (False, True)]
    assert lengths == [[49], [48]]


def test_a_tiny_video_keeps_the_smallest_size() -> None:
    settings = {"random_hw_adapt": True, "training_with_video_token_length": True}
    tiny = np.array([100.0])
    assert build(**settings).count_sides(tiny).tolist() == [1]
    assert build(**settings, as_published=True).count_sides(tiny).tolist() == [7]


def test_lengths_suit_the_model_and_rows_decide_alone() -> None:
    policy = build(patch=2, **ALL)
    chosen = policy.assign_clips(MANY, ROWS, counter_draw(3, 1))
    frames = np.array([policy.buckets[i].frames for i in chosen])
    latents = (frames - 1) // 4 + 1
    assert set(frames[MANY.is_image]) == {1}
    assert ((latents % 2 == 0) | (frames == 1)).all()
    assert len(set(frames.tolist())) > 5
    some = np.array([1500, 3, 77])
    part = Clips(*(column[some] for column in MANY))
    assert policy.assign_clips(part, some, counter_draw(3, 1)).tolist() == chosen[some].tolist()
    assert policy.assign_clips(MANY, ROWS, counter_draw(3, 2)).tolist() != chosen.tolist()


def test_every_size_is_a_multiple_of_the_stride_and_shapes_are_unique() -> None:
    policy = build(stride=32, **ALL)
    shapes = {(bucket.frames, bucket.height, bucket.width) for bucket in policy.buckets}
    assert len(shapes) == len(policy.buckets)
    assert all(bucket.height % 32 == 0 and bucket.width % 32 == 0 for bucket in policy.buckets)
    assert [bucket.index for bucket in policy.buckets] == list(range(len(policy.buckets)))


def test_small_clips_fill_the_batch_only_with_token_lengths() -> None:
    assert build(train_batch_size=4, training_with_video_token_length=True).fill_batch(49, 256, 256) == 8
    assert build(train_batch_size=4).fill_batch(49, 256, 256) == 4


def test_random_ratio_crop_draws_ratios_by_weight() -> None:
    policy = build(random_ratio_crop=True)
    square = clips(*[(60, 512, 512, 24.0)] * 2000)
    ratios = [policy.buckets[i].ratio for i in policy.assign_clips(square, ROWS, counter_draw(0, 0))]
    shares = {ratio: ratios.count(ratio) / 2000 for ratio in set(ratios)}
    assert abs(shares["0.94"] - 8 / 62) < 0.03
    assert abs(shares["0.42"] - 1 / 62) < 0.02
    plain = build()
    assert {plain.buckets[i].ratio for i in plain.assign_clips(square, ROWS, counter_draw(0, 0))} == {"1"}


def test_random_settings_are_named_for_the_cache() -> None:
    assert build().random_keys == []
    assert build(random_hw_adapt=True, random_frame_crop=True).random_keys == [
        "data.ratio_tokens.random_hw_adapt",
        "data.ratio_tokens.random_frame_crop",
    ]


def test_sizes_without_room_for_a_token_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at a side of 16 .* use sizes of 32 or more"):
        build(video_sample_size=16)


def test_too_short_videos_are_explained_as_published() -> None:
    short = clips((2, 512, 512, 24.0), (1, 512, 512, np.nan), (3, 512, 512, 24.0))
    published = build(as_published=True)
    assert published.reject_reason(short).tolist() == [1, 0, 0]
    assert published.assign_clips(short, ROWS[:3], counter_draw(0, 0)).tolist()[0] == -1
    assert build().reject_reason(short).tolist() == [0, 0, 0]
