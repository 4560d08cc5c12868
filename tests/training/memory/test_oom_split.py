"""Fault 28: a bucket that does not fit in memory runs in halves, and learns what the whole would have learnt."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frameloom.checkpoint.reader import load_latest
from frameloom.core.errors import RunError
from frameloom.core.random import stream
from frameloom.data.buckets.policy import Bucket
from frameloom.data.loading.batch import Batch, Crops, JointImages
from frameloom.training.loop import Trainer
from frameloom.training.memory.oom_split import (
    BatchLimits,
    FatalOom,
    OomEvent,
    cut_batch,
    find_oom,
    read_notes,
    stop_to_halve,
    take_rows,
)
from frameloom.training.task import Losses, StepContext
from frameloom.training.train import train
from tests.faults.injection import VARIABLE
from tests.training.runs import losses, open_trainer

BUCKET = Bucket(0, "64px", 9, "1:1", 64, 64, 5)
LONG = "64px 9f 3:2"  # in steps 3, 5 and 6 of the runs here
# The bias of attention's keys has no gradient but rounding, which Adam would blow up to a full step.
OPTIM = {"lr": 1e-3, "eps": 1e-3}


def make_batch(size: int = 5, num_images: int = 2, copies: int = 1) -> Batch:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=stream(3, "batch", *shape))

    rows, all_rows = np.arange(size, dtype=np.int64), size * copies
    pairs = draw(all_rows, 2)
    return Batch(
        epoch=1,
        index=4,
        bucket=BUCKET,
        rows=rows,
        sample_indices=np.arange(all_rows, dtype=np.int64) + 100,
        captions=[f"caption {number}" for number in range(all_rows)],
        pixels_BCFHW=draw(all_rows, 3, 2, 4, 4),
        latents=(draw(all_rows, 2, 1, 2, 2), draw(all_rows, 2, 1, 2, 2)),
        text={"tokens_BKD": draw(all_rows, 3, 4)},
        crops=Crops(pairs, pairs + 1, pairs + 2),
        images=JointImages(
            draw(size, 3, num_images, 4, 4),
            np.arange(size * num_images, dtype=np.int64).reshape(size, num_images),
            [[f"image {row} {number}" for number in range(num_images)] for row in range(size)],
            {"tokens_BKD": draw(size * num_images, 3, 4)},
        ),
    )


def test_pieces_hold_every_sample_once_with_all_that_belongs_to_it() -> None:
    batch = make_batch()
    pieces = cut_batch(batch, 3)
    assert [piece.size for piece in pieces] == [2, 2, 1] and [piece.part for piece in pieces] == [0, 2, 4]
    assert np.concatenate([piece.sample_indices for piece in pieces]).tolist() == batch.sample_indices.tolist()
    assert [caption for piece in pieces for caption in piece.captions] == batch.captions
    for name in ("pixels_BCFHW", "control_BCFHW"):
        whole = getattr(batch, name)
        parts = [getattr(piece, name) for piece in pieces]
        assert all(part is None for part in parts) if whole is None else torch.equal(torch.cat(parts), whole)
    for number in (0, 1):
        assert torch.equal(torch.cat([piece.latents[number] for piece in pieces]), batch.latents[number])
    assert torch.equal(torch.cat([piece.text["tokens_BKD"] for piece in pieces]), batch.text["tokens_BKD"])
    assert torch.equal(torch.cat([piece.crops.target_B2 for piece in pieces]), batch.crops.target_B2)
    images = [piece.images for piece in pieces]
    assert torch.equal(torch.cat([part.text["tokens_BKD"] for part in images]), batch.images.text["tokens_BKD"])
    assert [texts for part in images for texts in part.captions] == batch.images.captions
    assert cut_batch(batch, 1) == [batch]


def test_pairs_stay_together() -> None:
    """The second half of a batch of pairs belongs to the first, sample by sample."""
    pieces = cut_batch(make_batch(copies=2), 2)
    assert [piece.rows.tolist() for piece in pieces] == [[0, 1, 2], [3, 4]]
    assert [piece.sample_indices.tolist() for piece in pieces] == [[100, 101, 102, 105, 106, 107], [103, 104, 108, 109]]


def test_fewer_samples_than_passes_are_filled_up_with_what_counts_for_nothing() -> None:
    pieces = cut_batch(take_rows(make_batch(), slice(0, 2)), 4)
    assert [(piece.size, piece.is_filler) for piece in pieces] == [(1, False), (1, False), (1, True), (1, True)]


def test_a_limit_halves_what_did_not_fit_and_leaves_smaller_batches_whole(caplog: pytest.LogCaptureFixture) -> None:
    limits = BatchLimits()
    with caplog.at_level(logging.WARNING):
        limits.halve([OomEvent("a", 9), OomEvent("a", 7), OomEvent("b", 2)], step=3)
    assert limits.most == {"a": 4, "b": 1} and len(caplog.records) == 2
    assert [limits.count_pieces("a", size) for size in (3, 4, 5, 9, 0)] == [1, 1, 2, 3, 1]
    assert limits.count_pieces("c", 100) == 1
    limits.tighten({"a": 6, "c": 3})
    assert limits.most == {"a": 4, "b": 1, "c": 3}


@pytest.mark.parametrize(
    ("error", "is_short"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_only_lack_of_memory_is_a_misfit(error: Exception, is_short: bool) -> None:
    assert (find_oom(error, make_batch()) is not None) == is_short


def fail(monkeypatch: pytest.MonkeyPatch, *faults: dict[str, Any]) -> None:
    told = [{"point": "pass", "act": "memory", **fault} for fault in faults]
    monkeypatch.setenv(VARIABLE, json.dumps(told))


def halvings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "do not fit in memory" in record.getMessage()]


@pytest.mark.parametrize("task", ["denoiser", "autoencoder"])
def test_a_run_whose_bucket_does_not_fit_equals_one_with_more_memory(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, task: str
) -> None:
    extra: dict[str, Any] = {"optim": OPTIM}
    if task == "denoiser":
        extra["text"] = {"dropout": 0.5}
    else:
        extra["autoencoder"] = {"image_share": 0.3}
        extra["optim"] = {**OPTIM, "lr": 1e-4}  # at ten times as much its loss grows, and every rounding with it
    whole = train(world.recipe("--name", "whole", task=task, **extra))
    fail(monkeypatch, {"bucket": LONG, "samples_over": 2}, {"bucket": LONG, "samples_over": 1, "step": [5, 6]})
    with caplog.at_level(logging.WARNING):
        cut = train(world.recipe("--name", "cut", task=task, **extra))
    told = halvings(caplog)
    assert len(told) == 2 and told[0].startswith("step 3: ") and f"bucket {LONG} " in told[0] and "at most 2" in told[0]
    assert "at most 1" in told[1]
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-6)
    ours, theirs = (load_latest(run / "checkpoints") for run in (cut, whole))
    assert ours is not None and theirs is not None
    for name, tensor in theirs.tensors["model"].items():
        assert torch.allclose(ours.tensors["model"][name], tensor, rtol=1e-4, atol=1e-6), name
    assert ours.state["halved"] == {LONG: 1} and theirs.state["halved"] == {}
    assert len(set(losses(whole))) == 6
    if task == "denoiser":  # the control: other draws of noise and of dropped captions
        other = train(world.recipe("--name", "other", "--seed", "7", "--train.steps", "2", **extra))
        assert losses(other) != pytest.approx(losses(whole)[:2], rel=1e-3)


def test_a_halving_is_remembered_after_a_resume_and_forgotten_on_request(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail(monkeypatch, {"bucket": LONG, "samples_over": 2, "step": [1, 2, 3]})
    train(world.recipe("--train.steps", "4"))
    monkeypatch.delenv(VARIABLE)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run = train(world.recipe("--train.steps", "5"))
        assert load_latest(run / "checkpoints").state["halved"] == {LONG: 2}  # type: ignore[union-attr]
        train(world.recipe("--train.steps", "6", "--train.oom_split", "false"))
    assert not halvings(caplog)
    assert load_latest(run / "checkpoints").state["halved"] == {}  # type: ignore[union-attr]


def test_a_single_sample_that_does_not_fit_ends_the_run_with_advice(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, {"bucket": LONG})
    with pytest.raises(RunError, match=r"bucket 64px 9f 3:2: not even one sample fits .*train\.recompute") as found:
        train(world.recipe())
    assert found.value.exit_code == 2
    fail(monkeypatch, {"bucket": LONG, "samples_over": 2})
    with pytest.raises(RunError, match=r"4 samples do not fit .*train\.oom_split is false"):
        train(world.recipe("--name", "strict", "--train.oom_split", "false"))


def make_trainer(world: Any, name: str, **sections: Any) -> Trainer:
    data = {"buckets": {"_delete_": True, "64px": {"9": [1.0, 4]}}}
    return open_trainer(world.recipe(data=data, **sections), world.folder / name)


def test_a_step_that_was_begun_anew_leaves_no_trace(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks that take turns; halves from the start equal those found out in mid-step, to the bit."""
    section = {"discriminator": {"update": "both", "channels": 4, "num_layers": 2, "dropout": 0.2}}
    found = {}
    for name in ("known", "found out", "whole"):
        trainer = make_trainer(world, name, task="autoencoder", autoencoder=section)
        if name == "known":
            trainer.stepper.limits.most[LONG] = 2
        if name == "found out":
            fail(monkeypatch, {"bucket": LONG, "samples_over": 2})
        else:
            monkeypatch.delenv(VARIABLE, raising=False)
        for batches, _ in trainer.feed.steps(0, 0, 1):
            trainer.take_step(batches)
            if trainer.step == 4:
                break
        tensors = trainer.snapshot().tensors
        found[name] = {f"{group} {key}": tensor.clone() for group in tensors for key, tensor in tensors[group].items()}
    assert all(torch.equal(tensor, found["found out"][key]) for key, tensor in found["known"].items())
    assert any(not torch.equal(tensor, found["whole"][key]) for key, tensor in found["known"].items())


