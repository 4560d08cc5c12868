"""Fused AdamW with less around it: what torch's own gives, to the bit, also where a parameter has no gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from frameloom.train.lean_adamw import LeanAdamW
from frameloom.train.optimizer import allocate_state, build_optimizer, optimizer_tensors, trained_names

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make_params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (33,), (4, 3, 2), (1,))]


def give_gradients(params: list[nn.Parameter], step: int, without: int | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for place, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator)
        param.grad = None if place == without else grad


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    mine, others = ours.state_dict(), theirs.state_dict()
    assert mine["state"].keys() == others["state"].keys()
    for index, state in others["state"].items():
        assert mine["state"][index].keys() == state.keys()
        assert all(torch.equal(mine["state"][index][name], value) for name, value in state.items())


@pytest.mark.parametrize("scale", [None, 3.0])
def test_every_step_is_that_of_torch(scale):
    ours, theirs = make_params(), make_params()
    lean = LeanAdamW([{"params": ours[:2]}, {"params": ours[2:], "weight_decay": 0.0}], **OPTIONS)
    plain = torch.optim.AdamW(
        [{"params": theirs[:2]}, {"params": theirs[2:], "weight_decay": 0.0}], fused=True, **OPTIONS
    )
    for step in range(12):
        without = 1 if step in (0, 5, 6) else None  # before there is state, and amid
        for params, optimizer in ((ours, lean), (theirs, plain)):
            give_gradients(params, step, without)
            optimizer.grad_scale = None if scale is None else torch.tensor(scale)
            optimizer.step()
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
        assert_same_state(lean, plain)
    assert [int(lean.state[param]["step"]) for param in ours] == [12, 9, 12, 12]


def test_it_goes_on_from_the_state_of_torch_and_torch_from_its():
    ours, theirs = make_params(), make_params()
    lean, plain = LeanAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    for step in range(6):
        if step == 3:
            states = copy.deepcopy(lean.state_dict()), copy.deepcopy(plain.state_dict())
            lean.load_state_dict(states[1])
            plain.load_state_dict(states[0])
        for params, optimizer in ((ours, lean), (theirs, plain)):
            give_gradients(params, step)
            optimizer.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert_same_state(lean, plain)


def test_hooks_run_once_whichever_way_a_step_goes():
    torch.optim.AdamW(make_params(), fused=True, **OPTIONS)  # torch puts its hooks around the class with the first one
    params, calls = make_params(), []
    lean = LeanAdamW(params, **OPTIONS)
    lean.register_step_post_hook(lambda *_: calls.append(1))
    for without in (None, 1, None):
        give_gradients(params, 0, without)
        lean.step()
    assert len(calls) == 3


def test_recipes_get_it_and_its_counters_are_saved_as_numbers_of_their_own():
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model.named_parameters(), lr=1e-3)
    assert isinstance(optimizer, LeanAdamW)
    allocate_state(optimizer)
    for _ in range(2):
        model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
        optimizer.step()
    found = optimizer_tensors(optimizer, trained_names(optimizer))
    assert float(found["step.weight"]) == float(found["step.bias"]) == 2.0
    assert found["step.weight"].shape == ()
