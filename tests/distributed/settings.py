"""What the processes of these tests are asked to run: settings to compare, and whole runs with things that go wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from frameloom.config.loading.recipe import load_recipe
from frameloom.training.caching import write_caches
from tests.conftest import World
from tests.distributed.jobs import Jobs
from tests.models.text.tiny import make_t5

FAMILIES = {
    "opensora2": {},
    "latte": {"_delete_": True, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16},
}
WORLDS, ZEROS = (2, 4), (0, 1, 2, 3)
# Processes and kinds of splitting where two share a clip: all of them, and of the other family the ends.
SEQUENCES = {
    "opensora2": ((2, 0), (2, 1), (2, 2), (2, 3), (4, 0), (4, 1), (4, 2), (4, 3)),
    "latte": ((2, 0), (2, 3), (4, 3)),
}
# fp32 copies of half-precision weights are what gradients are added up for.
HALF = ("--train.precision", "bf16", "--train.weights_precision", "bf16")
# A first scale so large that gradients overflow, and the scale must shrink alike on all processes.
SCALED = ("--train.precision", "fp16", "--train.loss_scale", "{initial: 1073741824, factor: 64}")
# The bias of attention's keys has no gradient but rounding, which Adam would blow up to a full step.
OPTIM = {"lr": 1e-3, "eps": 1e-3, "clip_norm": 0.5}


def add_settings(jobs: Jobs, shared_world: Path) -> None:
    """One, two and four processes, each kind of splitting, two families."""
    cache = {name: str(jobs.folder / f"{name} cache") for name in ("latents", "text")}
    for family, overrides in FAMILIES.items():
        folder = jobs.folder / f"recipe-{family}"
        folder.mkdir()
        path = World(shared_world, folder).write_recipe(
            model={"family": family, "overrides": overrides},
            data={"buckets": {"64px": {"1": [1.0, 3], "9": [1.0, 3]}}, "frame_start": "first", "cache": cache},
            optim=OPTIM,
            parallel={"data": 4},
        )
        list(write_caches(load_recipe(path)))
        jobs.add(f"{family} alone", 1, path)
        for world in WORLDS:
            for zero in ZEROS:
                jobs.add(f"{family} {world} {zero}", world, path, "--parallel.zero", str(zero))
        for world, zero in SEQUENCES[family]:
            split = ("--parallel.sequence", "2", "--parallel.zero", str(zero))
            jobs.add(f"{family} sequence {world} {zero}", world, path, *split)
        if family == "opensora2":
            add_more(jobs, path)


def add_more(jobs: Jobs, path: Path) -> None:
    """Settings that one family is enough for."""
    jobs.add("wrong scale", 2, path, fault="gradient scale")
    jobs.add("uneven", 3, path, "--parallel.zero", "3")
    jobs.add("hybrid", 4, path, "--parallel.zero", "3", "--parallel.replicate", "2")
    jobs.add("hybrid optimizer", 4, path, "--parallel.zero", "1", "--parallel.replicate", "2")
    split = ("--parallel.data", "1", "--train.accumulate", "4")
    jobs.add("accumulated alone", 1, path, *split)
    for zero in (0, 2, 3):
        jobs.add(f"accumulated {zero}", 2, path, *split, "--parallel.zero", str(zero))
    half = ("--train.precision", "bf16")
    jobs.add("half alone", 1, path, *half)
    jobs.add("half", 2, path, *half, "--parallel.zero", "3")
    jobs.add("half sent", 2, path, *half, "--parallel.zero", "3", "--parallel.gather", "bf16")
    jobs.add("copies alone", 1, path, *HALF)
    for zero in (0, 1):
        jobs.add(f"copies {zero}", 2, path, *HALF, "--parallel.zero", str(zero))
    jobs.add("scaled alone", 1, path, *SCALED, steps=5)
    for zero in (0, 3):
        jobs.add(f"scaled {zero}", 2, path, *SCALED, "--parallel.zero", str(zero), steps=5)
    jobs.add("wrong scale of shards", 2, path, "--parallel.zero", "3", fault="shard scale")
    jobs.add("wrong scale of a clip", 2, path, "--parallel.sequence", "2", fault="sequence scale")
    adapters = ("--lora.rank", "2")
    jobs.add("adapters alone", 1, path, *adapters)
    jobs.add("adapters", 2, path, *adapters, "--parallel.zero", "3")


def add_judged(jobs: Jobs, shared: Path) -> None:
    """An autoencoder against a discriminator."""
    folder = jobs.folder / "judged"
    folder.mkdir()
    path = World(shared, folder).write_recipe(
        task="autoencoder",
        autoencoder={"discriminator": {"channels": 4, "num_layers": 2, "update": "both"}},
        data={"buckets": {"_delete_": True, "64px": {"5": [1.0, 1]}}, "frame_start": "first"},
        optim=OPTIM,
        parallel={"data": 2},
    )
    jobs.add("judged alone", 1, path, steps=3)
    for zero in (0, 1):
        jobs.add(f"judged {zero}", 2, path, "--parallel.zero", str(zero), steps=3)


def write_recipe(
    jobs: Jobs, shared: Path, name: str, data: dict[str, object] | None = None, **sections: object
) -> Path:
    folder = jobs.folder / name
    folder.mkdir()
    buckets = {"buckets": {"64px": {"1": [1.0, 3], "9": [1.0, 3]}}, "frame_start": "first"}
    return World(shared, folder).write_recipe(
        data=buckets | (data or {}), optim={"lr": 1e-3, "eps": 1e-3}, parallel={"data": 4}, **sections
    )


def copy_with_a_broken_clip(shared: Path, folder: Path) -> dict[str, object]:
    shutil.copytree(shared / "data", folder)
    clip = sorted(folder.rglob("*.mp4"))[0]
    clip.write_bytes(clip.read_bytes()[:200])
    return {"manifest": str(folder / "manifest.parquet"), "bad_limit": 0.5}


def add_runs(jobs: Jobs, shared_world: Path) -> None:
    """Whole runs; the last ones end their processes."""
    path = write_recipe(jobs, shared_world, "runs")

    def whole(name: str, world: int, run: str, *overrides: str, **more: object) -> None:
        jobs.add(name, world, path, "--name", run, *overrides, kind="whole", **more)

    whole("alone", 1, "alone", "--train.steps", "6")
    whole("moved a", 2, "moved", "--train.steps", "2", "--parallel.zero", "1")
    whole("moved b", 4, "moved", "--train.steps", "4", "--parallel.zero", "3", "--train.async_save", "true")
    whole("moved c", 1, "moved", "--train.steps", "6")
    prompts = (
        "--validation.samples.prompts",
        '["a red circle moves left"]',
        "--validation.batches",
        "0",
        "--validation.samples.steps",
        "2",
        "--train.steps",
        "2",
    )
    whole("drawn alone", 1, "drawn-alone", *prompts)
    whole("drawn", 2, "drawn", *prompts, "--parallel.sequence", "2")
    whole("stopped", 2, "stopped", "--train.steps", "6", "--parallel.zero", "2", fault="sigterm on rank 1")
    unsaved = ("--train.steps", "60", "--train.save_every", "2", "--parallel.zero", "2", "--train.async_save", "true")
    whole("unsaved", 2, "unsaved", *unsaved, fault="disk full on rank 1")
    whole("nan", 2, "nan", "--train.on_nonfinite", "stop", fault="nan on rank 1")
    whole("other", 2, "other", overrides_of={"1": ["--optim.lr", "2e-3", "--seed", "7"]})
    broken = write_recipe(
        jobs, shared_world, "broken", copy_with_a_broken_clip(shared_world, jobs.folder / "broken data")
    )
    jobs.add("broken alone", 1, broken)
    jobs.add("broken", 2, broken)
    plain = write_recipe(jobs, shared_world, "plain")
    jobs.add("plain alone", 1, plain)
    for encoders in ("once", "shard"):
        jobs.add(f"plain {encoders}", 2, plain, "--parallel.encoders", encoders)
    jobs.add("encoders", 3, plain, kind="encoders", t5=str(make_t5(jobs.folder / "t5")))
    add_split_layers(jobs, shared_world)
    # The last jobs of these processes: one that ends is noticed by its connections.
    whole("failing", 2, "failing", fault="error on rank 1", processes=[2, 3])
    whole("killed", 2, "killed", fault="kill rank 1")


def add_split_layers(jobs: Jobs, shared: Path) -> None:
    """Text encoders whose layers two processes split: their states, and runs that use them."""
    folders = {kind: str(make_t5(jobs.folder / f"layers {kind}", kind=kind)) for kind in ("t5", "mt5")}
    encoder = {"name": "t5", "path": folders["t5"], "max_length": 16, "precision": "fp32"}
    latte = {"family": "latte", "overrides": FAMILIES["latte"]}
    path = write_recipe(jobs, shared, "with layers", text={"encoders": [encoder]}, model=latte)
    other = json.dumps([{**encoder, "path": str(make_t5(jobs.folder / "other layers", seed=1))}])
    split = ("--parallel.encoders", "tensor", "--parallel.tensor", "2")
    jobs.add("layers", 2, path, *split, kind="layers", encoders=folders)
    jobs.add("layers alone", 1, path)
    jobs.add("layers of another", 1, path, "--text.encoders", other, steps=1)
    jobs.add("layers 2", 2, path, *split)
    jobs.add("layers 4", 4, path, *split, "--parallel.zero", "3", "--parallel.sequence", "2")
