"""Key maps on deferred tensors: the same results as on real ones, reading nothing before it is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError
from frameloom.weights.lazy_tensors import LazyTensors, defer_tensors, to_deferred, to_pending

SOURCES = {"qkv": torch.arange(24.0).reshape(6, 4), "norm": torch.arange(4.0), "conv": torch.ones(2, 3, 1, 1).half()}


def rearrange(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What key maps do: split, join, re-order, fold, cast, fill."""
    q, k, v = tensors["qkv"].chunk(3)
    index = torch.tensor([3, 1, 2, 0])
    return {
        "joined": torch.cat([v, k]),
        "part": tensors["qkv"][1:3],
        "ordered": q.unflatten(1, (2, 2))[:, torch.tensor([1, 0])].flatten(1),
        "by index": tensors["norm"][index],
        "linear": tensors["conv"].squeeze(-1).squeeze(-1).float(),
        "turned": q.t().contiguous().clone(),
        "wider": torch.cat([q, q.new_zeros(2, 3)], dim=1),
        "same": tensors["norm"],
        "mean": torch.stack([k, v]).mean(0),
    }


def counting(tensors: dict[str, Tensor]) -> tuple[LazyTensors, list[str]]:
    read: list[str] = []

    def load(name: str) -> Tensor:
        read.append(name)
        return tensors[name].clone()

    lazy = defer_tensors(tensors)
    pending = {name: replace(one, load=lambda name=name: load(name)) for name, one in lazy.pending.items()}
    return LazyTensors(pending, tied={"tied": "norm"}), read


def test_a_key_map_gives_the_same_numbers_and_reads_late():
    lazy, read = counting(SOURCES)
    expected = rearrange(SOURCES)
    pending = to_pending(rearrange(to_deferred(lazy)), where="test")
    assert read == [] and list(pending) == list(expected)
    for name, tensor in expected.items():
        assert pending.pending[name].shape == tuple(tensor.shape) and pending.pending[name].dtype == tensor.dtype
        assert pending[name].equal(tensor)
    assert not pending["ordered"].equal(SOURCES["qkv"][:2])
    read.clear()
    assert pending["linear"].shape == (2, 3) and read == ["conv"]


def test_a_model_on_the_meta_device_takes_and_gives_deferred_tensors():
    lazy, read = counting({"weight": torch.randn(3, 4), "bias": torch.ones(3), "norm": torch.ones(1)})
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    given = to_deferred(lazy)
    assert set(given) == {"weight", "bias", "norm", "tied"}
    model.load_state_dict({name: given[name] for name in ("weight", "bias")}, assign=True)
    out = to_pending({name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, where="test")
    assert read == [] and out["weight"].equal(lazy["weight"])


def test_what_cannot_be_deferred_is_an_error():
    given = to_deferred(defer_tensors(SOURCES))
    with pytest.raises(TypeError, match="in place"):
        given["norm"].add_(1)
    with pytest.raises(TypeError, match="not on the numbers"):
        given["norm"].sum().item()
    with pytest.raises(TypeError, match="not on the numbers"):
        given["norm"].equal(given["norm"])
    with pytest.raises(CheckpointError, match="'x' got no numbers"):
        to_pending({"x": torch.ones(2, device="meta")}, where="test")
