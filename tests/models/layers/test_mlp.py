"""Two linear maps and a GELU: numbers and gradients of the formula, and which form of GELU is used where."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.random import stream
from frameloom.models.layers.linear import Linear
from frameloom.models.layers.mlp import are_plain, gelu, run_mlp, sigmoid_gelu
from tests.models.denoisers.contract import SavedBytes

WIDTH, INNER = 24, 96


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=stream(seed, "test gelu"))


def build() -> tuple[nn.Linear, nn.Linear]:
    up, down = Linear(WIDTH, INNER), Linear(INNER, WIDTH)
    with torch.no_grad():
        for seed, parameter in enumerate([*up.parameters(), *down.parameters()]):
            parameter.copy_(draw(*parameter.shape, seed=seed + 1, scale=0.3))
    return up, down


def formula(x: Tensor, up: Tensor, bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, bias), approximate="tanh"), down, down_bias)


def gradients(made: Tensor, inputs: list[Tensor], push: Tensor) -> list[Tensor]:
    return [made.detach(), *torch.autograd.grad(made, inputs, push.to(made.dtype))]


def test_numbers_and_gradients_are_those_of_the_formula() -> None:
    up, down = build()
    # As a part of a larger tensor.
    x, push = draw(3, 5, 2 * WIDTH)[..., WIDTH:].requires_grad_(), draw(3, 5, WIDTH, seed=9)
    inputs = [x, *up.parameters(), *down.parameters()]
    exact_inputs = [part.detach().double().requires_grad_() for part in inputs]
    assert are_plain(x, up, down)
    ours = gradients(run_mlp(x, up, down), inputs, push)
    exact = gradients(formula(*exact_inputs), exact_inputs, push)
    for one, other in zip(ours, exact, strict=True):
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()
    with torch.no_grad():
        assert torch.equal(run_mlp(x, up, down), ours[0])
        up.bias[0] += 0.5
        assert (run_mlp(x, up, down) - ours[0]).abs().max() > 1e-3


def test_no_rows_are_fine_too() -> None:
    """As of a process that has no text of a sequence."""
    up, down = build()
    made = run_mlp(draw(4, 0, WIDTH), up, down)
    assert made.shape == (4, 0, WIDTH)
    made.sum().backward()
    assert up.weight.grad is not None and not up.weight.grad.any()


def test_gelu_is_exact_far_from_zero() -> None:
    points = torch.linspace(-12, 12, 4001)
    ours, exact = points.clone().requires_grad_(), points.double().requires_grad_()
    made = sigmoid_gelu(ours)
    expected = F.gelu(exact, approximate="tanh")
    for mine, theirs in zip(
        gradients(made, [ours], torch.ones(4001)), gradients(expected, [exact], torch.ones(4001)), strict=True
    ):
        assert (mine - theirs).abs().max() <= 2e-6
    assert (made - F.gelu(points)).abs().max() > 1e-4


def test_compiled_gelu_has_the_same_numbers_and_gradients() -> None:
    torch.compiler.reset()
    compiled = torch.compile(gelu, fullgraph=True, backend="eager")
    points, push = torch.linspace(-12, 12, 4001), torch.ones(4001)
    ours, plain = points.clone().requires_grad_(), points.clone().requires_grad_()
    mine = gradients(compiled(ours), [ours], push)
    torch.compiler.reset()
    fused = gradients(sigmoid_gelu(plain), [plain], push)
    exact = points.double().requires_grad_()
    formula = gradients(F.gelu(exact, approximate="tanh"), [exact], push)
    for made, expected, right in zip(mine, fused, formula, strict=True):
        assert (made - expected).abs().max() <= 2e-6
        assert (made - right).abs().max() <= 3e-6
    assert (mine[0] - F.relu(points)).abs().max() > 0.1


@pytest.mark.parametrize("frozen", ["up", "down", "both"])
def test_frozen_maps_get_no_gradient_and_what_only_they_need_is_not_kept(frozen: str) -> None:
    up, down = build()
    x, push = draw(50, WIDTH).requires_grad_(), draw(50, WIDTH, seed=9)
    with SavedBytes(nn.ModuleList([up, down])) as saved:
        run_mlp(x, up, down).backward(push)
    whole_bytes, expected = saved.total, x.grad
    assert expected is not None
    x.grad = None
    for layer in {"up": (up,), "down": (down,), "both": (up, down)}[frozen]:
        layer.requires_grad_(False)
        layer.zero_grad()
    with SavedBytes(nn.ModuleList([up, down])) as saved:
        run_mlp(x, up, down).backward(push)
    assert saved.total < whole_bytes and x.grad is not None and torch.equal(x.grad, expected)
    assert all((layer.weight.grad is not None) == layer.weight.requires_grad for layer in (up, down))


def test_a_frozen_first_map_on_plain_numbers_keeps_no_slope() -> None:
    """As when only later layers train."""
    up, down = build()
    up.requires_grad_(False)
    x, push = draw(50, WIDTH), draw(50, WIDTH, seed=9)
    run_mlp(x, up, down).backward(push)
    assert down.weight.grad is not None
    hidden = F.gelu(up(x), approximate="tanh")
    torch.testing.assert_close(down.weight.grad, push.t() @ hidden, atol=1e-5, rtol=1e-5)


def test_the_sigmoid_form_is_for_plain_layers_on_plain_numbers() -> None:
    """Runs that have begun with one form go on with it: both give other last bits."""
    up, down = build()
    x = draw(50, WIDTH)
    wrapped = nn.Sequential(up)
    by_sigmoid, by_torch = (down(form(up(x))) for form in (sigmoid_gelu, gelu))
    assert not torch.equal(by_sigmoid, by_torch) and torch.allclose(by_sigmoid, by_torch, atol=1e-5)
    assert torch.equal(run_mlp(x, up, down), by_sigmoid)
    assert torch.equal(run_mlp(x, wrapped, down), by_torch)
    hook = up.register_forward_hook(lambda *_: None)
    assert not are_plain(x, up) and torch.equal(run_mlp(x, up, down), by_torch)
    hook.remove()
    assert not are_plain(x.double(), down) and not are_plain(x.to("meta"), down) and are_plain(x, down)
    with torch.autocast("cpu", torch.bfloat16):
        assert not are_plain(x, down) and run_mlp(x, up, down).dtype == torch.bfloat16
