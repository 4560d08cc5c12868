"""Draws from the global generators, by whomever, change nothing; and what must change something does."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from frameloom.training.run.resuming import restore
from frameloom.training.tasks import noising as draws
from tests.faults.trainers import copy, go_on, has_equal_tensors

STEPS = 4


def stray() -> None:
    torch.rand(7)
    np.random.rand(3)
    random.random()


@pytest.mark.parametrize("when", ["before", "between", "seeded", "another loader"])
def test_stray_draws_change_nothing(start, tally, when):
    wanted = go_on(start(), STEPS)
    tally.inject()
    if when == "seeded":
        torch.manual_seed(99)
        np.random.seed(99)
    if when == "before":
        stray()
    trainer = start()
    found = []
    for _ in range(STEPS):
        if when == "between":
            stray()
        if when == "another loader":
            next(trainer.feed.steps(trainer.epoch, trainer.position, 1))
        found += go_on(trainer, 1)
    assert [step[:2] for step in found] == [step[:2] for step in wanted]
    assert has_equal_tensors(found[-1][2], wanted[-1][2])


def test_noise_from_the_global_generator_would_change(start, monkeypatch):
    """The control of stray draws: noise that comes from torch's own generator, as most trainers have it."""
    monkeypatch.setattr(draws, "key", lambda *key: int(torch.randint(2**31, ())))
    found = []
    for num_stray in (0, 7):
        trainer = start()
        torch.manual_seed(5)
        torch.rand(num_stray)
        found.append([step[0]["loss"] for step in go_on(trainer, STEPS)])
    assert found[0] != found[1]


def test_another_seed_differs(start, tally_of):
    """Row 18: the control of every equality here."""
    first, second = go_on(start(), 2), go_on(start("--seed", "43"), 2)
    assert [step[0]["loss"] for step in first] != [step[0]["loss"] for step in second]
    assert not has_equal_tensors(first[-1][2], second[-1][2])
    tally_of(18).inject()


def test_a_resume_without_its_position_differs(start, monkeypatch, tally_of):
    whole = go_on(start(), 4)
    other = start()
    restore(other, copy(whole[1][2]))
    other.epoch, other.position = 0, 0
    assert [step[1] for step in go_on(other, 2)] != [step[1] for step in whole[2:]]
    tally_of(18).inject()


def test_a_shuffle_without_a_seed_differs(start, monkeypatch, tally_of):
    from frameloom.data.order import plan

    monkeypatch.setattr(plan, "key", lambda *key: int(np.random.randint(2**31)))
    orders = [[step[1] for step in go_on(start(), 4)] for _ in range(2)]
    assert orders[0] != orders[1]
    tally_of(18).inject()
