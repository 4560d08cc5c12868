from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from frameloom.config.schema.optim import OptimSection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.random import stream
from frameloom.training.optim import optimizer as optimizers
from frameloom.training.optim.clipping import clip_gradients, clip_within_step, measure_gradients
from frameloom.training.optim.optimizer import (
    allocate_state,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
)


def make_model(purpose: str = "weights") -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
    generator = stream(9, purpose)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        data = torch.randn(16, 4, generator=stream(9, "data", step))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


def make_optimizer(model: nn.Module) -> Optimizer:
    return build_optimizer(model.named_parameters(), OptimSection(lr=1e-2, weight_decay=0.1))


def names(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if param.requires_grad]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_norms_and_biases_are_spared_from_weight_decay():
    model = make_model()
    groups = make_optimizer(model).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [len(group["params"]) for group in groups] == [2, 4]
    section = OptimSection(lr=1e-2, weight_decay=0.1, decay_norms=True)
    everything = build_optimizer(model.named_parameters(), section).param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in everything] == [(0.1, 6)]


def test_frozen_parameters_are_left_out():
    model = make_model()
    model[0].requires_grad_(False)
    assert sum(len(group["params"]) for group in make_optimizer(model).param_groups) == 4
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter trains"):
        make_optimizer(model)


def test_step_is_adamw_with_the_given_settings():
    ours, reference = make_model(), make_model()
    settings = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6}
    section = OptimSection(weight_decay=0.2, decay_norms=True, **settings)
    train(ours, build_optimizer(ours.named_parameters(), section), range(3))
    train(reference, AdamW(reference.parameters(), weight_decay=0.2, fused=False, foreach=False, **settings), range(3))
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert not are_equal(weights(ours), weights(make_model()))


def test_optimizer_is_fused_and_says_so_when_it_cannot_be(monkeypatch, caplog):
    model = make_model()
    assert make_optimizer(model).param_groups[0]["fused"]

    def without_fused_kernel(params, **options):
        if options.get("fused"):
            raise RuntimeError("no fused kernel on this device")
        return AdamW(params, **options)

    monkeypatch.setattr(optimizers, "AdamW", without_fused_kernel)
    with caplog.at_level(logging.WARNING, logger="frameloom"):
        plain = make_optimizer(model)
    assert "no fused kernel" in caplog.text
    assert not plain.param_groups[0]["fused"]


def test_state_is_named_by_parameter_and_holds_the_step():
    model = make_model()
    optimizer = make_optimizer(model)
    assert optimizer_tensors(optimizer, names(model)) == {}
    train(model, optimizer, range(2))
    tensors = optimizer_tensors(optimizer, names(model))
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert set(tensors) == {f"{kind}.{name}" for kind in kinds for name in names(model)}
    assert tensors["step.0.weight"].item() == 2
    for name, param in model.named_parameters():
        assert tensors[f"exp_avg.{name}"] is optimizer.state[param]["exp_avg"]


def test_loaded_state_shares_no_memory_with_the_tensors():
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    saved = {name: value.clone() for name, value in optimizer_tensors(optimizer, names(model)).items()}
    before = {name: value.clone() for name, value in saved.items()}
    other = make_optimizer(model)
    load_optimizer_tensors(other, names(model), saved)
    train(model, other, range(2, 3))
    assert all(torch.equal(saved[name], before[name]) for name in saved)


def test_allocating_again_keeps_the_state():
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    allocate_state(optimizer)
    assert optimizer_tensors(optimizer, names(model))["step.0.weight"].item() == 2


def test_state_that_does_not_fit_is_refused_and_changes_nothing():
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    good = {name: value.clone() for name, value in optimizer_tensors(optimizer, names(model)).items()}
    partial = {name: value for name, value in good.items() if name != "exp_avg.3.bias"}
    bad = {
        "no parameter '9.bias' trains": good | {"exp_avg.9.bias": torch.zeros(2)},
        r"'exp_avg.0.weight' is \(2, 2\)": good | {"exp_avg.0.weight": torch.zeros(2, 2)},
        "no exp_avg for '3.bias'": partial,
    }
    for message, tensors in bad.items():
        with pytest.raises(CheckpointError, match=message):
            load_optimizer_tensors(optimizer, names(model), tensors)
    now = optimizer_tensors(optimizer, names(model))
    assert all(torch.equal(now[name], good[name]) for name in good)


