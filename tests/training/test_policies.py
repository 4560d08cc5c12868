"""A recipe chooses a bucket policy and trains with it."""

from __future__ import annotations

import json

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.training.train import train

RATIO_TOKENS = "{video_sample_size: 32, image_sample_size: 64, token_sample_size: 64, video_sample_n_frames: 9"
POLICIES = {
    "fixed": "{height: 32, width: 32, frames: 5, batch: 4}",
    "multi_aspect": "{sizes: [[32, 32], [32, 48]], frames: 5, batch: 4}",
    "grouped": "{num_frames: 9, max_hxw: 4096, hw_stride: 16, train_fps: 8, batch: 4, too_long_factor: 50}",
    "ratio_tokens": RATIO_TOKENS + ", train_batch_size: 2, training_with_video_token_length: true, "
    "random_hw_adapt: true, random_frame_crop: true}",
    "token_budget": "{tokens: 64}",
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_trains_with_the_policy(world, policy: str) -> None:
    words = ["--data.policy", policy, f"--data.{policy}", POLICIES[policy], "--train.steps", "2"]
    if policy != "token_budget":
        words += ["--data.buckets", "null"]
    train(load_recipe(world.write_recipe(), words))
    lines = [json.loads(line) for line in (world.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {1, 2}
    assert all(line["train/loss"] > 0 for line in lines if "train/loss" in line)