def test_where_processes_compute_together_the_halving_waits_for_the_next_start(tmp_path: Path) -> None:
    limits = BatchLimits()
    with pytest.raises(RunError, match="at most 4") as stop:
        stop_to_halve(FatalOom(OomEvent("a", 8, "no memory")), limits, tmp_path, step=12, rank=3)
    assert stop.value.exit_code == 75
    with pytest.raises(RunError):
        stop_to_halve(FatalOom(OomEvent("b", 4, "no memory")), BatchLimits(), tmp_path, step=12, rank=0)
    assert read_notes(tmp_path, after_step=11) == {"a": 4, "b": 2}
    # A checkpoint of that step or a later one was made by a start that knew it.
    assert read_notes(tmp_path, after_step=12) == {}


CHILD = """
import resource, sys, torch
from frameloom.config.loading.recipe import load_recipe
from frameloom.training import train as runs
from frameloom.training.tasks import denoiser

losses, GIGABYTE = denoiser.DenoiserTask.losses, 2**30

def hungry(task, context, batch):
    kept = torch.empty(len(batch.rows) * GIGABYTE, dtype=torch.uint8)
    return losses(task, context, batch)

def limit(trainer):
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + 5 * GIGABYTE // 2
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))

torch.set_num_threads(1)
denoiser.DenoiserTask.losses = hungry
runs.run_preflight = limit
runs.train(load_recipe(sys.argv[1], sys.argv[2:]))
"""


