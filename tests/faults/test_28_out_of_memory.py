"""A bucket that does not fit in memory runs in halves, with the same result, also after a resume; others are untouched.

Ranks that agree on it, split weights, preflight and a real shortage of memory are in
tests/training/memory/test_oom_split.py.
"""

from __future__ import annotations

import json

import pytest

from frameloom.checkpoint.reader import load_latest
from tests.faults.injection import VARIABLE
from tests.faults.runs import losses

pytestmark = pytest.mark.slow


def shortage(bucket: str | None, most: int) -> dict[str, str]:
    """Memory is out where more than `most` samples run at once."""
    place = {} if bucket is None else {"bucket": bucket}
    return {VARIABLE: json.dumps([{"point": "pass", "act": "memory", "samples_over": most, **place}])}


def find_bucket(world) -> str:
    """The bucket of the first step that has at least three samples."""
    from frameloom.training.feed import build_feed

    feed = build_feed(world.recipe(), bad_clips=world.folder / "bad.jsonl")
    plan = feed.plan(0)
    index = next(index for index in range(5) if len(plan.rows(index)) > 2)
    return feed.policy.buckets[plan.buckets[index]].name


def test_one_bucket_is_halved_and_all_numbers_stay(warm, tally, world):
    path, bucket = str(world.write_recipe()), find_bucket(world)
    tally.inject()
    first = warm.command("train", path, "--name", "short", "--train.steps", "4", env=shortage(bucket, 2))
    assert warm.wait(first) == 0, first.output
    assert f"samples of bucket {bucket} do not fit in memory" in first.output
    assert first.output.count("do not fit in memory") == 1, "others were touched"
    saved = load_latest(world.folder / "short" / "checkpoints")
    assert saved is not None and saved.state["halved"] == {bucket: 2}
    again = warm.command("train", path, "--name", "short", env=shortage(bucket, 2))
    assert warm.wait(again) == 0, again.output
    assert "do not fit in memory" not in again.output, "the resumed run had to learn it again"
    whole = warm.command("train", path, "--name", "whole")
    assert warm.wait(whole) == 0, whole.output
    assert losses(world.folder / "short") == pytest.approx(losses(world.folder / "whole"), rel=1e-6)


def test_where_not_even_one_fits_there_is_advice(warm, tally, world):
    tally.inject()
    child = warm.command("train", str(world.write_recipe()), env=shortage(None, 0))
    assert warm.wait(child) == 2, child.output
    assert "not even one sample fits in memory" in child.output and "train.recompute" in child.output


def test_without_halving_the_run_would_end(warm, world):
    """The control."""
    child = warm.command("train", str(world.write_recipe()), "--train.oom_split", "false", env=shortage(None, 2))
    assert warm.wait(child) == 2 and "train.oom_split is false" in child.output, child.output
