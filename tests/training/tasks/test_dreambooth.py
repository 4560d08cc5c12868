"""DreamBooth through the real loop: pairs of pictures, the loss of both, and class pictures that the model makes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frameloom.builders.data import class_rows, read_manifest
from frameloom.checkpoint.reader import read_state, step_folder
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.data.loading.loader import request_at
from frameloom.data.loading.reader import CLASS_INDEX_OFFSET
from frameloom.data.media.writing import read_metadata
from frameloom.training.feed import build_feed
from frameloom.training.run.folder import RunFolder
from frameloom.training.task import StepContext
from frameloom.training.tasks.denoiser import DenoiserTask
from frameloom.training.tasks.subject_tuning import make_class_images
from frameloom.training.train import build_trainer, train
from tests.training.tasks.test_textual_inversion import write_base

TEXT = {"text_width": 384, "pooled_width": 384}
INSTANCE, CLASS = "a photo of sks shape", "a photo of a shape"


@pytest.fixture
def sections(world) -> dict[str, Any]:
    folder = str(world.folder / "class")
    prompts = {"instance_prompt": INSTANCE, "class_prompt": CLASS, "class_folder": folder, "num_class_images": 3}
    return {
        "model": {"_delete_": True, "family": "sdxl", "weights": str(write_base(world.folder / "base", TEXT))},
        "objective": {"kind": "epsilon"},
        "data": {"buckets": {"_delete_": True, "64px": {"1": [1.0, 2]}}},
        "sample": {"frames": 1, "steps": 1, "guidance": 1.0},
        "dreambooth": {**prompts, "prior_weight": 0.5},
    }


def start(world, **sections: Any):
    folder = RunFolder(world.folder / "run")
    folder.path.mkdir(exist_ok=True)
    trainer = build_trainer(world.recipe(**sections), folder, first_step=1)
    for tracker in trainer.trackers:
        tracker.close()
    return trainer


def test_class_pictures_are_made_once_and_belong_to_no_epoch(world, sections):
    recipe = world.recipe(**sections)
    assert make_class_images(recipe) == 3
    folder = world.folder / "class"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["class-00000.png", "class-00001.png", "class-00002.png"]
    assert read_metadata(folder / names[1])["prompt"] == CLASS
    assert make_class_images(recipe) == 0
    before = (folder / names[1]).read_bytes()
    (folder / names[1]).unlink()
    assert make_class_images(recipe) == 1 and (folder / names[1]).read_bytes() == before
    manifest = read_manifest(recipe)
    rows = class_rows(manifest)
    assert manifest.captions(rows) == [CLASS] * 3 and set(manifest.captions(range(rows[0]))) == {INSTANCE}
    feed = build_feed(recipe, bad_clips=world.folder / "bad.jsonl")
    plan = feed.plan(0)
    shown = {row for index in range(plan.num_microbatches) for row in request_at(plan, index).rows.tolist()}
    assert shown and not shown & set(rows.tolist())


def test_every_picture_is_paired_and_the_loss_is_that_of_both(world, sections):
    trainer = start(world, **sections)
    task = trainer.task
    assert isinstance(task, DenoiserTask)
    (phase,) = task.phases(trainer.recipe.optim)
    batches, _ = next(trainer.feed.steps(0, 0, 1))
    batch = batches[0]
    assert batch.captions == [INSTANCE] * batch.size + [CLASS] * batch.size
    assert batch.pixels_BCFHW.shape[0] == 2 * batch.size == len(batch.sample_indices)
    assert np.array_equal(batch.sample_indices[batch.size :] - CLASS_INDEX_OFFSET, batch.sample_indices[: batch.size])
    with torch.no_grad():
        both, _ = task.losses(StepContext(0), batch)
        losses, parts = phase.losses(StepContext(0), batch)
    instance, prior = both.chunk(2)
    assert torch.equal(losses, instance + 0.5 * prior) and not torch.equal(instance, prior)
    assert torch.equal(parts["class_loss"], prior) and len(losses) == batch.size
    half = replace(batch, sample_indices=batch.sample_indices[: batch.size])
    assert task.count_tokens(batch) == 2 * task.count_tokens(half)


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_all_weights_or_adapters_train_and_resume_exactly(world, sections, lora):
    sections = {**sections, "lora": lora}
    whole = train(world.recipe("--name", "whole", "--train.steps", "3", **sections))
    train(world.recipe("--name", "parts", "--train.steps", "1", **sections))
    parts = train(world.recipe("--name", "parts", "--train.steps", "3", **sections))
    files = [read_state(step_folder(run / "checkpoints", 3))["files"] for run in (whole, parts)]
    assert files[0] == files[1]
    for line in lines(whole):
        wanted = line["train/instance_loss"] + 0.5 * line["train/class_loss"]
        assert line["train/loss"] == pytest.approx(wanted)
    heavier = {**sections, "dreambooth": {**sections["dreambooth"], "prior_weight": 5}}
    other = train(world.recipe("--name", "other", "--train.steps", "3", **heavier))
    assert [line["train/loss"] for line in lines(other)] != [line["train/loss"] for line in lines(whole)]
    assert read_state(step_folder(other / "checkpoints", 3))["files"] != files[0]


def test_other_class_pictures_are_refused_when_a_run_resumes(world, sections):
    train(world.recipe("--train.steps", "1", **sections))
    (world.folder / "class" / "class-00000.png").rename(world.folder / "class" / "zzz.png")
    with pytest.raises(CheckpointError, match="manifest has changed"):
        train(world.recipe("--train.steps", "2", **sections))


def test_without_a_class_only_the_prompt_is_used(world, sections):
    alone = {**sections, "dreambooth": {"instance_prompt": INSTANCE}}
    trainer = start(world, **alone)
    batches, _ = next(trainer.feed.steps(0, 0, 1))
    assert set(batches[0].captions) == {INSTANCE} and trainer.task.prior_weight is None
    assert not Path(sections["dreambooth"]["class_folder"]).exists()


WRONG = {
    "no prompt": ({"instance_prompt": " "}, "dreambooth.instance_prompt is empty"),
    "no folder": ({"instance_prompt": "a", "class_prompt": "b"}, "dreambooth.class_folder is null"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_found_before_the_run(world, sections, case):
    change, fragment = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        world.recipe(**{**sections, "dreambooth": change})
    assert fragment in str(caught.value), caught.value
    with pytest.raises(ConfigError, match="pairs of pictures of dreambooth are drawn while training"):
        data = {**sections["data"], "frame_start": "first", "cache": {"latents": "x"}}
        world.recipe(**{**sections, "data": data})
