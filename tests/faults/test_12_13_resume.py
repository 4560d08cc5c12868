"""A run that was stopped and resumed, at any step and any number of times, equals one never stopped, to the bit."""

from __future__ import annotations

from collections import Counter

import pytest

from frameloom.training.run.resuming import restore
from frameloom.training.step import Stepper
from frameloom.training.train import train
from tests.faults.runs import digests, metrics, stop_after
from tests.faults.trainers import copy, go_on, is_equal

STEPS = 20


def test_resuming_at_every_step_gives_the_same_next_step(start, tally):
    """Losses, rates, rows, weights, average and optimizer of the step after, from each of 20 states in turn.

    A state holds all that a step depends on, so equal next steps mean equal runs to the end.
    """
    trainer = start()
    first = copy(trainer.snapshot())
    whole = go_on(trainer, STEPS)
    states = [first, *(state for _, _, state in whole)]
    other = start()  # its own weights and optimizer, used by no step so far
    for step in (*range(STEPS - 1, -1, -1), 7):
        tally.inject()
        restore(other, copy(states[step]))
        ((values, rows, state),) = go_on(other, 1)
        assert (values, rows) == whole[step][:2] and is_equal(state, states[step + 1])
    assert not is_equal(states[3], states[4])


def test_without_the_optimizer_the_next_step_would_differ(start, monkeypatch):
    """The control."""
    trainer = start()
    whole = go_on(trainer, 4)
    other = start()
    monkeypatch.setattr(Stepper, "load", lambda *given: None)
    restore(other, copy(whole[2][2]))
    ((_, rows, state),) = go_on(other, 1)
    assert rows == whole[3][1] and not is_equal(state, whole[3][2])


@pytest.mark.parametrize(("task", "steps"), [("denoiser", (0, 9)), ("autoencoder", (5,))])
def test_whole_runs_resume_from_their_files(world, tally, task, steps):
    recipe = world.recipe("--train.steps", "11", "--train.save_every", "1", "--train.keep", "20", task=task)
    run = train(recipe)
    for step in steps:
        again = world.folder / f"again-{step}"
        stop_after(run, step, again / "run")
        tally.inject()
        train(recipe.model_copy(update={"run": recipe.run.model_copy(update={"folder": str(again)})}))
        assert digests(again / "run", 11) == digests(run, 11)
        assert metrics(again / "run") == metrics(run)


def test_every_sample_comes_once_an_epoch_however_often_the_run_resumes(start, tally_of):
    """Row 13: five resumes in one epoch, and one exactly at its end."""
    tally = tally_of(13)
    rows, trainer, state = [], start(), None
    length = trainer.feed.plan(0).num_microbatches
    assert length >= 9
    whole = go_on(start(), 2 * length)
    for steps in (1, 2, 1, 3, 1, length - 8, length):
        if state is not None:
            trainer = start()
            restore(trainer, state)
            tally.inject()
        part = go_on(trainer, steps)
        rows += [found for _, found, _ in part]
        state = part[-1][2]
    assert rows == [found for _, found, _ in whole] and is_equal(state, whole[-1][2])
    for epoch in range(2):
        seen = Counter(row for found in rows[epoch * length : (epoch + 1) * length] for row in found)
        assert set(seen.values()) == {1} and len(seen) == len(trainer.feed.manifest)
    assert rows[:length] != rows[length:]
