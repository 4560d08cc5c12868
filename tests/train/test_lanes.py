"""Halves of a micro-batch side by side: the same learning, the same bits each time, and errors that arrive."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frameloom.checkpoint.store import load_latest
from frameloom.config.schema import Recipe
from frameloom.core.errors import RunError
from frameloom.models.denoisers.opensora2.model import MMDiT
from frameloom.train.caching import write_caches
from frameloom.train.lanes import Lanes, adding_up
from frameloom.train.loop import Trainer
from frameloom.train.run import train
from frameloom.train.step import Stepper
from tests.conftest import World
from tests.train.runs import losses, open_trainer

# The bias of attention's keys has no gradient but rounding, which Adam would blow up to a full step.
OPTIM = {"lr": 1e-3, "eps": 1e-3}
LONG = "64px 9f 3:2"
DATA = {"frame_start": "first", "buckets": {"_delete_": True, "64px": {"9": [1.0, 3]}}}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def caches(shared_world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("caches")
    cache = {name: str(folder / name) for name in ("latents", "text")}
    list(write_caches(World(shared_world, folder).recipe(data={**DATA, "cache": cache})))
    return cache


@pytest.fixture
def world(shared_world: Path, tmp_path: Path, caches: dict[str, str]) -> World:
    return CachedWorld(shared_world, tmp_path, caches)


@dataclass(frozen=True)
class CachedWorld(World):
    cache: dict[str, str]

    def recipe(self, *overrides: str, task: str = "denoiser", **sections: Any) -> Recipe:
        data = {"cache": self.cache, **DATA, **sections.pop("data", {})}
        more = {"optim": OPTIM, "text": {"dropout": 0.3}, "train": {"steps": 4}, **sections}
        return super().recipe(*overrides, task=task, data=data, **more)


def build(world: Any, *overrides: str, **sections: Any) -> Trainer:
    return open_trainer(world.recipe(*overrides, **sections), world.folder / "built")


def lanes_of(trainer: Trainer) -> Lanes | None:
    assert isinstance(trainer.stepper, Stepper)
    return trainer.stepper.lanes


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    stored = load_latest(run / "checkpoints")
    assert stored is not None
    return {f"{group} {name}": tensor for group in stored.tensors for name, tensor in stored.tensors[group].items()}


def test_halves_learn_what_the_whole_learns_with_the_same_bits_each_time(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of three, two of them a step, so that gradients of two passes of unequal halves add up."""
    threads: set[tuple[str, int]] = set()
    forward = MMDiT.forward

    def watch(*args: Any, **options: Any) -> Any:
        threads.add((threading.current_thread().name.partition("_")[0], torch.get_num_threads()))
        return forward(*args, **options)

    monkeypatch.setattr(MMDiT, "forward", watch)
    accumulate = ("--train.accumulate", "2")
    whole = train(world.recipe("--name", "whole", "--train.side_by_side", "false", *accumulate))
    assert threads == {("MainThread", 2)}
    threads.clear()
    runs = [train(world.recipe("--name", name, "--train.side_by_side", "true", *accumulate)) for name in ("a", "b")]
    assert threads == {("lane", 1)}
    first, second = map(tensors_of, runs)
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    assert losses(runs[0]) == losses(runs[1]) == pytest.approx(losses(whole), rel=1e-6)
    for name, tensor in tensors_of(whole).items():
        assert torch.allclose(first[name], tensor, rtol=1e-4, atol=1e-6), name
    other = train(world.recipe("--name", "other", "--seed", "7", "--train.side_by_side", "true", *accumulate))
    assert losses(other) != pytest.approx(losses(whole), rel=1e-3)


def test_a_run_in_halves_resumes_to_the_bit(world: Any) -> None:
    side_by_side = ("--train.side_by_side", "true")
    whole = train(world.recipe("--name", "whole", *side_by_side))
    train(world.recipe("--name", "parts", "--train.steps", "2", *side_by_side))
    parts = train(world.recipe("--name", "parts", *side_by_side))
    expected = tensors_of(whole)
    assert all(torch.equal(expected[name], tensor) for name, tensor in tensors_of(parts).items())
    assert losses(parts) == losses(whole)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_and_recomputed_blocks_run_in_halves(world: Any) -> None:
    blocks = ("--train.compile", "eager", "--train.recompute", "true")
    halves = train(world.recipe("--name", "halves", "--train.side_by_side", "true", *blocks))
    whole = train(world.recipe("--name", "whole", "--train.side_by_side", "false"))
    assert losses(halves) == pytest.approx(losses(whole), rel=1e-5)


