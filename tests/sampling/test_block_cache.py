"""Skipped blocks: what they add, what is measured, and that nothing of them stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from frameloom.sampling.block_cache import CacheCount, skipping_blocks
from frameloom.sampling.jobs import measure_cache
from tests.sampling.conftest import MODELS, PROMPT, Load, make_frames


@pytest.mark.parametrize("name", MODELS)
def test_skipping_blocks_is_measured_and_leaves_no_trace(load: Load, name: str) -> None:
    sampler = load(name, steps=8, cache_threshold=0.12)
    report = measure_cache(sampler, sampler.request(PROMPT, 1))
    assert 0 < report.share_skipped < 1 and 0 < report.latent_error < 0.5
    assert "blocks skipped" in report.describe() and f"{report.latent_error:.2%}" in report.describe()
    assert not np.array_equal(make_frames(sampler), make_frames(sampler, cache_threshold=0.0))
    tiny_threshold = measure_cache(load(name, steps=8, cache_threshold=1e-9), sampler.request(PROMPT, 1))
    assert tiny_threshold.share_skipped == 0 == tiny_threshold.latent_error
    blocks = sampler.denoiser.family.blocks(sampler.denoiser.model)
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
