"""Every denoiser family through the real trainer: it trains, resumes to the bit, and samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frameloom.checkpoint.reader import load_latest
from frameloom.config.schema.models import KnownSection
from frameloom.core.errors import ConfigError
from frameloom.data.loading.loader import iterate_batches
from frameloom.sampling.load import load_model
from frameloom.training.run.folder import RunFolder
from frameloom.training.task import StepContext
from frameloom.training.tasks.denoiser import DenoiserTask
from frameloom.training.train import build_trainer, train
from tests.training.runs import losses

IMAGES = {"buckets": {"_delete_": True, "64px": {"1": [1.0, 4]}}}
CLIPS = {"buckets": {"_delete_": True, "64px": {"9": [1.0, 4]}}}
DDPM = {"kind": "v"}
FAMILIES: dict[str, dict[str, Any]] = {
    "sdxl": {
        "model": {"_delete_": True, "family": "sdxl"},
        "objective": {"kind": "epsilon"},
        "data": IMAGES,
        "sample": {"frames": 1},
    },
    "sdxl-edm": {
        "model": {"_delete_": True, "family": "sdxl"},
        "objective": {"kind": "edm"},
        "data": IMAGES,
        "sample": {"frames": 1},
    },
    "latte": {"model": {"_delete_": True, "family": "latte"}, "objective": DDPM},
    "latte-joint": {
        "model": {"_delete_": True, "family": "latte"},
        "objective": {"kind": "epsilon", "betas": "linear"},
        "data": {**CLIPS, "use_image_num": 2},
    },
    "opensora_plan": {"model": {"_delete_": True, "family": "opensora_plan"}, "objective": DDPM},
    "opensora_plan-inpaint": {
        "model": {"_delete_": True, "family": "opensora_plan", "size": "tiny-inpaint"},
        "objective": DDPM,
        "known": {"law": "frames"},
    },
    "cogvideox_fun": {"model": {"_delete_": True, "family": "cogvideox_fun"}, "objective": DDPM},
    "cogvideox_fun-inpaint": {
        "model": {"_delete_": True, "family": "cogvideox_fun", "overrides": {"condition": "inpaint"}},
        "objective": DDPM,
        "known": {"law": "regions"},
    },
    "opensora2": {},
    "opensora2-i2v": {
        "model": {"overrides": {"cond_embed": True}},
        "known": {"law": "ends", "shares": {"i2v_head": 1, "i2v_tail": 1}},
        "data": CLIPS,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_a_family_trains_resumes_to_the_bit_and_samples(world, case: str) -> None:
    sections = FAMILIES[case]
    whole = train(world.recipe("--name", "whole", "--train.steps", "3", **sections))
    short = world.recipe("--name", "parts", "--train.steps", "2", **sections)
    train(short)
    parts = train(world.recipe("--name", "parts", "--train.steps", "3", **sections))
    assert losses(whole) == losses(parts) and len(losses(whole)) == 3
    ours, again = (load_latest(run / "checkpoints") for run in (whole, parts))
    assert ours is not None and again is not None
    assert all(torch.equal(ours.tensors["model"][name], again.tensors["model"][name]) for name in ours.tensors["model"])
    other = train(world.recipe("--name", "other", "--train.steps", "3", "--seed", "43", **sections))
    assert losses(other) != losses(whole)
    sampler = load_model(whole, ["--sample.steps", "2", "--sample.guidance", "2"])
    result = sampler.sample("a red circle", seed=1)
    assert result.frames.shape == (sampler.settings.frames, 64, 64, 3)


def task_of(world, case: str) -> tuple[DenoiserTask, Any]:
    recipe = world.recipe(**FAMILIES[case])
    folder = RunFolder(world.folder / "run")
    folder.path.mkdir()
    trainer = build_trainer(recipe, folder, first_step=1)
    for tracker in trainer.trackers:
        tracker.close()
    task = trainer.task
    assert isinstance(task, DenoiserTask)
    return task, next(iterate_batches(trainer.feed.plan(0), trainer.feed.reader))


def shake(task: DenoiserTask) -> None:
    """Zero-initialised layers would hide every input."""
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


def test_pictures_are_told_their_sizes(world) -> None:
    task, batch = task_of(world, "sdxl")
    shake(task)
    with torch.no_grad():
        told = task.losses(StepContext(0), batch)[0]
        batch.crops.top_left_B2 += 16
        assert not torch.allclose(told, task.losses(StepContext(0), batch)[0])
    sizes = task.conditions.make(batch, 0)["sizes"]
    assert sizes[:, 4:].tolist() == [[batch.bucket.height, batch.bucket.width]] * batch.size


def test_images_beside_clips_have_captions_of_their_own(world) -> None:
    task, batch = task_of(world, "latte-joint")
    shake(task)
    assert batch.images is not None and batch.images.pixels_BCNHW.shape[2] == 2
    with torch.no_grad():
        before = task.losses(StepContext(0), batch)[0]
        batch.images.captions = [["something else entirely"] * 2] * batch.size
        assert not torch.allclose(before, task.losses(StepContext(0), batch)[0])


def test_known_frames_are_those_of_the_law_and_follow_from_the_sample(world) -> None:
    task, batch = task_of(world, "opensora2-i2v")
    known = task.conditions.draw_known(batch, seed=5)
    assert known.shape == (batch.size, 1, 9, batch.bucket.height, batch.bucket.width)
    frames = known[:, 0, :, 0, 0].tolist()
    head, tail = [1] + [0] * 8, [0] * 8 + [1]
    assert all(mask in (head, tail) for mask in frames)
    assert torch.equal(known, task.conditions.draw_known(batch, seed=5))
    drawn = {
        tuple(mask) for seed in range(8) for mask in task.conditions.draw_known(batch, seed)[:, 0, :, 0, 0].tolist()
    }
    assert drawn == {tuple(head), tuple(tail)}
    beside = task.conditions.make(batch, 5)["cond_latents"]
    for mask, cells in zip(frames, beside, strict=True):
        place = 0 if mask == head else -1
        assert cells[0, place].min() == 1 and cells[1:, place].any()
        assert cells[0].sum() == cells[0, place].numel()


def test_an_inpaint_model_without_a_law_is_refused(world) -> None:
    with pytest.raises(ConfigError, match="known is null"):
        train(world.recipe(**{**FAMILIES["opensora2-i2v"], "known": None}))
    with pytest.raises(ConfigError, match="known is set"):
        train(world.recipe(known=KnownSection().model_dump()))
