"""Trainers of tests: steps taken one by one, and states that can be compared and taken up again."""

from __future__ import annotations

import torch

from frameloom.checkpoint.reader import Checkpoint
from frameloom.training.loop import Trainer

Taken = tuple[dict[str, float], list[int], Checkpoint]
"""values of a step, its rows, and the state after it"""


def copy(checkpoint: Checkpoint) -> Checkpoint:
    """As it would come from disk: values of their own."""
    tensors = {
        group: {name: tensor.detach().clone() for name, tensor in named.items()}
        for group, named in checkpoint.tensors.items()
    }
    return Checkpoint(checkpoint.step, tensors, dict(checkpoint.state))


def go_on(trainer: Trainer, steps: int) -> list[Taken]:
    """The next steps, as the loop takes them."""
    found: list[Taken] = []
    for batches, planned in trainer.feed.steps(trainer.epoch, trainer.position, trainer.recipe.train.accumulate):
        values = trainer.take_step(batches, planned).values
        trainer.epoch, trainer.position = planned.position
        rows = [int(row) for batch in batches for row in batch.rows]
        found.append((values, rows, copy(trainer.snapshot())))
        if len(found) == steps:
            break
    return found


def is_equal(ours: Checkpoint, theirs: Checkpoint) -> bool:
    return ours.state == theirs.state and has_equal_tensors(ours, theirs)


def has_equal_tensors(ours: Checkpoint, theirs: Checkpoint) -> bool:
    return all(
        torch.equal(ours.tensors[group][name], tensor)
        for group, named in theirs.tensors.items()
        for name, tensor in named.items()
    )