def test_a_half_that_does_not_fit_in_memory_leads_to_smaller_pieces(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(world.recipe("--name", "whole", "--train.side_by_side", "false"))
    fault = {"point": "pass", "act": "memory", "bucket": LONG, "samples_over": 1}
    monkeypatch.setenv("FRAMELOOM_FAULTS", json.dumps([fault]))
    with caplog.at_level(logging.WARNING):
        run = train(world.recipe("--name", "halves", "--train.side_by_side", "true"))
    assert "3 samples of bucket 64px 9f 3:2 do not fit in memory at once; from now on at most 2" in caplog.text
    assert losses(run) == pytest.approx(losses(whole), rel=1e-6)


def test_an_error_of_a_half_arrives_when_both_have_ended() -> None:
    lanes, ended = Lanes(1), threading.Event()

    def fail() -> None:
        raise RunError("no")

    def work() -> None:
        ended.wait(0.2)
        ended.set()

    assert lanes.run("shape", [lambda: 1, lambda: 2]) == [1, 2]
    with pytest.raises(RunError, match="no"):
        lanes.run("shape", [fail, work])
    assert ended.is_set()


def test_earlier_gradients_come_to_the_sum_of_both_halves() -> None:
    """Added one by one, as they come, each 4 would be lost beside a number whose neighbours are 8 away."""
    param, untouched = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    param.grad, untouched.grad = torch.full((1,), 1e8), torch.ones(1)
    with adding_up([param, untouched]):
        for _ in range(2):
            torch.autograd.backward(4 * param)
    assert param.grad.item() == 100_000_008 and untouched.grad.item() == 1


def test_only_long_passes_from_caches_run_in_halves_by_themselves(world: Any) -> None:
    trainer = build(world)
    lanes = lanes_of(trainer)
    batch = next(batches[0] for batches, _ in trainer.feed.steps(0, 0, 1) if batches[0].size == 3)
    assert lanes is not None and [half.size for half in lanes.cut(batch)] == [3]
    wanted = lanes_of(build(world, "--train.side_by_side", "true"))
    assert wanted is not None and [half.size for half in wanted.cut(batch)] == [2, 1]
    fresh = build(world, "--train.side_by_side", "true", data={"cache": {"_delete_": True}})
    pixels = next(fresh.feed.steps(0, 0, 1))[0][0]
    assert pixels.pixels_BCFHW is not None and len(lanes_of(fresh).cut(pixels)) == 1  # type: ignore[union-attr]


def test_a_recording_shows_both_halves_and_changes_no_number(world: Any) -> None:
    more = ("--train.side_by_side", "true")
    plain = train(world.recipe("--name", "plain", *more))
    recorded = train(
        world.recipe("--name", "recorded", "--train.profile", "{start: 3, steps: 1, memory: false}", *more)
    )
    trace = json.loads((recorded / "profile" / "steps-00000003-00000003.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    kernels = ("aten::_scaled_dot_product_flash_attention_for_cpu", "frameloom::attend")  # torch's, or ours
    assert sum(names.count(kernel) for kernel in kernels) == 2 * 2  # blocks and halves
    assert losses(recorded) == losses(plain)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "setting", [("--parallel.data", "2"), ("--parallel.zero", "3"), ("--train.side_by_side", "false")]
)
def test_runs_that_add_up_in_another_order_have_no_halves(world: Any, setting: tuple[str, str]) -> None:
    assert lanes_of(build(world, *setting)) is None


def test_one_core_has_no_halves_and_says_so_if_asked(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(1)
    assert lanes_of(build(world)) is None and "side_by_side" not in caplog.text
    assert lanes_of(build(world, "--train.side_by_side", "true")) is None
    assert "train.side_by_side is true, which has no effect with one thread (OMP_NUM_THREADS)" in caplog.text
