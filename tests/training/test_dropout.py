"""Runs of a model with dropout: they resume and recompute to the bit, and leave as published folders with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from frameloom.checkpoint.reader import load_latest
from frameloom.cli.main import main
from frameloom.data.loading.loader import iterate_batches
from frameloom.interop.export.export import Export, export_run
from frameloom.models.denoisers.cogvideox_fun.weights import read_config
from frameloom.models.layers.dropout import dropout_keys
from frameloom.training.memory.oom_split import cut_batch
from frameloom.training.task import StepContext
from frameloom.training.tasks.denoiser import DenoiserTask
from frameloom.training.train import train
from tests.training.runs import losses, open_trainer

SMALL: dict[str, Any] = {"num_attention_heads": 2, "num_layers": 2, "attention_head_dim": 16, "time_embed_dim": 16}


def sections(dropout: float = 0.1, **more: Any) -> dict[str, Any]:
    model = {"_delete_": True, "family": "cogvideox_fun", "overrides": SMALL | {"dropout": dropout}}
    return {"model": model, "objective": {"kind": "v"}, **more}


def weights(run: Path) -> dict[str, torch.Tensor]:
    latest = load_latest(run / "checkpoints")
    assert latest is not None
    return {f"{group}/{name}": tensor for group, part in latest.tensors.items() for name, tensor in part.items()}


def frameloom(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0


def is_same(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    return losses(one) == losses(other) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_stopped_run_goes_on_to_the_bit(world) -> None:
    path = world.write_recipe(**sections())
    for words in (["--name", "whole", "--train.steps", "4"], ["--name", "parts", "--train.steps", "2"]):
        frameloom("train", str(path), *words)
    # Workers, recompute and torch's own numbers have no say in what is dropped.
    torch.manual_seed(5)
    changed = ["--name", "parts", "--train.steps", "4", "--data.workers", "1", "--train.recompute", "true"]
    frameloom("train", str(path), *changed, "--accept-recipe-change")
    whole, parts = world.folder / "whole", world.folder / "parts"
    assert len(losses(whole)) == 4 and is_same(whole, parts)


def test_dropout_and_the_seed_count(world) -> None:
    dropping = train(world.recipe("--name", "dropping", "--train.steps", "2", **sections()))
    plain = train(world.recipe("--name", "plain", "--train.steps", "2", **sections(0.0)))
    assert losses(dropping) != losses(plain)


def test_micro_batches_drop_what_the_whole_would(world) -> None:
    """A mask follows its sample: halves of a batch have the losses that they have in it."""
    trainer = open_trainer(world.recipe(**sections(0.5)), world.folder / "run")
    task = trainer.task
    assert isinstance(task, DenoiserTask)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        batch = next(iterate_batches(trainer.feed.plan(0), trainer.feed.reader))
        whole, _ = task.losses(StepContext(0), batch)
        pieces = torch.cat([task.losses(StepContext(0), piece)[0] for piece in cut_batch(batch, 2)])
        assert torch.allclose(whole, pieces, rtol=1e-5)
        task.model.eval()
        assert not torch.allclose(task.losses(StepContext(0), batch)[0], whole, rtol=1e-3)


def test_an_export_names_the_dropout_and_loads_again(world, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = train(world.recipe("--train.steps", "1", **sections()))
    folder = export_run(Export(run, "original", out=tmp_path / "out")).out / "transformer"
    content = json.loads((folder / "config.json").read_text())
    assert content["dropout"] == 0.1 and read_config(content).dropout == 0.1
    caplog.clear()
    values = sections()
    values["model"]["weights"] = str(folder)
    again = train(world.recipe("--name", "again", "--train.steps", "1", **values))
    assert "differs from" not in caplog.text
    twice = export_run(Export(again, "original", out=tmp_path / "twice")).out / "transformer"
    assert json.loads((twice / "config.json").read_text()) == content
    assert load_file(next(folder.glob("*.safetensors"))).keys() == load_file(next(twice.glob("*.safetensors"))).keys()


def test_seeds_are_those_of_the_samples() -> None:
    keys = dropout_keys(torch.from_numpy(np.array([1, 2], dtype=np.uint64).view(np.int64)), 0, 7, 3)
    assert keys[:2].tolist() == [3, 7] and len(keys) == 4 and keys.device.type == "cpu"
