"""What processes of a test do with checkpoints that they write and read together, without a model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from frameloom.checkpoint.reader import Checkpoint, find_latest, list_steps
from frameloom.checkpoint.resharding import read_own
from frameloom.checkpoint.writer import Saver
from frameloom.core.errors import FrameloomError
from frameloom.core.random import stream
from frameloom.distributed.context import Collective
from tests.faults.injection import VARIABLE

SHAPES = {"weight": (7, 300), "row": (1, 40), "bias": (5,), "scale": (), "empty": (0, 4), "table": (50, 60)}
Tensors = dict[str, dict[str, Tensor]]


def make_whole(step: int) -> Tensors:
    """What a checkpoint of `step` holds, whoever writes it."""
    draw = stream(step, "weights")
    model = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    moments = {f"exp_avg.{name}": value * 0.5 for name, value in model.items()}
    return {"model": model, "optimizer": moments | {"step": torch.tensor(step)}, "nothing": {}}


def split(whole: Tensors, how: str, rank: int, world: int) -> Tensors:
    """The same as each process holds it: in rows, state by weight, alike on all, or all on the first."""
    if how == "first":
        return whole if rank == 0 else {}
    if how == "alike":
        return whole
    if how == "state":
        names = sorted(whole["optimizer"])
        own = {name: whole["optimizer"][name] for number, name in enumerate(names) if number % world == rank}
        return {**whole, "optimizer": own | {"step": whole["optimizer"]["step"]}}
    mesh: DeviceMesh = init_device_mesh("cpu", (world, 1) if how == "copies" else (world,))
    placements = [Replicate(), Shard(0)] if how == "copies" else [Shard(0)]
    return {
        group: {
            name: distribute_tensor(value, mesh, placements) if value.ndim and value.numel() else value
            for name, value in named.items()
        }
        for group, named in whole.items()
    }


def write(job: Mapping[str, Any], collective: Collective) -> dict[str, Any]:
    """Two steps; training goes on at once, in place."""
    saver = Saver(Path(job["root"]), 5, in_background=job["in_background"], collective=collective)
    for step in (1, 2):
        tensors = split(make_whole(step), job["how"], collective.rank, collective.size)
        saver.save(Checkpoint(step, tensors, {"position": step}))
        for named in tensors.values():
            for value in named.values():
                value.add_(1)
    saver.wait()
    return {"steps": list_steps(Path(job["root"]))}


def read(job: Mapping[str, Any], collective: Collective) -> dict[str, Any]:
    """Whether each part read is the part of the whole, how many numbers were read, and which step it was."""
    stored = find_latest(Path(job["root"]), collective, set_aside=True)
    assert stored is not None
    own = split(make_whole(99), job["how"], collective.rank, collective.size)
    known = collective.broadcast(
        set().union(*collective.gather({(kind, name) for kind, named in own.items() for name in named}))
    )
    with stored.open() as tensors:
        found = read_own(tensors, own, known)
    right = split(make_whole(stored.step), job["how"], collective.rank, collective.size)
    pairs = [(found[kind].pop(name), value) for kind, named in right.items() for name, value in named.items()]
    other = split(make_whole(stored.step + 1), job["how"], collective.rank, collective.size)
    return {
        "step": stored.step,
        "is_same": all(torch.equal(to_local(mine), to_local(value)) for mine, value in pairs),
        "is_other": torch.equal(to_local(pairs[-1][0]), to_local(other["optimizer"]["step"])),
        "left_over": [name for named in found.values() for name in named],
        "numbers": sum(to_local(mine).numel() for mine, _ in pairs),
    }


def to_local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def fail(job: Mapping[str, Any], collective: Collective) -> dict[str, Any]:
    """The save of step 2 fails on one process; the next one does not."""
    os.environ[VARIABLE] = json.dumps([{"point": "save", "rank": 1, "step": 2, "message": "the disk is gone"}])
    root, noted = Path(job["root"]), []
    saver = Saver(root, 5, in_background=job["in_background"], collective=collective, on_error=lambda: noted.append(1))
    told = ""
    for step in (1, 2):
        try:
            saver.save(Checkpoint(step, split(make_whole(step), job["how"], collective.rank, collective.size), {}))
            saver.wait()
        except (FrameloomError, RuntimeError) as error:
            told = f"{type(error).__name__}: {error}"
    del os.environ[VARIABLE]
    collective.broadcast(None)
    names = sorted(path.name for path in root.iterdir())
    collective.gather(None)
    saver.save(Checkpoint(3, split(make_whole(3), job["how"], collective.rank, collective.size), {}))
    saver.wait()
    return {"told": told, "noted": len(noted), "names": names, "steps": list_steps(root)}


def look_elsewhere(job: Mapping[str, Any], collective: Collective) -> dict[str, Any]:
    """One process has another disk under the same name."""
    root = Path(job["root"]) if collective.rank == 0 else Path(job["root"]) / "elsewhere"
    told = []
    for act in (
        lambda: find_latest(root, collective),
        lambda: Saver(root, 5, collective=collective).save(
            Checkpoint(9, split(make_whole(9), "rows", collective.rank, collective.size), {})
        ),
    ):
        try:
            act()
        except FrameloomError as error:
            told.append(str(error))
    return {"told": told, "steps": list_steps(Path(job["root"]))}


ACTS: dict[str, Callable[[Mapping[str, Any], Collective], dict[str, Any]]] = {
    "write": write,
    "read": read,
    "fail": fail,
    "elsewhere": look_elsewhere,
}


def run_saving(job: Mapping[str, Any], rank: int) -> None:
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=limit)
    try:
        found = ACTS[job["act"]](job, Collective(dist.new_group(backend="gloo", timeout=limit)))
    finally:
        dist.destroy_process_group()
    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    (Path(job["out"]) / f"rank-{rank}.json").write_text(json.dumps(found))