def test_a_real_allocator_that_refuses_is_understood(world: Any) -> None:
    """The system gives a process no more address space: four samples at once are refused, two are not."""
    whole = train(world.recipe("--name", "whole", optim=OPTIM))
    words = [str(world.write_recipe(optim=OPTIM)), "--name", "child"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, *words], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    last = load_latest(world.folder / "child" / "checkpoints")
    assert last is not None and set(last.state["halved"].values()) == {2}
    assert losses(world.folder / "child") == pytest.approx(losses(whole), rel=1e-6)


def test_half_precision_copies_start_anew_too(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of bf16 weights wait in copies that the optimizer owns; both are cleared."""
    more = {"train": {"precision": "bf16", "weights_precision": "bf16"}}
    trainer = make_trainer(world, "half", **more)
    (update,) = trainer.stepper.updates
    assert update.master is not None
    batch = next(batches[0] for batches, _ in trainer.feed.steps(0, 0, 1) if batches[0].bucket.name == LONG)
    trainer.stepper.limits.most[LONG] = 3
    seen: list[float] = []
    losses_of = update.phase.losses

    def watch(context: StepContext, piece: Batch) -> Losses:
        if piece.part == 0:
            params = [*update.params, *update.model.parameters()]
            seen.append(float(sum(0 if param.grad is None else 1 for param in params)))
        elif len(seen) == 1:
            raise MemoryError  # beside the gradients of the first piece
        return losses_of(context, piece)

    watched = replace(update, phase=replace(update.phase, losses=watch))
    replace(trainer.stepper, updates=[watched]).step(1, [batch])
    assert seen == [0, 0] and trainer.stepper.limits.most == {LONG: 1}
