"""Samples that are drawn while a run trains: they show what the run has learnt, and change nothing of it."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frameloom.checkpoint.reader import list_steps, read_state, step_folder
from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import ConfigError
from frameloom.data.media.decode import read_clip
from frameloom.data.media.writing import read_metadata
from frameloom.sampling.load import load_model
from frameloom.sampling.outputs import Sample, write_samples
from frameloom.training.logging import samples as samples_module
from frameloom.training.logging.samples import TrainingSamples, evaluating
from frameloom.training.logging.trackers import is_resource_error
from frameloom.training.run.folder import RunFolder
from frameloom.training.train import build_trainer, train

PROMPTS = ["a red circle", "a blue square moves left"]
SAMPLES = {"prompts": PROMPTS, "every": 2, "steps": 2, "guidance": 2.0, "seed": 7, "at_start": True}
FAST = ("--train.steps", "4", "--optim.lr", "1e-2")


def validation(**more: Any) -> dict[str, Any]:
    return {"batches": 0, "samples": {**SAMPLES, **more}}


def digests(run: Path, step: int) -> dict[str, str]:
    return dict(read_state(step_folder(run / "checkpoints", step))["files"])


def pixels(path: Path) -> np.ndarray:
    return read_clip(path, indices=np.arange(9), height=64, width=64).numpy()


def test_samples_are_those_of_the_checkpoint_and_leave_the_run_as_it_is(world, tmp_path):
    plain = train(world.recipe(*FAST, "--name", "plain"))
    run = train(world.recipe(*FAST, "--name", "sampled", validation=validation()))
    assert digests(run, 4) == digests(plain, 4)
    names = sorted(path.name for path in (run / "samples").iterdir())
    assert names == ["step-00000000", "step-00000002", "step-00000004"]
    files = sorted(path.name for path in (run / "samples" / names[-1]).iterdir())
    assert files == ["a-blue-square-moves-left-seed8.mp4", "a-red-circle-seed7.mp4", "contact-sheet.png"]
    last, middle = (run / "samples" / f"step-0000000{step}" / files[1] for step in (4, 2))
    about = read_metadata(last)
    assert about["prompt"] == PROMPTS[0] and about["step"] == "4" and about["sample.steps"] == "2"
    # The same file comes from `frameloom sample` with the same settings: averaged weights, noise from the seed.
    sampler = load_model(run, ["--sample.steps", "2", "--sample.guidance", "2"])
    again = write_samples([sampler.sample(PROMPTS[0], seed=7)], tmp_path)[0]
    assert np.array_equal(pixels(again), pixels(last))
    assert not np.array_equal(pixels(middle), pixels(last))


def test_a_resumed_run_draws_what_was_missed_and_what_follows(world):
    recipe = world.recipe(*FAST, validation=validation(at_start=False), train={"keep": 9})
    run = train(recipe)
    assert sorted(path.name for path in (run / "samples").iterdir()) == ["step-00000002", "step-00000004"]
    before = {path: path.read_bytes() for path in (run / "samples").rglob("*.mp4")}
    shutil.rmtree(step_folder(run / "checkpoints", 4))
    shutil.rmtree(step_folder(run / "samples", 2))
    train(recipe)
    assert {path: path.read_bytes() for path in (run / "samples").rglob("*.mp4")} == before


def test_lack_of_space_is_told_and_anything_else_ends_the_run(world, monkeypatch, caplog):
    def fail(error: Exception) -> None:
        def write(*arguments: object) -> list[Path]:
            raise error

        monkeypatch.setattr(samples_module, "write_samples", write)

    fail(OSError(errno.ENOSPC, "No space left on device"))
    run = train(world.recipe(*FAST, validation=validation(every=4, at_start=False)))
    assert list_steps(run / "checkpoints")[-1] == 4 and not list((run / "samples").iterdir())
    assert "step 4: no samples, for lack of resources ([Errno 28] No space left on device" in caplog.text
    fail(ValueError("wrong shape"))
    with pytest.raises(ValueError, match="wrong shape"):
        train(world.recipe(*FAST, "--name", "second", validation=validation()))
    assert list_steps(world.folder / "second" / "checkpoints") == [0]


def test_shortages_are_told_from_mistakes():
    assert is_resource_error(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_resource_error(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 TB"))
    assert is_resource_error(MemoryError()) and is_resource_error(OSError(errno.EDQUOT, "quota"))
    assert not is_resource_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_resource_error(OSError(errno.EACCES, "Permission denied"))


def test_every_module_gets_its_own_mode_back():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout()).train()
    model[0].eval()
    with pytest.raises(KeyError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == [True, False, True]


def make_samples(world, *overrides: str, **sections: object) -> TrainingSamples:
    folder = RunFolder(world.folder / "run")
    folder.path.mkdir(exist_ok=True)
    trainer = build_trainer(world.recipe(*overrides, **sections), folder, first_step=1)
    for tracker in trainer.trackers:
        tracker.close()
    assert trainer.samples is not None
    return trainer.samples


def generate(samples: TrainingSamples, image: Path | None) -> Sample:
    request = samples.requests[0].model_copy(update={"prompt": "a circle", "seed": 1, "image": image})
    (sample,) = replace(samples, requests=(request,)).generate(0, None)
    return sample


def test_an_image_to_video_model_starts_from_the_given_picture(world):
    pictures = []
    for name, color in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        pictures.append(world.folder / f"{name}.png")
        Image.new("RGB", (80, 64), color).save(pictures[-1])
    samples = make_samples(
        world,
        model={"overrides": {"cond_embed": True}},
        known={"law": "ends", "shares": {"i2v_head": 1}},
        data={"buckets": {"_delete_": True, "64px": {"9": [1.0, 4]}}},
        validation=validation(prompts=["a circle", "a circle"], images=[str(path) for path in pictures], steps=1),
    )
    with torch.no_grad():  # layers that start from zeros would hide every input
        for parameter in samples.task.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert [request.image for request in samples.requests] == pictures
    seen = []
    for image in (pictures[0], pictures[1], None):
        seen.append(generate(samples, image).frames.astype(int))
    assert np.abs(seen[0] - seen[1]).max() > 0 and np.abs(seen[0] - seen[2]).max() > 0
    plain = make_samples(world, validation=validation())
    with pytest.raises(ConfigError, match="no input for given frames"):
        generate(plain, pictures[0])


def test_prompts_come_from_a_file_too(world):
    file = world.folder / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    samples = make_samples(world, validation=validation(prompts_file=str(file), frames=1, width=32))
    assert [request.prompt for request in samples.requests] == [*PROMPTS, "one", "two"]
    assert [request.seed for request in samples.requests] == [7, 8, 9, 10]
    settings = samples.settings
    assert (settings.frames, settings.height, settings.width, settings.steps) == (1, 64, 32, 2)


WRONG = {
    "no prompt": ({"prompts": []}, "validation.samples has no prompts"),
    "empty prompt": ({"prompts": ["  "]}, "prompts.0 is empty"),
    "frames": ({"frames": 8}, "validation.samples.frames is 8"),
    "width": ({"width": 60}, "validation.samples.width is 60", "48 or 64"),
    "images": ({"images": ["a.png"]}, "trained without known frames", "2 prompts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_found_before_the_run(world, case):
    change, *fragments = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        world.recipe(validation=validation(**change))
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value


def test_other_recipes_that_ask_for_nothing_or_for_the_impossible_are_refused(world):
    with pytest.raises(ConfigError, match="only a denoiser makes samples"):
        world.recipe(task="autoencoder", validation=validation())
    with pytest.raises(ConfigError, match="nothing would be done"):
        world.recipe(validation={"batches": 0})


def test_the_media_reach_tensorboard(world):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    section = {"trackers": ["jsonl", "tensorboard"]}
    run = train(world.recipe("--train.steps", "2", run=section, validation=validation(every=1, at_start=False)))
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    shown = events.Images("samples/1")
    assert [event.step for event in shown] == [1, 2]
    assert shown[0].encoded_image_string.startswith(b"GIF89a") and (shown[0].width, shown[0].height) == (64, 64)
    assert events.Images("samples/contact-sheet")[0].encoded_image_string.startswith(b"\x89PNG")
    assert all("train/loss" in json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert load_recipe(run / "recipe.yaml", []).validation is not None
