"""Linear layers through oneDNN: numbers and gradients of the formula, and when they are torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from frameloom.core.random import stream
from frameloom.models.layers import linear as module
from frameloom.models.layers import native
from frameloom.models.layers.linear import Linear, linear, multiply_rows

WIDTH, MADE = 48, 80


class Seen(TorchDispatchMode):
    """Counts products of oneDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "test linear"))


@pytest.fixture
def wants_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor, and for small products, too."""
    monkeypatch.setattr(module, "_WANTS_ONEDNN", True)
    monkeypatch.setattr(module, "_LEAST_WORK", 1)
    monkeypatch.setattr(native, "_HAS_PRODUCTS", True)


def list_weights() -> dict[str, Tensor]:
    """In one piece, some rows, some columns, and the other way round."""
    large = draw(2 * MADE, 2 * WIDTH, seed=1)
    return {
        "whole": draw(MADE, WIDTH, seed=1),
        "rows": draw(2 * MADE, WIDTH, seed=1)[MADE:],
        "columns": large[:MADE, WIDTH:],
        "turned": draw(WIDTH, MADE, seed=1).t(),
        "turned columns": draw(2 * WIDTH, 2 * MADE, seed=1)[WIDTH:, MADE:].t(),
    }


@pytest.mark.parametrize("kind", list_weights())
@pytest.mark.parametrize("has_bias", [True, False])
def test_numbers_and_gradients_are_those_of_the_formula(wants_onednn: None, kind: str, has_bias: bool) -> None:
    # Rows of a larger tensor, and a gradient that lies another way.
    x, weight = draw(3, 7, 2 * WIDTH)[..., WIDTH:], list_weights()[kind]
    push = draw(7, 3, MADE, seed=2).transpose(0, 1)
    inputs = [x, weight, *([draw(MADE, seed=3)] if has_bias else [])]
    ours = [part.requires_grad_() for part in inputs]
    exact = [part.detach().double().requires_grad_() for part in inputs]
    with Seen() as seen:
        made = linear(*ours)
        found = [made, *torch.autograd.grad(made, ours, push)]
    assert seen.count == 2
    expected = F.linear(*exact)
    for one, other in zip(found, [expected, *torch.autograd.grad(expected, exact, push.double())], strict=True):
        assert one.shape == other.shape and (one - other).abs().max() <= 2e-6 * other.abs().max()
    with torch.no_grad():
        assert torch.equal(linear(*ours), made)
        weight[0, 0] += 1
        assert (linear(*ours) - made).abs().max() > 1e-3


def test_what_is_frozen_gets_no_gradient(wants_onednn: None) -> None:
    layer, x = Linear(WIDTH, MADE), draw(5, WIDTH).requires_grad_()
    layer.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    with Seen() as seen:
        made = layer(x.detach())
    assert seen.count == 1 and not made.requires_grad


@pytest.mark.skipif(native.load_kernels() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("num_rows", [1, 9, 1152, 1153, 2500])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (12, 32), (11, 31), (13, 33), (200, 130), (97, 300)])
def test_the_gradient_of_a_weight_is_that_of_the_formula(
    wants_onednn: None, num_rows: int, height: int, width: int
) -> None:
    # Columns of a larger tensor, and rows that lie another way.
    x, push = draw(num_rows, 2 * width)[:, width:], draw(height, num_rows, seed=2).t()
    found = multiply_rows(push, x)
    expected = push.double().t() @ x.double()
    # A gradient that lies otherwise than its weight would be copied before it is added up.
    assert found.is_contiguous()
    assert (found - expected).abs().max() <= 4e-6 * expected.abs().max()
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(multiply_rows(push.contiguous(), x.contiguous()), found)
    finally:
        torch.set_num_threads(before)


def test_other_numbers_are_multiplied_by_torch(wants_onednn: None) -> None:
    layer, x = Linear(WIDTH, MADE), draw(5, WIDTH)
    with Seen() as seen:
        layer(x)
        assert seen.count == 1
        assert layer.double()(x.double()).dtype == torch.float64
        layer.float()
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        layer.to("meta")(x.to("meta"))
    assert seen.count == 1


def test_small_products_and_other_processors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, large, small = Linear(1024, 256), draw(512, 1024), draw(511, 1024)
    monkeypatch.setattr(module, "_WANTS_ONEDNN", True)
    with Seen() as seen:
        layer(large)
        assert seen.count == 1
        assert torch.equal(layer(small), F.linear(small, layer.weight, layer.bias))
        monkeypatch.setattr(module, "_WANTS_ONEDNN", False)
        assert torch.equal(layer(large), F.linear(large, layer.weight, layer.bias))
    assert seen.count == 1


def test_compiled_code_multiplies_with_it_too(wants_onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_WEIGHT", WIDTH * MADE)
    torch.compiler.reset()
    layer, small = Linear(WIDTH, MADE), Linear(WIDTH, MADE - 1)
    compiled = [torch.compile(one.forward, fullgraph=True, dynamic=True, backend="aot_eager") for one in (layer, small)]
    for num_rows in (5, 9):
        x = draw(2, num_rows, WIDTH).requires_grad_()
        inputs = [x, layer.weight, layer.bias]
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            made = [step(x) for step in compiled]
            found = torch.autograd.grad(made[0].square().sum(), inputs)
        assert sum(event.name == "mkldnn::_linear_pointwise" for event in seen.events()) == 2
        assert torch.equal(made[0], layer(x))
        for one, other in zip(found, torch.autograd.grad(layer(x).square().sum(), inputs), strict=True):
            assert torch.equal(one, other)
