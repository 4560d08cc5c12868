"""Every optimizer: its formula, its state in a file, and a run that resumes to the bit."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from frameloom.checkpoint.reader import read_state, step_folder
from frameloom.config.schema.optim import OptimSection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.random import stream
from frameloom.training.optim.groups import hidden_matrices
from frameloom.training.optim.optimizer import (
    allocate_state,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
)
from frameloom.training.run.resuming import ResumeChoices
from frameloom.training.train import train

KINDS = ["adamw", "came", "adafactor", "lion", "prodigy", "muon"]
LR = {"prodigy": 1.0, "lion": 1e-3}


class Small(nn.Module):
    """Ends and two blocks; the blocks hold matrices of both proportions and a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, width), nn.Linear(width, 8)])
        self.last = nn.Linear(8, 2)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for block in self.blocks:
            value = torch.tanh(block(value))
        return self.last(value)


def make_model(purpose: str = "weights", width: int = 12) -> Small:
    model, generator = Small(width), stream(9, purpose)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model


def make_optimizer(model: nn.Module, name: str, **options: object) -> Optimizer:
    section = OptimSection(**{"name": name, "lr": LR.get(name, 1e-2), "weight_decay": 0.1, **options})
    return build_optimizer(model.named_parameters(), section, hidden_matrices(model))


def take_steps(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        data = torch.randn(16, 4, generator=stream(9, "data", step))
        optimizer.zero_grad()
        (model(data) - 1).square().mean().backward()
        optimizer.step()


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def check_resume(kind: str, folder: Path, width: int = 12) -> None:
    model = make_model(width=width)
    optimizer = make_optimizer(model, kind)
    take_steps(model, optimizer, range(3))
    save_file(optimizer_tensors(optimizer, names(model)), folder / "optimizer.safetensors")
    middle = {name: value.clone() for name, value in model.state_dict().items()}
    take_steps(model, optimizer, range(3, 6))

    def resume(*, restore: bool) -> list[Tensor]:
        fresh = make_model("other", width)
        fresh_optimizer = make_optimizer(fresh, kind)
        allocate_state(fresh_optimizer)
        fresh.load_state_dict(middle)
        if restore:
            load_optimizer_tensors(fresh_optimizer, names(fresh), load_file(folder / "optimizer.safetensors"))
        take_steps(fresh, fresh_optimizer, range(3, 6))
        return weights(fresh)

    assert are_equal(resume(restore=True), weights(model))
    assert not are_equal(resume(restore=False), weights(model))


@pytest.mark.parametrize("kind", KINDS)
def test_state_in_a_file_continues_to_the_bit(tmp_path: Path, kind: str) -> None:
    check_resume(kind, tmp_path)


def test_8bit_state_in_a_file_continues_to_the_bit(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    check_resume("adamw8bit", tmp_path, width=1024)  # smaller matrices than 4096 numbers keep 32 bits


def test_8bit_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=r"pip install 'frameloom\[bitsandbytes\]'"):
        make_optimizer(make_model(), "adamw8bit")


@pytest.mark.parametrize("kind", KINDS)
def test_allocated_state_is_as_before_the_first_step(kind: str) -> None:
    plain, allocated = make_model(), make_model()
    plain_optimizer, optimizer = make_optimizer(plain, kind), make_optimizer(allocated, kind)
    allocate_state(optimizer)
    assert are_equal(weights(allocated), weights(plain))
    before = set(optimizer_tensors(optimizer, names(allocated)))
    take_steps(plain, plain_optimizer, range(2))
    take_steps(allocated, optimizer, range(2))
    assert are_equal(weights(allocated), weights(plain))
    assert not are_equal(weights(allocated), weights(make_model()))
    assert set(optimizer_tensors(optimizer, names(allocated))) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_fit_lowers_the_loss(kind: str) -> None:
    model = make_model()
    data = torch.randn(64, 4, generator=stream(9, "held out"))
    before = (model(data) - 1).square().mean().item()
    take_steps(model, make_optimizer(model, kind), range(100))
    assert (model(data) - 1).square().mean().item() < 0.5 * before


@pytest.mark.parametrize(
    ("saved", "asked", "message"),
    [
        ("adamw", "lion", "no step for all parameters"),
        ("adamw", "came", "no step for all parameters"),
        ("came", "adafactor", "exp_avg, .* for '.*', which this optimizer does not keep"),
        ("prodigy", "adamw", "d, d_max, d_numerator, step for all parameters, which this optimizer does not keep"),
        ("lion", "adamw", "step for all parameters"),
    ],
)
def test_state_of_another_optimizer_is_refused_and_changes_nothing(saved: str, asked: str, message: str) -> None:
    model = make_model()
    first, second = make_optimizer(model, saved), make_optimizer(model, asked)
    take_steps(model, first, range(2))
    allocate_state(second)
    before = {name: value.clone() for name, value in optimizer_tensors(second, names(model)).items()}
    with pytest.raises(CheckpointError, match=message):
        load_optimizer_tensors(second, names(model), optimizer_tensors(first, names(model)))
    now = optimizer_tensors(second, names(model))
    assert all(torch.equal(now[name], value) for name, value in before.items())


def factors(table: Tensor) -> tuple[Tensor, Tensor]:
    return table.mean(dim=-1), table.mean(dim=-2)


def inverse_root(row: Tensor, column: Tensor) -> Tensor:
    return (row / row.mean()).rsqrt().unsqueeze(1) * column.rsqrt().unsqueeze(0)


def rms(value: Tensor) -> Tensor:
    return value.norm() / math.sqrt(value.numel())


def step_alone(kind: str, start: Tensor, grads: list[Tensor], **options: object) -> Tensor:
    """One parameter in our optimizer, with gradients that are given."""
    param = nn.Parameter(start.clone())
    optimizer = build_optimizer([("blocks.0.weight", param)], OptimSection(name=kind, **options), {"blocks.0.weight"})
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def draw(*shape: int, purpose: str = "value") -> Tensor:
    return torch.randn(shape, generator=stream(3, purpose), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 5), (7,)])
