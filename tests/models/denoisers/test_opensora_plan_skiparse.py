"""Skiparse attention: which tokens see each other, what is padded, and that it costs what it promises."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from frameloom.core.random import stream
from frameloom.models.denoisers.base import build_fresh
from frameloom.models.denoisers.opensora_plan.config import SIZES, OpenSoraPlanConfig, Pattern
from frameloom.models.denoisers.opensora_plan.model import Block, OpenSoraT2V
from frameloom.models.denoisers.opensora_plan.skiparse import (
    SkiparseAttention,
    deal,
    gather,
    mask_filling,
    num_filled,
    turn_table,
)
from frameloom.models.layers.positions import rotate

CONFIG = OpenSoraPlanConfig(
    in_channels=4, context_in_dim=16, num_layers=4, num_attention_heads=2, attention_head_dim=12, sparse1d=True
)

build = partial(build_fresh, OpenSoraT2V)
LAYERS: dict[Pattern, int] = {"full": 0, "single": 2, "group": 3}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "test tensor", *shape))


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // leaf.element_size() for leaf in tree_leaves(result) if _has(leaf)]
        self.num_elements = max([self.num_elements, *sizes])
        return result


def _has(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided


@pytest.mark.parametrize("sparse_n", [2, 3, 4])
@pytest.mark.parametrize("pattern", ["single", "group"])
def test_gather_undoes_deal(pattern: Pattern, sparse_n: int) -> None:
    tokens = draw(2, 3 * sparse_n**2, 5)
    dealt = deal(tokens, pattern, sparse_n)
    assert dealt.shape == (2 * sparse_n, 3 * sparse_n, 5)
    assert torch.equal(gather(dealt, pattern, sparse_n), tokens)
    assert not torch.equal(gather(dealt.flip(0), pattern, sparse_n), tokens)


def test_sub_sequences_are_the_published_ones() -> None:
    tokens = torch.nn.functional.pad(torch.arange(45)[None], (0, num_filled(45, 4)), value=-1)
    assert tokens.shape == (1, 48)
    single, group = deal(tokens, "single", 4), deal(tokens, "group", 4)
    assert single[1].tolist() == [*range(1, 45, 4), -1]
    assert group[1].tolist() == [4, 5, 6, 7, 20, 21, 22, 23, 36, 37, 38, 39]
    assert group[3].tolist() == [12, 13, 14, 15, 28, 29, 30, 31, 44, -1, -1, -1]


def test_two_layers_connect_every_pair_of_tokens() -> None:
    sees = [torch.zeros(64, 64, dtype=torch.bool) for _ in range(2)]
    for matrix, pattern in zip(sees, ("single", "group"), strict=True):
        for row in deal(torch.arange(64)[None], pattern, 4):
            matrix[row[:, None], row] = True
        assert matrix.sum() == 64 * 16
    assert (sees[1].int() @ sees[0].int()).all()


@pytest.mark.parametrize("num_tokens", [5, 32, 45])
@pytest.mark.parametrize("pattern", ["single", "group"])
def test_it_equals_attention_with_a_mask_of_all_pairs(pattern: Pattern, num_tokens: int) -> None:
    """The dense form of the same thing, which training would have to pay for in full."""
    q, k, v = (draw(2, num_tokens, 2, 12, seed=seed) for seed in range(3))
    table = turn_table((1, 1, num_tokens), 12, (1.0, 1.0, 1.0))
    part_of = torch.arange(num_tokens) % 4 if pattern == "single" else torch.arange(num_tokens) // 4 % 4
    dense = part_of[:, None] == part_of
    heads = [rotate(part, table, parts=3) for part in (q, k)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (*heads, v)), attn_mask=dense
    )
    mask = mask_filling(pattern, 4, like_BNC=v.flatten(2))
    ours = SkiparseAttention(pattern, 4)(q, k, v, table, mask)
    full = SkiparseAttention("full", 4)(q, k, v, table)
    assert (ours - expected.transpose(1, 2).flatten(2)).abs().max() < 1e-5
    assert (ours - full).abs().max() > 1e-2


def attention_flops(config: OpenSoraPlanConfig, layer: int, num_tokens: int) -> int:
    """Self-attention of one sample, without its projections: 4 N^2 D, and 1 / sparse_n of it in a skiparse layer."""
    share = 1 if config.pattern(layer) == "full" else config.sparse_n
    return 4 * num_tokens**2 * config.hidden_size // share


def layer_flops(config: OpenSoraPlanConfig, layer: int, num_tokens: int, num_text: int) -> int:
    """The forward pass of a whole block for one sample: self-attention, cross-attention, MLP."""
    width = config.hidden_size
    self_projections = 8 * num_tokens * width**2
    cross = 4 * (num_tokens + num_text) * width**2 + 4 * num_tokens * num_text * width
    mlp = 16 * num_tokens * width**2
    return attention_flops(config, layer, num_tokens) + self_projections + cross + mlp


@pytest.mark.parametrize("num_tokens", [512, 500])
@pytest.mark.parametrize("pattern", ["full", "single", "group"])
def test_measured_flops_of_a_layer_are_those_of_the_formula(pattern: Pattern, num_tokens: int) -> None:
    """The kernel that PyTorch can count: plain matrix products."""
    layer, num_text = LAYERS[pattern], 6
    block = build(CONFIG).transformer_blocks[layer]
    x, text, modulation = draw(2, num_tokens, 24), draw(2, num_text, 24), draw(2, 6, 24)
    table = turn_table((1, 1, num_tokens), 12, (1.0, 1.0, 1.0))
    mask = mask_filling(pattern, 4, like_BNC=x)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        block(x, text, modulation, table, mask)
    expected = 2 * layer_flops(CONFIG, layer, num_tokens, num_text)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.05)
    # Control: the attention is so large a share of this layer that another pattern would be far off.
    other = 2 * layer_flops(CONFIG, LAYERS["single" if pattern == "full" else "full"], num_tokens, num_text)
    assert counter.get_total_flops() != pytest.approx(other, rel=0.3)


@pytest.mark.parametrize(("pattern", "layer"), LAYERS.items())
def test_flops_of_a_released_layer_on_a_whole_clip(pattern: Pattern, layer: int) -> None:
    """93 frames of 352x640: 21120 tokens. Counted on shapes alone, as the accelerator's kernel would be."""
    config, num_tokens, num_text = SIZES["2b"], 24 * 22 * 40, 512
    with torch.device("meta"):
        block = Block(config, layer)
        x, text = torch.empty(1, num_tokens, 2304), torch.empty(1, num_text, 2304)
        table = torch.empty(num_tokens, 1, 48, dtype=torch.complex64)
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            block(x, text, torch.empty(1, 6, 2304), table)
    assert counter.get_total_flops() == pytest.approx(layer_flops(config, layer, num_tokens, num_text), rel=0.05)
    share = 1 if pattern == "full" else 4
    assert attention_flops(config, layer, num_tokens) * share == 4 * num_tokens**2 * 2304


def largest_tensor_of(model: OpenSoraT2V, *, backward: bool) -> int:
    frames, side = 8, 40
    noisy, text = draw(1, 4, frames, side, side), draw(1, 6, 16)
    with LargestTensor() as largest:
        prediction = model(noisy, torch.tensor([0.009]), {"text": text, "text_mask": torch.ones(1, 6)})
        if backward:
            prediction.square().mean().backward()
    return largest.num_elements


def test_nothing_as_large_as_all_pairs_of_tokens_is_made() -> None:
    """3200 tokens: a mask of all pairs would hold 10 million numbers, the largest tensor here is the MLP's."""
    num_tokens, config = 8 * 20 * 20, replace(CONFIG, num_layers=4)
    largest = largest_tensor_of(build(config), backward=True)
    assert largest <= num_tokens * 4 * config.hidden_size
    assert largest < num_tokens**2 / 30


def test_the_watch_for_large_tensors_sees_a_mask_of_all_pairs() -> None:
    with LargestTensor() as largest:
        torch.ones(300)[:, None] == torch.ones(300)  # noqa: B015 - only its size matters
    assert largest.num_elements == 300**2
