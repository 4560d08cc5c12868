"""Text of a small set in one table: what batches would have brought, and nothing where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from frameloom.config.schema.recipe import Recipe
from frameloom.training.caching import write_caches
from frameloom.training.loop import Trainer
from frameloom.training.run.folder import RunFolder
from frameloom.training.tasks import text_table
from frameloom.training.train import build_trainer

DROPOUT = 0.3


@pytest.fixture
def recipe(world) -> Recipe:
    cache = {name: str(world.folder / name) for name in ("latents", "text")}
    made = world.recipe(data={"cache": cache, "frame_start": "first"}, text={"dropout": DROPOUT})
    list(write_caches(made))
    return made


def build(recipe: Recipe, name: str) -> Trainer:
    folder = RunFolder(Path(recipe.run.folder) / name)
    folder.path.mkdir()
    trainer = build_trainer(recipe, folder, first_step=1)
    for tracker in trainer.trackers:
        tracker.close()
    return trainer


def test_a_step_sees_the_text_that_its_batch_would_have_brought(recipe, monkeypatch):
    known = build(recipe, "known")
    monkeypatch.setattr(text_table, "MOST_BYTES", 1000)
    read = build(recipe, "read")
    tasks = [trainer.task for trainer in (known, read)]
    assert tasks[0].text_table is not None and tasks[1].text_table is None
    num_dropped = 0
    pairs = zip(known.feed.steps(0, 0, 1), read.feed.steps(0, 0, 1), strict=True)
    for _, (ours, theirs) in zip(range(6), pairs, strict=False):
        batches = [ours[0][0], theirs[0][0]]
        assert batches[0].captions == batches[1].captions
        assert batches[0].text is None and batches[1].text is not None
        mine, other = (
            task._encode_text(batch.text, batch.captions, batch, 0, DROPOUT)
            for task, batch in zip(tasks, batches, strict=True)
        )
        assert torch.equal(mine.tokens_BKD, other.tokens_BKD)
        assert torch.equal(mine.mask_BK, other.mask_BK)
        torch.testing.assert_close(mine.pooled_BD, other.pooled_BD, atol=1e-5, rtol=1e-5)
        num_dropped += int((mine.mask_BK.sum(1) == 2).sum())  # the two marks of an empty caption
    assert num_dropped > 0


def test_a_caption_of_no_clip_is_encoded_when_it_comes(recipe):
    trainer = build(recipe, "run")
    task = trainer.task
    assert task.text_table is not None
    captions = [next(iter(task.text_table.rows)), "a caption of no clip at all"]
    batch = next(trainer.feed.steps(0, 0, 1))[0][0]
    states = task._encode_text(None, captions, batch, 0, 0.0)
    alone = task.text.encode(captions)
    expected = task.scaling.apply(alone) if task.scaling is not None else alone
    torch.testing.assert_close(states.tokens_BKD, expected.tokens_BKD)


def test_encoders_that_are_dropped_apart_have_no_table(recipe):
    apart = recipe.model_copy(update={"text": recipe.text.model_copy(update={"independent_dropout": True})})
    trainer = build(apart, "run")
    assert trainer.task.text_table is None
    assert next(trainer.feed.steps(0, 0, 1))[0][0].text is not None
