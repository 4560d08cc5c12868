"""Linear layers through oneDNN: numbers and gradients of the formula, and when they are torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from frameloom.core import device
from frameloom.core.random import stream
from frameloom.models.layers import linear as module
from frameloom.models.layers.linear import Linear, choose_product, linear

WIDTH, MADE = 48, 80


class Seen(profile):
    """Counts products of oneDNN."""

    def __init__(self) -> None:
        super().__init__(activities=[ProfilerActivity.CPU])

    @property
    def count(self) -> int:
        return sum(event.name == "mkldnn::_linear_pointwise" for event in self.events() or [])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "test linear"))


@pytest.fixture
def wants_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor, and for small products, too."""
    monkeypatch.setattr(module, "_product", module.PRODUCTS["onednn"])
    monkeypatch.setattr(module, "_LEAST_WORK", 1)


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
    assert seen.count == 3
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


def test_other_numbers_are_multiplied_by_torch(wants_onednn: None) -> None:
    layer, x = Linear(WIDTH, MADE), draw(5, WIDTH)
    with Seen() as seen:
        layer(x)
    assert seen.count == 1
    with Seen() as seen:
        assert layer.double()(x.double()).dtype == torch.float64
        layer.float()
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        layer.to("meta")(x.to("meta"))
    assert seen.count == 0


def test_small_products_and_the_choice_of_torch_equal_torch_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, large, small = Linear(1024, 256), draw(512, 1024), draw(511, 1024)
    monkeypatch.setattr(module, "_product", module.PRODUCTS["onednn"])
    with Seen() as seen:
        layer(large)
    assert seen.count == 1
    with Seen() as seen:
        assert torch.equal(layer(small), F.linear(small, layer.weight, layer.bias))
        monkeypatch.setattr(module, "_product", module.PRODUCTS["torch"])
        assert torch.equal(layer(large), F.linear(large, layer.weight, layer.bias))
    assert seen.count == 0


@pytest.mark.parametrize(
    ("vendor", "flags", "limit", "expected"),
    [
        ("AuthenticAMD", {"avx2", "avx512f"}, None, "onednn"),
        ("AuthenticAMD", {"avx2", "avx512f"}, "AVX2", "torch"),  # oneDNN may not use it either
        ("AuthenticAMD", {"avx2"}, None, "torch"),
        ("GenuineIntel", {"avx2", "avx512f"}, None, "torch"),
        (None, {"avx512f"}, None, "torch"),  # no x86: nothing is known of its maker
    ],
)
def test_onednn_is_for_processors_on_which_only_it_uses_avx512(
    monkeypatch: pytest.MonkeyPatch, vendor: str | None, flags: set[str], limit: str | None, expected: str
) -> None:
    lines = {"vendor_id": frozenset({"vendor_id", ":", vendor} if vendor else ()), "flags": frozenset(flags)}
    for owner in (module, device):
        monkeypatch.setattr(owner, "read_cpuinfo", lines.__getitem__)
    monkeypatch.setenv(device.ISA_LIMIT, limit or "")
    if limit is None:
        monkeypatch.delenv(device.ISA_LIMIT)
    assert choose_product() == expected
    monkeypatch.undo()


def test_compiled_code_multiplies_with_it_too(wants_onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_WEIGHT", WIDTH * MADE)
    torch.compiler.reset()
    layer, small = Linear(WIDTH, MADE), Linear(WIDTH, MADE - 1)
    compiled = [torch.compile(one.forward, fullgraph=True, dynamic=True, backend="aot_eager") for one in (layer, small)]
    for num_rows in (5, 9):
        x = draw(2, num_rows, WIDTH).requires_grad_()
        inputs = [x, layer.weight, layer.bias]
        with Seen() as seen:
            made = [step(x) for step in compiled]
            found = torch.autograd.grad(made[0].square().sum(), inputs)
        assert seen.count == 3
        assert torch.equal(made[0], layer(x))
        for one, other in zip(found, torch.autograd.grad(layer(x).square().sum(), inputs), strict=True):
            assert torch.equal(one, other)
