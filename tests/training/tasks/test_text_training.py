"""Text encoders that train with the denoiser: their own rate, resumes to the bit, sampling and folders of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frameloom.checkpoint.reader import load_latest, read_state, step_folder
from frameloom.core.errors import CheckpointError
from frameloom.models.text.base import build_text_encoder
from frameloom.sampling.load import load_model
from frameloom.training.run.folder import RunFolder
from frameloom.training.run.resuming import ResumeChoices
from frameloom.training.train import build_trainer, train
from tests.models.text.tiny import POSITIONS, make_sdxl
from tests.training.tasks.test_textual_inversion import write_base

SETTINGS = {"steps": 4, "save_every": 2, "log_every": 1}


@pytest.fixture
def sections(world: Any) -> dict[str, Any]:
    """SDXL at its smallest, the first of its two real text encoders training."""
    folder = str(make_sdxl(world.folder / "text"))
    encoders = [{"name": name, "path": folder, "max_length": POSITIONS} for name in ("clip_l", "clip_bigg")]
    encoders[0] |= {"train": True, "lr": 1e-4}
    return {
        "model": {"_delete_": True, "family": "sdxl", "weights": str(write_base(world.folder / "base"))},
        "objective": {"kind": "epsilon"},
        "text": {"encoders": encoders, "dropout": 0.5},
        "data": {"buckets": {"_delete_": True, "64px": {"1": [1.0, 2]}}},
        "sample": {"frames": 1, "steps": 2, "guidance": 2.0},
        "optim": {"lr": 1e-3, "weight_decay": 0.1},
        "train": SETTINGS,
    }


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def beside(run: Path) -> dict[str, Tensor]:
    found = load_latest(run / "checkpoints")
    assert found is not None
    return found.tensors["beside"]


def test_a_trained_encoder_moves_at_its_own_rate_and_the_other_stays(world: Any, sections: dict[str, Any]) -> None:
    folder = RunFolder(world.folder / "run")
    folder.path.mkdir()
    trainer = build_trainer(world.recipe(**sections), folder, first_step=1)
    for tracker in trainer.trackers:
        tracker.close()
    first, second = (encoder.load() for encoder in trainer.task.text.encoders)
    before, other = weights(first), weights(second)
    rates = {group["lr_factor"]: group["weight_decay"] for group in trainer.stepper.updates[0].optimizer.param_groups}
    assert set(rates) == {1.0, 0.1}
    trainer.take_step(next(trainer.feed.steps(0, 0, 1))[0])
    moved = {name: (value.detach() - before[name]).abs().max().item() for name, value in first.named_parameters()}
    # The first step of AdamW moves by the rate; states are those before the last block, which so learns nothing.
    assert max(moved.values()) == pytest.approx(1e-4, rel=0.1)
    last = f"layers.{first.config.num_hidden_layers - 1}."
    still = {name for name, size in moved.items() if size == 0}
    assert still == {name for name in moved if "final_layer_norm" in name or last in name}
    assert all(torch.equal(value, other[name]) for name, value in second.named_parameters())
    assert not any(value.requires_grad for value in second.parameters())


def test_it_resumes_to_the_bit_samples_and_is_written_as_a_folder(world: Any, sections: dict[str, Any]) -> None:
    whole = train(world.recipe("--name", "whole", **sections))
    train(world.recipe("--name", "parts", "--train.steps", "2", **sections))
    parts = train(world.recipe("--name", "parts", **sections))
    files = [read_state(step_folder(run / "checkpoints", 4))["files"] for run in (whole, parts)]
    assert files[0] == files[1] and "beside.safetensors" in files[0]
    assert {name.split(".")[1] for name in beside(whole)} == {"0"}
    trained = {name.removeprefix("text_encoders.0."): value for name, value in beside(whole).items()}
    for sampler in (load_model(whole), load_model(whole / "export")):
        own = weights(sampler.text.encoders[0].load())
        assert all(torch.equal(own[name], trained[name]) for name in trained)
    path = whole / "text_encoders" / "0"
    again = build_text_encoder("clip_l", max_length=POSITIONS, path=str(path), options={})
    first = build_text_encoder("clip_l", max_length=POSITIONS, path=str(world.folder / "text"), options={})
    states = [encoder.encode(["a red circle"]).tokens_BKD for encoder in (again, first)]
    assert torch.equal(states[0], load_model(whole).text.encoders[0].encode(["a red circle"]).tokens_BKD)
    assert not torch.equal(states[0], states[1])

    frozen = {
        **sections["text"],
        "encoders": [dict(item, train=False, lr=None) for item in sections["text"]["encoders"]],
    }
    with pytest.raises(CheckpointError, match=r"text\.encoders\.N\.train was switched"):
        recipe = world.recipe("--name", "whole", "--train.steps", "6", **{**sections, "text": frozen})
        train(recipe, ResumeChoices(accept_recipe_change=True))