def test_came_is_its_formula(shape: tuple[int, ...]) -> None:
    start, grads = draw(*shape), [draw(*shape, purpose="one"), draw(*shape, purpose="two")]
    lr, decay, (beta1, beta2, beta3) = 0.01, 0.1, (0.9, 0.999, 0.9999)
    expected, mean = start.clone(), torch.zeros(shape, dtype=torch.float64)
    square = [torch.zeros_like(part) for part in factors(start)] if start.ndim == 2 else [torch.zeros_like(start)]
    rest = [torch.zeros_like(part) for part in square]
    for grad in grads:
        parts = factors(grad**2 + 1e-30) if start.ndim == 2 else (grad**2 + 1e-30,)
        square = [beta2 * old + (1 - beta2) * new for old, new in zip(square, parts, strict=True)]
        update = grad * (inverse_root(*square) if start.ndim == 2 else square[0].rsqrt())
        update = update / max(1.0, rms(update))
        mean = beta1 * mean + (1 - beta1) * update
        moved = mean
        if start.ndim == 2:
            parts = factors((update - mean) ** 2 + 1e-16)
            rest = [beta3 * old + (1 - beta3) * new for old, new in zip(rest, parts, strict=True)]
            moved = mean * inverse_root(*rest)
        expected = expected * (1 - lr * decay) - lr * moved
    ours = step_alone("came", start, grads, lr=lr, weight_decay=decay, decay_norms=True)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    other = step_alone("came", start, grads, lr=lr, weight_decay=decay, decay_norms=True, betas=(0.9, 0.999, 0.99))
    assert start.ndim == 1 or not torch.allclose(other, expected, rtol=1e-4)


