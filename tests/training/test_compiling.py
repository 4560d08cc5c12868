"""Compiled blocks: one graph for all of a kind, with and without recompute, and clear words without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.training.compiling import apply_compile, check_compiler, compile_blocks, part_kept_code
from frameloom.training.memory.recompute import recompute_blocks
from frameloom.training.train import train
from tests.models.denoisers.contract import SavedBytes
from tests.training.test_loop import records

CPU = torch.device("cpu")
# The compiler looks at .grad of what a block is given and hides the warning of it, but not where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)).sin().cos())


class BrokenBlock(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x


class Counter:
    """A compiler that changes nothing and counts its graphs."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph.forward


def build(num_blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(16) for _ in range(num_blocks)))


def backward(model: nn.Module) -> tuple[int, list[Tensor]]:
    x = torch.linspace(-1, 1, 2 * 64 * 16).view(2, 64, 16)
    with SavedBytes(model) as saved:
        loss = model(x).square().mean()
    loss.backward()
    return saved.total, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_blocks_of_a_kind_share_one_graph() -> None:
    model, counter = build(), Counter()
    with torch.no_grad():
        expected = model(torch.ones(2, 3, 16))
        compile_blocks(model, backend=counter)
        assert torch.equal(model(torch.ones(2, 3, 16)), expected)
        assert counter.num_graphs == 1
        model(torch.ones(2, 5, 16))
        model(torch.ones(4, 7, 16))
    assert counter.num_graphs == 1


def test_graphs_do_not_depend_on_the_order_of_shapes() -> None:
    """A run that resumes in the middle of an epoch meets other shapes first; equal numbers are chance, too."""
    shapes = [(4, 4, 16), (3, 5, 16), (2, 4, 16), (1, 4, 16)]
    for order in (shapes, shapes[::-1]):
        torch.compiler.reset()
        model, counter = build(1), Counter()
        compile_blocks(model, backend=counter)
        found = []
        for shape in order:
            model(torch.ones(shape))
            found.append(counter.num_graphs)
        assert found == ([1, 1, 1, 2] if order is shapes else [1, 2, 2, 2])


def test_a_block_that_breaks_the_graph_is_an_error() -> None:
    blocks = [BrokenBlock()]
    compile_blocks(blocks, backend="eager")
    with pytest.raises((torch._dynamo.exc.UserError, torch._dynamo.exc.Unsupported)):
        blocks[0](torch.ones(2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_recomputed_blocks_keep_less_and_learn_the_same(backend: str) -> None:
    plain_bytes, expected = backward(build())
    held = []
    for recompute in (False, True):
        model = build()
        compile_blocks(model, backend=backend)
        if recompute:
            recompute_blocks(model)
        num_bytes, gradients = backward(model)
        held.append(num_bytes)
        for ours, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, other, atol=1e-7, rtol=1e-5)
    assert held[1] < 0.3 * plain_bytes and held[1] < 0.5 * held[0]


def test_false_compiles_nothing() -> None:
    model = build(1)
    apply_compile(model, False, CPU)
    assert "forward" not in vars(model[0])
    apply_compile(model, "eager", CPU)
    assert "forward" in vars(model[0])


def test_a_missing_compiler_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", (None, "/nowhere/g++"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what was compiled before would need no compiler
    with pytest.raises(ConfigError, match=r"train.compile: 'inductor' cannot compile for cpu here.*C\+\+") as told:
        check_compiler("inductor", CPU)
    assert "\n" not in str(told.value) and "train.compile: false" in str(told.value)


def test_code_for_narrower_vectors_is_kept_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    torch.rand(1).exp()  # torch reads the limit once, when it first computes, and the tests after this one have none
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders = set()
    for limit in ("avx2", "default", None):
        for name, value in (("ATEN_CPU_CAPABILITY", limit), ("TORCHINDUCTOR_CACHE_DIR", None)):
            monkeypatch.setenv(name, value or "")
            if value is None:
                monkeypatch.delenv(name)
        part_kept_code()
        folders.add(Path(cache_dir()))
    assert len(folders) == 3 and all(folder.parent == tmp_path for folder in folders)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    part_kept_code()
    assert Path(cache_dir()) == tmp_path / "chosen"


ONE_SHAPE = {"_delete_": True, "64px_ar16:9": {"1": [1.0, 4]}}


@pytest.mark.slow
def test_a_compiled_and_recomputed_run_learns_what_a_plain_one_does(world) -> None:
    options = ("--train.steps", "2", "--train.recompute", "true")
    data = {"buckets": ONE_SHAPE}
    plain = train(world.recipe("--name", "plain", *options, data=data))
    compiled = train(world.recipe("--name", "compiled", *options, "--train.compile", "aot_eager", data=data))
    assert records(compiled, "train/loss") == pytest.approx(records(plain, "train/loss"), rel=1e-4)
    other = train(world.recipe("--name", "other", *options, "--seed", "43", data=data))
    assert records(other, "train/loss") != pytest.approx(records(plain, "train/loss"), rel=1e-3)


@pytest.mark.slow
def test_an_autoencoder_compiles_too(world) -> None:
    options = {"task": "autoencoder", "data": {"buckets": ONE_SHAPE}}
    plain = train(world.recipe("--name", "plain", "--train.steps", "1", **options))
    compiled = train(world.recipe("--name", "compiled", "--train.steps", "1", "--train.compile", "eager", **options))
    assert records(compiled, "train/loss") == pytest.approx(records(plain, "train/loss"), rel=1e-4)
