"""Preflight runs every bucket before the first step and leaves the run unchanged."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frameloom.checkpoint.reader import load_latest, read_state, step_folder
from frameloom.core.errors import ConfigError, RunError
from frameloom.training.caching import write_caches
from frameloom.training.loop import Trainer
from frameloom.training.memory.preflight import run_preflight
from frameloom.training.train import train
from tests.faults.injection import VARIABLE
from tests.training.runs import open_trainer

LONG = "64px 9f 3:2"
WANTED = ("--train.preflight", "true")


def fail(monkeypatch: pytest.MonkeyPatch, *faults: dict[str, Any]) -> None:
    injected = [{"point": "pass", "act": "memory", **fault} for fault in faults]
    monkeypatch.setenv(VARIABLE, json.dumps(injected))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in (record.getMessage() for record in caplog.records) if text.startswith("preflight")]


def digests(run: Path) -> dict[str, str]:
    return dict(read_state(step_folder(run / "checkpoints", 4))["files"])


def train_with_and_without(world: Any, *words: str, **sections: Any) -> list[dict[str, str]]:
    words = ("--train.steps", "4", "--train.save_every", "4", *words)
    runs = [train(world.recipe("--name", "plain", *words, **sections))]
    runs.append(train(world.recipe("--name", "checked", *WANTED, *words, **sections)))
    return [digests(run) for run in runs]


def test_a_run_with_preflight_equals_one_without(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = {name: str(world.folder / name) for name in ("latents", "text")}
    sections = {"data": {"frame_start": "first", "cache": cache}}
    list(write_caches(world.recipe(**sections)))
    with caplog.at_level(logging.INFO):
        plain, other = train_with_and_without(world, "--train.accumulate", "2", **sections)
    assert plain == other
    lines = messages(caplog)
    assert len(lines) == 4 and lines[0].startswith(f"preflight: bucket {LONG}, batch 4: ")


def test_two_networks_and_clips_from_files_are_as_before(world: Any) -> None:
    """Running statistics of a discriminator move in each pass; they are put back."""
    section = {"discriminator": {"update": "both", "channels": 4, "num_layers": 2}, "image_share": 0.5}
    data = {"buckets": {"_delete_": True, "64px": {"9": [1.0, 4]}}}
    plain, other = train_with_and_without(world, task="autoencoder", autoencoder=section, data=data)
    assert plain == other


def make_trainer(world: Any, *words: str, **sections: Any) -> Trainer:
    return open_trainer(world.recipe(*words, **sections), world.folder / "run")


def test_a_bucket_that_does_not_fit_is_halved_before_the_first_step(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail(monkeypatch, {"bucket": LONG, "samples_over": 1, "step": 0})
    with caplog.at_level(logging.INFO):
        run = train(world.recipe(*WANTED, "--train.steps", "1"))
    last = load_latest(run / "checkpoints")
    assert last is not None and last.state["halved"] == {LONG: 1}
    lines = messages(caplog)
    assert [("do not fit" in text, "at most 2" in text, "at most 1" in text) for text in lines[:2]] == [
        (True, True, False),
        (True, False, True),
    ]
    assert lines[2].startswith(f"preflight: bucket {LONG}, batch 4, 1 at once: ")
    fail(monkeypatch, {"bucket": LONG, "step": 0})
    with pytest.raises(RunError, match=f"bucket {LONG}: not even one sample fits"):
        train(world.recipe(*WANTED, "--name", "other"))
    assert not (world.folder / "other" / "checkpoints").exists()


def test_every_bucket_of_the_epoch_is_tried_out_at_its_largest(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(world, *WANTED)
    before = {name: weight.clone() for name, weight in trainer.task.model.named_parameters()}
    with caplog.at_level(logging.INFO):
        run_preflight(trainer)
    plan = trainer.feed.plan(0)
    sizes: dict[str, int] = {}
    for bucket, size in zip(plan.buckets, np.diff(plan.starts), strict=True):
        name = trainer.feed.policy.buckets[bucket].name
        sizes[name] = max(sizes.get(name, 0), int(size))
    found = [line.rpartition(":")[0] for line in messages(caplog)]
    assert sorted(found) == sorted(f"preflight: bucket {name}, batch {size}" for name, size in sizes.items())
    for name, weight in trainer.task.model.named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None


@pytest.mark.parametrize(
    ("value", "device", "runs"), [("auto", "cpu", False), ("auto", "cuda", True), ("true", "cpu", True)]
)
def test_auto_runs_it_on_a_gpu(world: Any, value: str, device: str, runs: bool) -> None:
    trainer = make_trainer(world, "--train.preflight", value)
    trainer.feed = replace(trainer.feed, device=torch.device(device), plan={}.__getitem__)
    with pytest.raises(KeyError) if runs else nullcontext():
        run_preflight(trainer)


def test_the_recipe_refuses_other_words(world: Any) -> None:
    with pytest.raises(ConfigError, match="true, false or auto"):
        world.recipe("--train.preflight", "sometimes")
