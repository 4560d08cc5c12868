"""Sums of gradients and owners of optimizer state, in a group of one; several processes are in test_equivalence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from frameloom.config.schema.optim import OptimSection
from frameloom.core.random import stream
from frameloom.distributed.fsdp import (
    add_up_gradients,
    apply_fsdp,
    choose_owners,
    match_fsdp_rounding,
    scale_gradients,
    shard_state,
)
from frameloom.training.optim.optimizer import (
    allocate_state,
    build_optimizer,
    optimizer_tensors,
    params_by_name,
    trained_names,
)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def make_params(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = stream(0, "params")
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_gradients_come_back_in_their_shapes_whatever_the_pieces(group, most):
    params = make_params((3, 2), (5,), (), (4, 1))
    params[3] = nn.Parameter(params[3].to(torch.float64))
    grads = [torch.full_like(param, float(number + 1)) for number, param in enumerate(params)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    params[1].grad = None
    add_up_gradients(params, group, most=most)
    scale_gradients(params, 0.5)
    assert params[1].grad is None, "a parameter that nobody used must keep no gradient"
    for number in (0, 2, 3):
        found = params[number].grad
        assert found is not None and torch.equal(found, grads[number] * 0.5)


def test_owners_have_about_equally_much_and_are_chosen_alike_everywhere():
    sizes = {f"block.{number}.{kind}": size for number in range(20) for kind, size in (("weight", 900), ("bias", 30))}
    owners = choose_owners(sizes, 3)
    loads = [sum(size for name, size in sizes.items() if owners[name] == owner) for owner in range(3)]
    assert max(loads) - min(loads) <= 900 and sum(loads) == sum(sizes.values())
    assert owners == choose_owners(dict(reversed(list(sizes.items()))), 3)


@pytest.mark.parametrize("name", ["adamw", "came", "muon"])
def test_a_process_keeps_state_of_its_own_weights_alone(group, name):
    """Number 1 of two; the sending that follows a step is left out, as there is nobody to send to."""
    params = dict(zip("abcd", make_params((6, 4), (6, 4), (6,), (6,)), strict=True))
    optimizer = build_optimizer(params.items(), OptimSection(name=name, lr=1e-2), {"a", "b"})
    shard_state(optimizer, params_by_name(optimizer), group, index=1, ranks=[0, 0], allocate=allocate_state)
    own = trained_names(optimizer)
    assert 0 < len(own) < 4
    held = {key.partition(".")[2] for key in optimizer_tensors(optimizer, own) if "." in key}
    assert held == set(own)


def test_more_processes_than_weights_leave_some_without_state(group):
    params = dict(zip("ab", make_params((6, 4), (6,)), strict=True))
    optimizer = build_optimizer(params.items(), OptimSection(lr=1e-2))
    shard_state(optimizer, params_by_name(optimizer), group, index=3, ranks=[0, 0, 0, 0], allocate=allocate_state)
    assert trained_names(optimizer) == [] and optimizer_tensors(optimizer, []) == {}


class TwiceModulated(nn.Module):
    """Uses the vector that all blocks are given in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x_BD: Tensor, *, vec_BD: Tensor) -> Tensor:
        return x_BD * self.scale(vec_BD).tanh() + self.shift(vec_BD)


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(TwiceModulated() for _ in range(3))
        generator = stream(0, "small model")
        for param in self.parameters():
            nn.init.normal_(param, std=0.3, generator=generator)

    def forward(self, x_BD: Tensor) -> Tensor:
        vec_BD = self.embed(x_BD)
        for block in self.blocks:
            x_BD = block(x_BD, vec_BD=vec_BD)
        return x_BD


def gradients(model: nn.Module) -> list[Tensor]:
    torch.autograd.backward(model(torch.randn(8, 16, generator=stream(0, "x"))).square().sum())
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def test_one_process_adds_gradients_in_the_order_of_apply_fsdp(group):
    split, alone, plain = SmallModel(), SmallModel(), SmallModel()
    apply_fsdp(split, list(split.blocks), DeviceMesh.from_group(group, "cpu"), keep_gathered=False)
    match_fsdp_rounding(alone, list(alone.blocks))
    wanted = gradients(split)
    assert all(map(torch.equal, gradients(alone), wanted))
    assert not all(map(torch.equal, gradients(plain), wanted)), "the order makes no difference here: nothing is tested"
