from __future__ import annotations

import numpy as np
import pytest

from frameloom.config.schema.buckets import FixedSection, MultiAspectSection
from frameloom.data.buckets.fixed import Fixed, MultiAspect
from frameloom.data.buckets.grid import apply_token_budget, count_tokens, parse_grid
from frameloom.data.buckets.policy import Clips, counter_draw
from frameloom.data.buckets.sizes import LengthRule, nearest_values

IMAGE = np.nan


def clips(*rows: tuple[int, int, int, float]) -> Clips:
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(3)]
    return Clips(*columns, np.array([row[3] for row in rows]))


def test_nearest_value_is_that_of_a_full_search() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        values = draw.permutation(np.round(draw.uniform(0.2, 4, 12), 1)).tolist()
        wanted = np.concatenate([draw.uniform(0, 5, 200), np.round(draw.uniform(0, 5, 200), 1) + 0.05, values])
        full = np.abs(np.array(values)[None, :] - wanted[:, None]).argmin(axis=1)
        assert nearest_values(values, wanted).tolist() == full.tolist()


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
    assert policy.random_keys() == ["data.multi_aspect.as_published"]


def test_fixed_takes_images_only_on_request() -> None:
    rows = clips((20, 300, 300, 24.0), (40, 300, 300, 48.0), (10, 300, 300, 24.0), (1, 300, 300, IMAGE))
    plain = Fixed(FixedSection(frames=17), fps_max=24)
    assert plain.assign_clips(rows, np.arange(4), counter_draw(0, 0)).tolist() == [0, 0, -1, -1]
    assert plain.why_unused(rows).tolist() == [0, 0, 1, 2]
    mixed = Fixed(FixedSection(frames=17, image_batch=8), fps_max=24)
    assert mixed.assign_clips(rows, np.arange(4), counter_draw(0, 0)).tolist() == [0, 0, -1, 1]
    assert mixed.batch_sizes.tolist() == [1, 8]
    still = Fixed(FixedSection(frames=1), fps_max=24)
    assert still.assign_clips(rows, np.arange(4), counter_draw(0, 0)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("tokens", [1, 100, 5000])
def test_token_budget_sets_the_batch_and_leaves_decisions_alone(tokens: int) -> None:
    grid = parse_grid({"128px": {1: [0.5, 64], 17: [0.5, 64]}, "64px": {1: [1.0, 64], 9: [1.0, 64]}}, stride=16)
    rule = LengthRule()
    policy = apply_token_budget(grid, tokens, rule)
    for before, bucket in zip(grid.buckets, policy.buckets, strict=True):
        size = count_tokens(bucket, 16, rule)
        assert bucket.batch_size == max(1, min(64, tokens // size))
        assert (bucket.height, bucket.width, bucket.frames) == (before.height, before.width, before.frames)
    assert policy.geometry() == grid.geometry()
    assert (policy.batch_sizes != grid.batch_sizes).any() == (tokens < 5000 or (policy.batch_sizes < 64).any())
    rows = clips(*[(30, 128, 128, 24.0)] * 500)
    draws = counter_draw(4, 0)
    same = policy.assign_clips(rows, np.arange(500), draws)
    assert np.array_equal(same, grid.assign_clips(rows, np.arange(500), draws))


def test_legal_lengths_follow_the_rule() -> None:
    assert LengthRule().legal(20).tolist() == [1, 5, 9, 13, 17]
    assert LengthRule(patch=2).legal(25).tolist() == [1, 5, 13, 21]
    assert LengthRule(causal=False).legal(13).tolist() == [1, 4, 8, 12]
    assert LengthRule().legal(93, multiple=8).tolist() == [29, 61, 93]
    assert LengthRule(patch=2).trim(np.array([0, 1, 49, 85])).tolist() == [0, 1, 45, 85]
