"""Attention of heads as projections give them, rotated or not, and diffusers' layers through the same door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor

import frameloom
from frameloom.core.random import stream
from frameloom.models.layers.attention import attention
from frameloom.models.layers.attention.attention import RotaryAttention, attend_tokens
from frameloom.models.layers.attention.diffusers_processor import AttendProcessor
from frameloom.models.layers.positions import rotary_table, rotate


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "test attention"))


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def test_heads_are_attended_one_by_one_and_joined_in_order() -> None:
    q, k, v = draw(2, 5, 3, 8, seed=0), draw(2, 7, 3, 8, seed=1), draw(2, 7, 3, 8, seed=2)
    mixed = attend_tokens(q, k, v)
    alone = [F.scaled_dot_product_attention(q[:, :, h], k[:, :, h], v[:, :, h]) for h in range(3)]
    assert difference(mixed, torch.cat(alone, dim=-1)) < 1e-6
    assert difference(mixed, torch.cat(alone[::-1], dim=-1)) > 0.1


def test_a_masked_key_is_not_seen() -> None:
    q, k, v = draw(1, 5, 2, 8, seed=0), draw(1, 7, 2, 8, seed=1), draw(1, 7, 2, 8, seed=2)
    mask = torch.arange(7)[None, None, None] < 6
    assert difference(attend_tokens(q, k, v, mask), attend_tokens(q, k[:, :6], v[:, :6])) < 1e-6
    assert difference(attend_tokens(q, k, v, mask), attend_tokens(q, k, v)) > 1e-2


@pytest.mark.parametrize("parts", [0, 2])
def test_queries_and_keys_are_turned_and_values_are_not(parts: int) -> None:
    q, k, v = (draw(1, 6, 2, 8, seed=seed) for seed in range(3))
    table = rotary_table(torch.arange(6.0)[:, None], (8,), 100.0)
    attention = RotaryAttention(parts=parts)
    expected = attend_tokens(rotate(q, table, parts=parts), rotate(k, table, parts=parts), v)
    assert torch.equal(attention(q, k, v, table), expected)
    assert torch.equal(attention(q, k, v), attend_tokens(q, k, v))
    assert difference(attention(q, k, v), expected) > 1e-2


def test_heads_of_other_precisions_meet_in_that_of_the_values() -> None:
    q, k, v = (draw(1, 6, 2, 8, seed=seed) for seed in range(3))
    table = rotary_table(torch.arange(6.0)[:, None], (8,))
    assert RotaryAttention()(q, k, v.bfloat16(), table).dtype == torch.bfloat16


def test_projections_have_the_published_names() -> None:
    keys = set(attention.Attention(8, 2, bias=False).state_dict())
    assert keys == {"to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight", "to_out.0.bias"}


@pytest.mark.parametrize("has_context", [False, True])
def test_a_unet_layer_gives_what_diffusers_gives(has_context: bool) -> None:
    layer = Attention(query_dim=16, cross_attention_dim=12 if has_context else None, heads=2, dim_head=8).eval()
    x, context = draw(2, 9, 16), draw(2, 5, 12) if has_context else None
    with torch.no_grad():
        layer.set_processor(AttnProcessor2_0())
        expected = layer(x, encoder_hidden_states=context)
        layer.set_processor(AttendProcessor())  # type: ignore[arg-type]
        assert difference(layer(x, encoder_hidden_states=context), expected) < 1e-6
    assert difference(x, expected) > 1e-2


def test_an_autoencoder_layer_gives_what_diffusers_gives() -> None:
    layer = Attention(
        query_dim=16, heads=1, dim_head=16, norm_num_groups=4, bias=True, residual_connection=True, eps=1e-6
    ).eval()
    x = draw(2, 16, 3, 4)
    with torch.no_grad():
        layer.set_processor(AttnProcessor2_0())
        expected = layer(x)
        layer.set_processor(AttendProcessor())  # type: ignore[arg-type]
        assert difference(layer(x), expected) < 1e-6
    assert difference(x, expected) > 1e-2


def test_attention_is_computed_in_one_place() -> None:
    """Every other module of the package calls `attend`; the planner only counts."""
    home, package = Path(attention.__file__), Path(frameloom.__file__).parent
    callers = [path.name for path in package.rglob("*.py") if _names_kernel(path.read_text())]
    assert sorted(callers) == [home.name, "shape_tensors.py"]


def _names_kernel(source: str) -> bool:
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return "scaled_dot_product_attention" in names
