"""Frozen models that wait in host memory. A second copy on the CPU stands for the one on a device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from frameloom.core.random import stream
from frameloom.training.memory import encoder_offload
from frameloom.training.memory.encoder_offload import OffloadedModule, offload, offload_encoders

CPU = torch.device("cpu")


class CountedModule(OffloadedModule):
    num_copies = 0

    def _enter(self) -> None:
        super()._enter()
        self.num_copies += 1


@pytest.fixture(autouse=True)
def count_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_offload, "OffloadedModule", CountedModule)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("scale", torch.tensor(2.0))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=stream(0, "weights")))
        self.requires_grad_(False)
        self.seen: list[int] = []

    def encode(self, x: Tensor) -> Tensor:
        self.seen.append(self.layer.weight.data_ptr())
        if x.shape[-1] != 3:
            raise ValueError("wrong width")
        return self.scale * self.layer(x)

    def encode_twice(self, x: Tensor) -> Tensor:
        return self.encode(x) + self.encode(x)


def test_weights_are_elsewhere_only_while_a_method_runs() -> None:
    model, x = Encoder(), torch.ones(4, 3)
    expected, before = model.encode(x), model.layer.weight.clone()
    offloaded = offload(model, model, ("encode",), CPU)
    assert isinstance(offloaded, CountedModule)
    home = model.layer.weight.data_ptr()
    assert torch.equal(model.encode(x), expected)
    assert model.seen[-1] != home == model.layer.weight.data_ptr()
    assert torch.equal(model.layer.weight, before) and offloaded.num_copies == 1
    with pytest.raises(ValueError, match="wrong width"):
        model.encode(torch.ones(4, 5))
    assert model.layer.weight.data_ptr() == home


def test_calls_inside_each_other_are_one_copy() -> None:
    model, x = Encoder(), torch.ones(4, 3)
    offloaded = offload(model, model, ("encode", "encode_twice"), CPU)
    assert isinstance(offloaded, CountedModule)
    model.encode_twice(x)
    assert offloaded.num_copies == 1 and len(set(model.seen)) == 1
    model.encode(x)
    assert offloaded.num_copies == 2


def test_a_model_that_learns_is_refused() -> None:
    model = Encoder().requires_grad_(True)
    with pytest.raises(ValueError, match="frozen"):
        OffloadedModule(model, CPU)


def test_on_the_host_there_is_nothing_to_move() -> None:
    model = Encoder()
    weight = model.layer.weight.data_ptr()
    assert offload_encoders(model, [], CPU) == []
    assert model.layer.weight.data_ptr() == weight