def test_adafactor_is_its_formula_at_the_rate_of_the_recipe() -> None:
    start, grads = draw(3, 5), [draw(3, 5, purpose="one"), draw(3, 5, purpose="two")]
    expected, square = start.clone(), [torch.zeros(3, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)]
    for step, grad in enumerate(grads, 1):
        beta2 = min(0.999, 1 - step**-0.8)
        square = [beta2 * old + (1 - beta2) * new for old, new in zip(square, factors(grad**2 + 1e-30), strict=True)]
        update = grad * inverse_root(*square)
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * update / max(1.0, rms(update))
    ours = step_alone("adafactor", start, grads, lr=0.01, weight_decay=0.1)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(step_alone("adafactor", start, grads, lr=0.01, betas=(0.9, 0.999)), expected, rtol=1e-4)


def test_lion_moves_by_the_sign_of_its_mean() -> None:
    start, grads = draw(3, 5), [draw(3, 5, purpose="one"), draw(3, 5, purpose="two")]
    expected, mean = start.clone(), torch.zeros_like(start)
    for grad in grads:
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * (0.9 * mean + 0.1 * grad).sign()
        mean = 0.99 * mean + 0.01 * grad
    torch.testing.assert_close(step_alone("lion", start, grads, lr=0.01, weight_decay=0.1), expected)


def test_prodigy_finds_a_rate_that_grows() -> None:
    model = make_model()
    optimizer = make_optimizer(model, "prodigy")
    take_steps(model, optimizer, range(150))
    assert optimizer.param_groups[0]["d"] > 10 * optimizer.param_groups[0]["d0"]
    assert len({group["d"] for group in optimizer.param_groups}) == 1


def test_muon_turns_hidden_matrices_and_leaves_the_ends_to_adamw() -> None:
    model = make_model()
    optimizer = make_optimizer(model, "muon", weight_decay=0.0)
    kinds = {name: group["use_muon"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {name for name, is_muon in kinds.items() if is_muon} == {"blocks.0.weight", "blocks.1.weight"}


def test_muon_moves_a_matrix_by_the_same_length_in_every_direction() -> None:
    start, grad = draw(6, 9).float(), draw(6, 9, purpose="one").float()
    moved = step_alone("muon", start, [grad], lr=1e-2, weight_decay=0.0) - start
    # Moonlight's factor: 0.2 * sqrt of the longer side; five iterations bring singular values near 1, not to it.
    sizes = torch.linalg.svdvals(moved) / (1e-2 * 0.2 * math.sqrt(9))
    assert sizes.min() > 0.6 and sizes.max() < 1.3
    own = torch.linalg.svdvals(grad)
    assert own.max() / own.min() > 3


def test_muon_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="no matrix inside the model's blocks"):
        build_optimizer(make_model().named_parameters(), OptimSection(name="muon", lr=1e-2))


def digests(run: Path, step: int) -> dict[str, str]:
    return dict(read_state(step_folder(run / "checkpoints", step))["files"])


def losses(run: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_resumes_equals_one_that_never_stopped(world, kind: str) -> None:
    optim = {"name": kind, "lr": {"prodigy": 1.0}.get(kind, 1e-3)}
    whole = train(world.recipe("--name", "whole", "--train.steps", "4", optim=optim))
    train(world.recipe("--name", "parts", "--train.steps", "2", optim=optim))
    parts = train(world.recipe("--name", "parts", "--train.steps", "4", optim=optim))
    assert digests(parts, 4) == digests(whole, 4) and losses(parts) == losses(whole)
    other = train(world.recipe("--name", "other", "--train.steps", "4", "--seed", "43", optim=optim))
    assert digests(other, 4)["optimizer.safetensors"] != digests(whole, 4)["optimizer.safetensors"]


def test_a_run_that_resumes_with_another_optimizer_is_refused(world) -> None:
    train(world.recipe("--train.steps", "2", optim={"name": "lion"}))
    with pytest.raises(CheckpointError, match=r"put optim\.name back"):
        train(world.recipe("--train.steps", "3", optim={"name": "came"}), ResumeChoices(accept_recipe_change=True))
