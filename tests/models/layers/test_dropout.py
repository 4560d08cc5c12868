"""Dropout by keys: B batch, N tokens, D width."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from frameloom.distributed.sequence_parallel import SequenceGroup
from frameloom.models.layers.dropout import KeyedDropout, draw_kept, dropout_keys, has_dropout
from frameloom.models.layers.mlp import FeedForward

SEEDS = torch.from_numpy(np.array([3, 2**64 - 5], dtype=np.uint64).view(np.int64))
SHAPE = (2, 50, 40)
SHARE = 0.3


def kept(seeds: Tensor = SEEDS, part: int = 0, site: int = 0, share: float = SHARE) -> Tensor:
    return draw_kept(torch.empty(SHAPE), dropout_keys(seeds, part, SHAPE[1]), site, share)


def test_as_many_are_kept_as_should_be_and_the_mean_stays() -> None:
    layer = KeyedDropout(SHARE)
    x = torch.ones(2, 500, 400, requires_grad=True)
    made = layer(x, dropout_keys(SEEDS, 0, 500))
    rate = float((made != 0).float().mean())
    assert abs(rate - (1 - SHARE)) < 5 * (SHARE * (1 - SHARE) / x.numel()) ** 0.5
    assert torch.equal(made.detach().unique(), torch.tensor([0.0, 1 / (1 - SHARE)]))
    made.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, made.detach())


def test_masks_of_samples_parts_sites_and_seeds_have_nothing_in_common() -> None:
    other = torch.from_numpy(np.array([4, 2**64 - 6], dtype=np.uint64).view(np.int64))
    masks = [*kept(), *kept(part=1), *kept(site=1), *kept(other)]
    expected = (1 - SHARE) ** 2 + SHARE**2
    for one, another in combinations(masks, 2):
        agreement = float((one == another).float().mean())
        assert abs(agreement - expected) < 5 * (expected * (1 - expected) / one.numel()) ** 0.5
    for one, again in zip(masks[:2], kept(), strict=True):
        assert torch.equal(one, again)


def test_a_mask_depends_on_nothing_but_its_sample() -> None:
    swapped = kept(SEEDS.flip(0))
    assert torch.equal(swapped.flip(0), kept())
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert torch.equal(kept(), kept())
        many = kept()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(many, kept())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("degree", [2, 3, 4, 7])
def test_parts_of_a_sequence_have_their_rows_of_the_whole_mask(degree: int) -> None:
    """50 tokens: for 3, 4 and 7 ranks the last part is filled up; its filling is nowhere in the whole."""
    whole, length = kept(), SHAPE[1]
    parts = []
    for rank in range(degree):
        group = SequenceGroup(rank, degree)
        keys = dropout_keys(SEEDS, 0, length, group.find_first(length))
        parts.append(draw_kept(group.split(torch.empty(SHAPE)), keys, 0, SHARE))
    assert len({part.shape for part in parts}) == 1
    joined = torch.cat(parts, dim=1)
    assert torch.equal(joined[:, :length], whole)
    assert joined[:, length:].all()


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (1.0, 0.0)])
def test_none_and_all(share: float, expected: float) -> None:
    made = KeyedDropout(share)(torch.ones(SHAPE), dropout_keys(SEEDS, 0, SHAPE[1]))
    assert torch.equal(made, torch.full(SHAPE, expected))


def test_nothing_is_dropped_without_keys_or_outside_of_training() -> None:
    layer, x = KeyedDropout(SHARE), torch.ones(SHAPE)
    keys = dropout_keys(SEEDS, 0, SHAPE[1])
    assert layer(x, None) is x and layer.eval()(x, keys) is x
    assert not torch.equal(layer.train()(x, keys), x)
    assert has_dropout(layer) and not has_dropout(KeyedDropout(0.0))


def test_half_precision_stays_half() -> None:
    made = KeyedDropout(SHARE)(torch.ones(SHAPE, dtype=torch.bfloat16), dropout_keys(SEEDS, 0, SHAPE[1]))
    assert made.dtype == torch.bfloat16
    assert torch.equal(made != 0, kept())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers_drop_the_same_and_blocks_of_a_kind_share_a_graph() -> None:
    layers = [FeedForward(8, SHARE, drops_result=True) for _ in range(3)]
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        nonlocal graphs
        graphs += 1
        return graph

    x = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    run = torch.compile(FeedForward.forward, fullgraph=True, backend=count, dynamic=True)
    for part, layer in enumerate(layers):
        keys = dropout_keys(SEEDS, part, 50)
        compiled, plain = run(layer, x, keys), layer(x, keys)
        # Compiled code has another form of the activation.
        assert torch.equal(compiled == 0, plain == 0)
        assert torch.allclose(compiled, plain, atol=1e-6)
    assert graphs == 1


@pytest.mark.parametrize("share", [SHARE, 0.0])
def test_an_mlp_drops_behind_its_activation_and_its_result_as_published(share: float) -> None:
    layer = FeedForward(8, share, drops_result=True)
    x, keys = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0)), dropout_keys(SEEDS, 2, 50)
    hidden = torch.nn.functional.gelu(layer.get_submodule("net.0.proj")(x), approximate="tanh")
    for site, map_ in ((0, layer.net[2]), (1, torch.nn.Identity())):
        mask = draw_kept(hidden, keys, site, share)
        hidden = map_(hidden * mask / (1 - share))
    assert torch.allclose(layer(x, keys), hidden, atol=1e-6)
