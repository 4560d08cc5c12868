"""A number that is not finite changes nothing, wherever it comes from: all ranks skip the step, or the run stops."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from frameloom.core.errors import RunError
from frameloom.training import step as steps
from frameloom.training.loop import Trainer
from tests.faults.runs import losses
from tests.faults.trainers import copy, go_on, has_equal_tensors
from tests.faults.warm import run_command

SOURCES = ("gradient", "loss", "latent", "text")
STRUCK = (1, 7, 19)


def poison(trainer: Trainer, source: str, value: float) -> Callable[[], None]:
    """Make the next steps' numbers not finite at one place; the result takes it back."""
    task = trainer.task
    if source == "gradient":
        parameter = next(iter(task.model.parameters()))
        return parameter.register_hook(lambda gradient: torch.full_like(gradient, value)).remove
    name = {"loss": "losses", "latent": "_latents_and_noise", "text": "_encode_text"}[source]
    owner: object = trainer.stepper.updates[0].phase if source == "loss" else task
    right = getattr(owner, name)

    def wrong(*args: object) -> object:
        found = right(*args)
        if source in ("loss", "latent"):
            return found[0] * value, found[1]
        return dataclasses.replace(found, tokens_BKD=found.tokens_BKD * value)

    object.__setattr__(owner, name, wrong)
    return lambda: object.__setattr__(owner, name, right)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_27_the_step_changes_nothing_and_the_run_goes_on(start, tally, source, value):
    trainer = start()
    for struck in STRUCK if source == "gradient" else STRUCK[:1]:
        go_on(trainer, struck - trainer.step - 1) if trainer.step < struck - 1 else None
        before = copy(trainer.snapshot())
        tally.inject()
        heal = poison(trainer, source, value)
        ((values, _, after),) = go_on(trainer, 1)
        heal()
        assert trainer.nonfinite == 1 and not all(map(math.isfinite, values.values()))
        assert has_equal_tensors(after, before)
        ((_, _, later),) = go_on(trainer, 1)
        assert trainer.nonfinite == 0 and not has_equal_tensors(later, before)


def test_27_three_in_a_row_stop_the_run_and_the_batch_is_named(start, tally):
    trainer = start()
    before = copy(trainer.snapshot())
    poison(trainer, "gradient", math.nan)
    tally.inject(3)
    go_on(trainer, 2)
    with pytest.raises(RunError, match=r"not finite.*bucket 64px.*manifest rows.*3 in a row"):
        go_on(trainer, 1)
    assert has_equal_tensors(trainer.snapshot(), before)


def test_27_without_the_look_weights_would_be_lost(start, monkeypatch):
    """The control."""
    trainer = start()
    poison(trainer, "loss", math.nan)
    monkeypatch.setattr(steps.math, "isfinite", lambda number: True)
    ((_, _, after),) = go_on(trainer, 1)
    monkeypatch.undo()
    assert any(not torch.isfinite(tensor).all() for tensor in after.tensors["model"].values())


def train_poisoned(words: list[str], source: str, rank: int, struck: list[int]) -> None:
    """`frameloom train` with one rank poisoned at some steps."""
    import os

    take = Trainer.take_step

    def take_poisoned(trainer: Trainer, *given: object) -> object:
        is_struck = trainer.step + 1 in struck and int(os.environ["RANK"]) == rank
        heal = poison(trainer, source, math.nan) if is_struck else lambda: None
        try:
            return take(trainer, *given)
        finally:
            heal()

    Trainer.take_step = take_poisoned  # type: ignore[method-assign, assignment]
    run_command(["train", *words])


def logged(run: Path) -> dict[int, float | None]:
    """Norms of gradients; JSON has no word for what is not finite but null."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/grad_norm"] for line in lines}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_27_one_rank_s_trouble_is_all_ranks_skip(warm, tally, world):
    """With plain data parallel and with split weights; both ranks end alike, and the rank that had it is named."""
    for zero, source in ((0, "gradient"), (2, "loss")):
        name = f"zero-{zero}"
        path = world.write_recipe(parallel={"data": 2, "zero": zero, "timeout_s": 120})
        words = [str(path), "--name", name, "--train.steps", "8"]
        tally.inject(2)
        children = warm.ranks("tests.faults.test_not_finite:train_poisoned", [words, source, 1, [1, 7]], 2)
        told = warm.expect_all(children)[0]
        assert told.count("is not finite") == 2 and "step 1:" in told and "step 7:" in told, told
        if source == "loss":
            assert "rank 1: bucket 64px" in told
            assert [step for step, loss in losses(world.folder / name).items() if loss is None] == [1, 7]
        assert [step for step, norm in logged(world.folder / name).items() if norm is None] == [1, 7]