def test_parameters_without_saved_state_start_fresh_and_are_told(caplog):
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    tensors = {name: value.clone() for name, value in optimizer_tensors(optimizer, names(model)).items()}
    without = {name: value for name, value in tensors.items() if not name.endswith(".3.bias")}
    with caplog.at_level(logging.WARNING, logger="frameloom"):
        load_optimizer_tensors(optimizer, names(model), tensors)
        assert not caplog.text
        load_optimizer_tensors(optimizer, names(model), without)
    assert "1 of 6 parameters start with fresh optimizer state, first: 3.bias" in caplog.text
    assert set(optimizer_tensors(optimizer, names(model))) == set(without)


def give_gradients(model: nn.Module, scale: float) -> torch.Tensor:
    generator = stream(9, "gradients")
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator) * scale
    return torch.cat([param.grad.flatten() for param in model.parameters()]).double()


def test_clipping_scales_all_gradients_to_the_limit_and_returns_the_norm_before():
    model = make_model()
    before = give_gradients(model, 10.0)
    norm = clip_gradients(model.parameters(), 0.5)
    after = torch.cat([param.grad.flatten() for param in model.parameters()]).double()
    assert norm.shape == ()
    assert norm.item() == pytest.approx(before.norm().item(), rel=1e-6)
    assert after.norm().item() == pytest.approx(0.5, rel=1e-5)
    torch.testing.assert_close(after / after.norm(), before / before.norm())


def test_norm_of_a_bad_gradient_is_not_finite():
    model = make_model()
    give_gradients(model, 1.0)
    model[0].weight.grad[0, 0] = float("nan")
    assert not clip_gradients(model.parameters(), 1.0).isfinite()


@pytest.mark.parametrize("max_norm", [0.5, 1e9, None])
def test_a_step_that_scales_gradients_itself_equals_one_after_clipping(max_norm: float | None) -> None:
    within = _train_clipped(lambda optimizer, model: clip_within_step(optimizer, max_norm))
    before = _train_clipped(lambda optimizer, model: clip_gradients(model.parameters(), max_norm))
    plain = _train_clipped(lambda optimizer, model: None)
    torch.testing.assert_close(within, before, atol=1e-6, rtol=1e-6)
    # Only a limit that bites makes a difference.
    assert torch.allclose(within, plain, atol=1e-6) == (max_norm != 0.5)


def _train_clipped(clip: Callable[[torch.optim.Optimizer, nn.Module], object]) -> torch.Tensor:
    """Weights after three steps with gradients above 0.5; the large eps lets their size count."""
    model = nn.Linear(8, 8)
    nn.init.normal_(model.weight, generator=stream(3, "weights"))
    nn.init.zeros_(model.bias)
    optimizer = build_optimizer(model.named_parameters(), OptimSection(lr=1e-2, eps=1.0))
    for number in range(3):
        model(torch.randn(4, 8, generator=stream(3, "input", number))).square().sum().backward()
        clip(optimizer, model)
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


def measure(grads: list[torch.Tensor]) -> torch.Tensor:
    params = [nn.Parameter(torch.empty_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return measure_gradients(params)


def norm_in_doubles(grads: list[torch.Tensor]) -> float:
    return torch.cat([grad.flatten() for grad in grads]).double().norm().item()


def test_norm_of_a_large_gradient_is_that_of_doubles() -> None:
    """Added up one by one in float32, four million squares are off by nearly one in ten thousand."""
    grads = [
        torch.randn(2048, 2048, generator=stream(0, "gradient")),
        torch.randn(2048, generator=stream(1, "gradient")),
    ]
    assert measure(grads).item() == pytest.approx(norm_in_doubles(grads), rel=2e-5)


def test_every_number_of_a_gradient_counts_whatever_its_tensor_looks_like() -> None:
    """Odd lengths, several pieces, strides, single numbers and tensors without any."""
    draw = stream(0, "gradient")
    for shape in ((1,), (0,), (7,), (3, 5, 11), (301, 173), (1 << 19,)):
        grads = [torch.zeros(shape), torch.randn(40, 30, generator=draw).t(), torch.randn(9, generator=draw)[::2]]
        for place in {0, grads[0].numel() // 2, grads[0].numel() - 1} - {-1}:
            grads[0].flatten()[place : place + 1] = 100.0
            found = measure(grads)
            assert found.dtype == torch.float32 and found.shape == ()
            assert found.item() == pytest.approx(norm_in_doubles(grads), rel=1e-6)


def test_parameters_without_gradients_have_no_norm() -> None:
    layer = nn.Linear(6, 4)
    assert measure_gradients(layer.parameters()).item() == 0
    layer.bias.grad = torch.tensor([0.0, 3.0, 0.0, 4.0])
    assert measure_gradients(layer.parameters()).item() == 5
