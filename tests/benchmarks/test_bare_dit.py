"""The bare DiT beside which shares of a product's rate are read."""

from __future__ import annotations

import pytest
import torch

from benchmarks.model import choose_bare, count_flops, list_batches, list_cases
from benchmarks.plain_models import BareDiT


def test_operations_are_those_of_the_formula() -> None:
    """Six for every weight and token; attention four of N^2 D forward, and ten backward, which computes scores anew."""
    bare = BareDiT(width=512, num_heads=4, batch=2, num_tokens=1024)
    assert bare.depth == 6 and bare.name == "a bare DiT, 6 blocks of 512 channels"
    per_block = 6 * 1024 * 12 * 512**2 + 14 * 1024**2 * 512 + 6 * 6 * 512**2
    assert bare.count_flops() == pytest.approx(2 * 6 * per_block, rel=0.01)


def test_it_is_like_the_model_beside_which_it_stands() -> None:
    for case in (*list_cases(), *list_batches()):
        bare = choose_bare(case, 1024)
        if case.family == "sdxl" or case.size == "tiny":
            assert bare is None
            continue
        assert bare is not None and bare.batch == case.batch
        assert 25e6 < 18 * bare.depth * bare.width**2 < 38e6
        assert 0.7 < bare.count_flops() / count_flops(case) < 1.4


def test_a_step_trains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    losses: list[float] = []
    right = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda loss: (losses.append(loss.item()), right(loss)))
    monkeypatch.setattr(BareDiT, "depth", 2)
    step = BareDiT(width=32, num_heads=2, batch=1, num_tokens=16).build_step()
    for _ in range(20):
        step()
    assert losses[-1] < losses[0]
