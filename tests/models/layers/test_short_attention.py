"""Attention over few keys: numbers and gradients of the formula, and when it is left to torch's kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.core.random import stream
from frameloom.models.layers import short_attention as module
from frameloom.models.layers.attention import attend
from tests.models.layers.fused_kernels import Seen

HEADS, WIDTH = 3, 8
NUM_KEYS = {"many keys": 65, "narrow heads": 17}


@pytest.fixture
def is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor."""
    monkeypatch.setattr(module, "_IS_FASTER", True)


def draw_heads(num_queries: int, num_keys: int, *, batch: int = 2, width: int = WIDTH) -> list[Tensor]:
    """Queries, keys and values [B, H, tokens, D], whose tokens lie in one piece as projections give them."""
    heads = []
    for seed, count in enumerate((num_queries, num_keys, num_keys)):
        drawn = torch.randn(batch, count, HEADS, width, generator=stream(seed, "test short attention"))
        heads.append(drawn.transpose(1, 2).requires_grad_())
    return heads


def find_gradients(made: Tensor, heads: list[Tensor]) -> tuple[Tensor, ...]:
    push = torch.randn(made.shape, generator=stream(3, "test short attention"), dtype=torch.float64)
    return torch.autograd.grad(made, heads, push.to(made.dtype))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(4, 4), (1, 1), (9, 5), (3, 16)])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_it_is_the_attention_of_the_formula(
    is_faster: None, batch: int, num_queries: int, num_keys: int, scale: float | None
) -> None:
    heads = draw_heads(num_queries, num_keys, batch=batch)
    exact = [part.detach().double().requires_grad_() for part in heads]
    with Seen() as seen:
        made = attend(*heads, scale=scale)
        found = find_gradients(made, heads)
    expected = F.scaled_dot_product_attention(*exact, scale=scale)
    assert seen.count == 0
    assert made.transpose(1, 2).is_contiguous()
    assert (made - expected).abs().max() < 1e-6
    for one, other in zip(found, find_gradients(expected, exact), strict=True):
        assert (one - other).abs().max() < 2e-6
    if num_keys > 1:
        wrong = F.scaled_dot_product_attention(*exact, scale=1.0)
        assert (made - wrong).abs().max() > 1e-2


def test_what_is_frozen_gets_no_gradient(is_faster: None) -> None:
    q, k, v = draw_heads(5, 4)
    expected = torch.autograd.grad(attend(q, k, v).square().sum(), v)[0]
    found = torch.autograd.grad(attend(q.detach(), k.detach(), v).square().sum(), v)[0]
    assert torch.equal(found, expected) and found.abs().max() > 0
    assert not attend(q.detach(), k.detach(), v.detach()).requires_grad


@pytest.mark.parametrize(
    "why", ["many queries", "many keys", "narrow heads", "a mask", "half precision", "autocast", "another processor"]
)
def test_all_else_is_left_to_the_kernel(is_faster: None, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    num_queries = 257 if why == "many queries" else 4
    heads = draw_heads(num_queries, NUM_KEYS.get(why, 4), width=64 if why == "many keys" else WIDTH)
    if why == "half precision":
        heads = [part.bfloat16() for part in heads]
    if why == "another processor":
        monkeypatch.setattr(module, "_IS_FASTER", False)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool) if why == "a mask" else None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"), Seen() as seen:
        attend(*heads, mask)
    assert seen.count == 1
