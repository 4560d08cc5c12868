"""Skipped blocks: what they add, what is measured, and that nothing of them stays."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor

from frameloom.sampling.batch import measure_cache
from frameloom.sampling.block_cache import CacheCount, skipping_blocks
from tests.sampling.conftest import MODELS, PROMPT, Load, make_frames


@pytest.mark.parametrize("name", MODELS)
def test_skipping_blocks_is_measured_and_leaves_no_trace(load: Load, name: str) -> None:
    sampler = load(name, steps=8, cache_threshold=0.12)
    report = measure_cache(sampler, sampler.request(PROMPT, 1))
    skipped, error = re.search(r"(\d+)% of all blocks skipped.*latents off by ([\d.]+)%", report).groups()
    assert 0 < int(skipped) < 100 and 0 < float(error) < 50
    assert not np.array_equal(make_frames(sampler), make_frames(sampler, cache_threshold=0.0))
    none = measure_cache(sampler, sampler.request(PROMPT, 1, cache_threshold=1e-9))
    assert ": 0% of all blocks skipped" in none and "latents off by 0.00%, frames inf dB" in none
    blocks = sampler.denoiser.model.blocks()
    assert all("forward" not in vars(block) for block in blocks)


def test_a_skipped_block_adds_what_it_added_before() -> None:
    layer = torch.nn.Linear(4, 4)
    given, count = torch.ones(2, 4), CacheCount()

    class Block(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x + layer(x), 2 * y

    real = Block()
    with torch.no_grad(), skipping_blocks([real], 0.1, count):
        first = real(given, given)
        near = real(1.05 * given, given)
        far = real(2 * given, given)
    assert count.calls == 3 and count.skipped == 1
    torch.testing.assert_close(near[0], 1.05 * given + (first[0] - given))
    assert torch.equal(far[0], real(2 * given, given)[0])
