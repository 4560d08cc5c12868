from __future__ import annotations

import numpy as np

from frameloom.config.schema.buckets import FixedSection, MultiAspectSection
from frameloom.data.buckets.fixed import Fixed, MultiAspect
from frameloom.data.buckets.policy import Clips, counter_draw

IMAGE = np.nan


def clips(*rows: tuple[int, int, int, float]) -> Clips:
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(3)]
    return Clips(*columns, np.array([row[3] for row in rows]))


def test_sdxl_sizes_follow_the_shape_of_the_image() -> None:
    policy = MultiAspect(MultiAspectSection(), fps_max=24)
    rows = clips((1, 1024, 1024, IMAGE), (1, 900, 900, IMAGE), (1, 300, 300, IMAGE), (1, 1600, 800, IMAGE))
    chosen = policy.assign_clips(rows, np.arange(4), counter_draw(0, 0))
    sizes = [(policy.buckets[i].height, policy.buckets[i].width) for i in chosen]
    assert sizes == [(1024, 1024), (768, 768), (512, 512), (1408, 704)]
    assert len(policy.buckets) == 28


def test_sdxl_as_published_draws_any_size_and_some_twice_as_often() -> None:
    policy = MultiAspect(MultiAspectSection(as_published=True), fps_max=24)
    rows = clips(*[(1, 1024, 1024, IMAGE)] * 6200)
    chosen = policy.assign_clips(rows, np.arange(6200), counter_draw(0, 0))
    counts = np.bincount(chosen, minlength=28)
    twice = [i for i, bucket in enumerate(policy.buckets) if bucket.height in (1472, 1600, 1728)]
    once = [i for i in range(28) if i not in twice]
    assert abs(counts[twice].mean() / counts[once].mean() - 2) < 0.2
    assert policy.random_keys == ("data.multi_aspect.as_published",)


def test_fixed_takes_images_only_on_request() -> None:
    rows = clips((20, 300, 300, 24.0), (40, 300, 300, 48.0), (10, 300, 300, 24.0), (1, 300, 300, IMAGE))
    plain = Fixed(FixedSection(frames=17), fps_max=24)
    assert plain.assign_clips(rows, np.arange(4), counter_draw(0, 0)).tolist() == [0, 0, -1, -1]
    assert plain.reject_reason(rows).tolist() == [0, 0, 1, 2]
    mixed = Fixed(FixedSection(frames=17, image_batch=8), fps_max=24)
    assert mixed.assign_clips(rows, np.arange(4), counter_draw(0, 0)).tolist() == [0, 0, -1, 1]
    assert mixed.batch_sizes.tolist() == [1, 8]
    still = Fixed(FixedSection(frames=1), fps_max=24)
    assert still.assign_clips(rows, np.arange(4), counter_draw(0, 0)).tolist() == [0, 0, 0, 0]
