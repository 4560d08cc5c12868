"""Every policy on real files: from a recipe's data section through the plan to batches of one shape."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from frameloom.builders.data import build_bucket_policy
from frameloom.config.schema.data import DataSection
from frameloom.core.errors import ConfigError
from frameloom.data.buckets.policy import (
    BucketPolicy,
    assign,
    bucket_table,
    count_unused,
    nearest_values,
    possible_buckets,
)
from frameloom.data.loading.loader import iterate_batches
from frameloom.data.loading.reader import BatchReader
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.order.plan import plan_epoch
from frameloom.demo.shapes_set import write_shapes
from frameloom.models.vaes.config import LengthRule

BUCKETS = {"64px": {1: (1.0, 4), 9: (0.5, 4), 5: (1.0, 4)}, "32px": {5: (1.0, 4)}}
RATIO_TOKENS = {
    **{"video_sample_size": 32, "image_sample_size": 64, "token_sample_size": 64, "train_batch_size": 3},
    **{"video_sample_n_frames": 9, "video_sample_stride": 2, "training_with_video_token_length": True},
}
GROUPED = {"num_frames": 9, "max_hxw": 4096, "hw_stride": 16, "train_fps": 12.0, "batch": 4}
POLICIES: dict[str, dict[str, object]] = {
    "grid": {"buckets": BUCKETS},
    "token_budget": {"buckets": BUCKETS, "token_budget": {"tokens": 100}},
    "ratio_tokens": {"ratio_tokens": RATIO_TOKENS},
    "grouped": {"grouped": {**GROUPED, "too_long_factor": 50.0}},
    "multi_aspect": {"multi_aspect": {"sizes": ((64, 64), (48, 80), (80, 48)), "frames": 5, "batch": 4}},
    "fixed": {"fixed": {"height": 32, "width": 48, "frames": 9, "batch": 5, "image_batch": 2}},
}
RANDOM = {"ratio_tokens": {**RATIO_TOKENS, "random_hw_adapt": True, "random_frame_crop": True}}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(folder, count=24, seed=3)
    return Manifest.read(folder / "manifest.parquet")


def build(name: str, keys: dict[str, object]) -> BucketPolicy:
    data = DataSection.model_validate({"manifest": "m.parquet", "policy": name, **keys})
    return build_bucket_policy(data, stride=16, rule=LengthRule())


@pytest.mark.parametrize("name", POLICIES)
def test_batches_have_one_shape_and_every_row_comes_once(shapes: Manifest, name: str) -> None:
    policy = pickle.loads(pickle.dumps(build(name, POLICIES[name])))
    chosen = assign(shapes, policy, 5, 0)
    assert (chosen >= 0).sum() > 10
    plan = plan_epoch(chosen, policy.batch_sizes, policy.costs, seed=5, epoch=0)
    seen: list[int] = []
    for batch in iterate_batches(plan, BatchReader(shapes, policy, DataSection(), seed=5)):
        assert not batch.bad
        bucket = batch.bucket
        assert batch.pixels_BCFHW is not None
        assert tuple(batch.pixels_BCFHW.shape[1:]) == (3, bucket.frames, bucket.height, bucket.width)
        assert batch.size <= bucket.batch_size
        assert (chosen[batch.rows] == bucket.index).all()
        seen += batch.rows.tolist()
    assert sorted(seen) == np.flatnonzero(chosen >= 0).tolist()
    unused = count_unused(shapes, policy, chosen)
    assert sum(unused.values()) + sum(use.num_clips for use in bucket_table(chosen, policy)) == len(shapes)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_possible_covers_every_epoch(shapes: Manifest, name: str) -> None:
    policy = build(name, POLICIES[name])
    pairs = possible_buckets(shapes, policy)
    possible = set(zip(pairs.rows.tolist(), pairs.buckets.tolist(), strict=True))
    for epoch in range(20):
        chosen = assign(shapes, policy, 1, epoch)
        assert {(row, int(bucket)) for row, bucket in enumerate(chosen) if bucket >= 0} <= possible
    assert len(possible) < len(shapes) * len(policy.buckets)


def test_policies_that_draw_shapes_cannot_be_cached(shapes: Manifest, tmp_path: Path) -> None:
    policy = build("ratio_tokens", RANDOM)
    assert len({tuple(assign(shapes, policy, 1, epoch)) for epoch in range(3)}) == 3
    with pytest.raises(ConfigError) as caught:
        possible_buckets(shapes, policy)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "data.ratio_tokens.random_hw_adapt",
        "data.ratio_tokens.random_frame_crop",
    ]


def test_every_policy_says_which_pixels_it_holds() -> None:
    known = [repr(build(name, keys).geometry()) for name, keys in POLICIES.items() if name != "token_budget"]
    assert len(set(known)) == len(known)
    fewer = build("ratio_tokens", {"ratio_tokens": {**RATIO_TOKENS, "train_batch_size": 1}})
    assert fewer.geometry() == build("ratio_tokens", POLICIES["ratio_tokens"]).geometry()
    stride = build("ratio_tokens", {"ratio_tokens": {**RATIO_TOKENS, "video_sample_stride": 3}})
    assert stride.geometry() != fewer.geometry()


def test_nearest_value_is_that_of_a_full_search() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        values = draw.permutation(np.round(draw.uniform(0.2, 4, 12), 1)).tolist()
        wanted = np.concatenate([draw.uniform(0, 5, 200), np.round(draw.uniform(0, 5, 200), 1) + 0.05, values])
        full = np.abs(np.array(values)[None, :] - wanted[:, None]).argmin(axis=1)
        assert nearest_values(values, wanted).tolist() == full.tolist()


def test_legal_lengths_follow_the_rule() -> None:
    assert LengthRule().legal(20) == [1, 5, 9, 13, 17]
    assert LengthRule(patch=2).legal(25) == [1, 5, 13, 21]
    assert LengthRule(causal=False).legal(13) == [1, 4, 8, 12]
    assert LengthRule().legal(93, multiple=8) == [29, 61, 93]
    assert LengthRule(patch=2).trim(np.array([0, 1, 49, 85])).tolist() == [0, 1, 45, 85]
