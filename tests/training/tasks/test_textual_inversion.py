"""Textual inversion through the real loop: only the word learns, a resume is exact, and the word can be used."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from frameloom.builders.text import read_word
from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.checkpoint.reader import load_latest
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.models.registry import get_denoiser
from frameloom.sampling.load import load_model
from frameloom.sampling.pipeline import encode_prompts
from frameloom.training.run.folder import RunFolder
from frameloom.training.run.resuming import ResumeChoices
from frameloom.training.tasks.denoiser import DenoiserTask
from frameloom.training.train import build_trainer, train
from tests.models.text.tiny import POSITIONS, make_sdxl

WORD = "<toy>"


def write_base(folder: Path, text: dict[str, int] | None = None) -> Path:
    """Weights to start from: layers that start from zeros would hide the text."""
    family = get_denoiser("sdxl")
    widths = text or {"text_width": 16 + 24, "pooled_width": 24 + 4}
    config = family.configure("tiny", latent_channels=4, overrides={}, **widths)
    model = family.build(config, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    tensors = dict(model.state_dict())
    write_model_folder(folder, kind="denoiser", name="sdxl", config=dataclasses.asdict(config), tensors=tensors)
    return folder


@pytest.fixture
def sections(world) -> dict[str, Any]:
    """SDXL at its smallest, with real text encoders."""
    folder = str(make_sdxl(world.folder / "text"))
    encoders = [{"name": name, "path": folder, "max_length": POSITIONS} for name in ("clip_l", "clip_bigg")]
    return {
        "model": {"_delete_": True, "family": "sdxl", "weights": str(write_base(world.folder / "base"))},
        "objective": {"kind": "epsilon"},
        "text": {"encoders": encoders},
        "data": {"buckets": {"_delete_": True, "64px": {"1": [1.0, 4]}}},
        "sample": {"frames": 1, "steps": 2, "guidance": 2.0},
        "inversion": {"placeholder": WORD, "num_vectors": 2, "initializer": "red"},
        "optim": {"lr": 1e-2},
    }


def vectors(run: Path) -> dict[str, torch.Tensor]:
    found = load_latest(run / "checkpoints")
    assert found is not None
    return found.tensors["model"]


def start(world, **sections: Any):
    folder = RunFolder(world.folder / "run")
    folder.path.mkdir(exist_ok=True)
    trainer = build_trainer(world.recipe(**sections), folder, first_step=1)
    for tracker in trainer.trackers:
        tracker.close()
    return trainer


def test_only_the_vectors_learn_and_the_loss_falls(world, sections):
    trainer = start(world, **sections)
    task = trainer.task
    assert isinstance(task, DenoiserTask) and task.part is not None and task.part.key == "inversion"
    assert {name: tuple(part.shape) for name, part in task.model.named_parameters()} == {
        "clip_l": (2, 16),
        "clip_g": (2, 24),
    }
    frozen = [*task.denoiser.model.parameters(), *(p for e in task.text.encoders for p in e.load().parameters())]
    frozen = [part for part in frozen if not any(part is own for own in task.model.parameters())]
    before = [part.clone() for part in frozen]
    first = {name: part.detach().clone() for name, part in task.model.named_parameters()}
    batches, _ = next(trainer.feed.steps(0, 0, 1))
    assert all(WORD in caption for caption in batches[0].captions) and len(set(batches[0].captions)) > 1
    losses = []
    for _ in range(12):
        losses.append(trainer.stepper.step(1, batches).values["loss"])
    assert losses[-1] < losses[0]
    assert all(torch.equal(*pair) for pair in zip(frozen, before, strict=True))
    assert not any(torch.equal(part, first[name]) for name, part in task.model.named_parameters())


def test_a_resume_is_exact_and_the_export_is_what_diffusers_reads(world, sections):
    whole = train(world.recipe("--name", "whole", "--train.steps", "3", **sections))
    train(world.recipe("--name", "parts", "--train.steps", "2", **sections))
    parts = train(world.recipe("--name", "parts", "--train.steps", "3", **sections))
    ours, again = vectors(whole), vectors(parts)
    assert set(ours) == {"clip_l", "clip_g"} and all(torch.equal(ours[name], again[name]) for name in ours)
    other = vectors(train(world.recipe("--name", "other", "--train.steps", "3", "--seed", "9", **sections)))
    assert not torch.equal(ours["clip_g"], other["clip_g"])
    exported = load_file(whole / "export" / "learned_embeds.safetensors")
    assert {name: tuple(part.shape) for name, part in exported.items()} == {"clip_l": (2, 16), "clip_g": (2, 24)}
    assert read_word(whole).placeholder == WORD
    with pytest.raises(CheckpointError, match=r"inversion\.num_vectors 2"):
        changed = {**sections, "inversion": {**sections["inversion"], "num_vectors": 1}}
        train(
            world.recipe("--name", "whole", "--train.steps", "4", **changed), ResumeChoices(accept_recipe_change=True)
        )
    with pytest.raises(CheckpointError, match="inversion"):
        recipe = world.recipe("--name", "whole", "--train.steps", "4", **{**sections, "inversion": None})
        train(recipe, ResumeChoices(accept_recipe_change=True))


def test_the_word_is_used_by_samples_by_its_run_and_by_other_runs(world, sections):
    samples = {"prompts": [f"a {WORD}"], "every": 2, "seed": 3}
    run = train(world.recipe("--train.steps", "2", validation={"batches": 0, "samples": samples}, **sections))
    assert len(list((run / "samples").rglob("*.png"))) == 2
    sampler = load_model(run)
    told, _ = encode_prompts(sampler, [sampler.request(f"a {WORD}")])
    result = sampler.sample(f"a {WORD}", seed=3)
    assert result.frames.shape == (1, 64, 64, 3)
    plain = {**sections, "inversion": None}
    base = train(world.recipe("--name", "base", "--train.steps", "1", **plain))
    with_word = load_model(base, ["--sample.words", f"[{run}]"])
    assert torch.equal(encode_prompts(with_word, [with_word.request(f"a {WORD}")])[0].tokens_BKD, told.tokens_BKD)
    plain = load_model(base)
    without, _ = encode_prompts(plain, [plain.request(f"a {WORD}")])
    assert not torch.allclose(without.tokens_BKD, told.tokens_BKD, atol=1e-3)
    raw = load_model(run, ["--sample.weights", "raw"]).sample(f"a {WORD}", seed=3)
    assert isinstance(raw.frames, np.ndarray)


def test_templates_come_from_a_file_or_are_the_captions(world, sections):
    file = world.folder / "templates.txt"
    file.write_text("one {}\n\ntwo {} here\n")
    inversion = {**sections["inversion"], "template_file": str(file)}
    batches, _ = next(start(world, **{**sections, "inversion": inversion}).feed.steps(0, 0, 1))
    assert set(batches[0].captions) <= {f"one {WORD}", f"two {WORD} here"}
    file.write_text("no word\n")
    with pytest.raises(ConfigError, match=r"template_file: .* has 'no word'"):
        start(world, **{**sections, "inversion": inversion})
    with pytest.raises(ConfigError, match="no caption has '<toy>'"):
        start(world, **{**sections, "inversion": {**sections["inversion"], "templates": "captions"}})


def test_vectors_start_from_a_file_with_as_many(world, sections):
    run = train(world.recipe("--train.steps", "1", **sections))
    inversion = {**sections["inversion"], "weights": str(run)}
    trainer = start(world, **{**sections, "inversion": inversion})
    exported = load_file(run / "export" / "learned_embeds.safetensors")
    assert torch.equal(trainer.task.model["clip_g"], exported["clip_g"])
    with pytest.raises(ConfigError, match=r"has 2 vectors, but inversion\.num_vectors is 3"):
        start(world, **{**sections, "inversion": {**inversion, "num_vectors": 3}})


WRONG = {
    "lora too": ({"lora": {"rank": 2}}, "lora is set, but inversion trains the vectors of a word"),
    "text cache": ({"data": {"cache": {"text": "x"}}}, "cached text states know nothing"),
    "other encoder": ({"text": {"encoders": [{"name": "minilm"}]}}, "only clip_l and clip_bigg learn words"),
    "other family": ({"model": {"_delete_": True, "family": "opensora2"}}, "needs task denoiser and model.family sdxl"),
    "space": ({"inversion": {"placeholder": "a b"}}, "inversion.placeholder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_found_before_the_run(world, sections, case):
    change, fragment = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        world.recipe(**{**sections, **change})
    assert fragment in str(caught.value), caught.value
