"""Checkpoints that real processes write and read together: any number to any other, errors of one, damage."""

from __future__ import annotations

import fcntl
import json
import math
import os
from pathlib import Path

import pytest
import torch

from frameloom.checkpoint.reader import load_checkpoint, read_state, step_folder
from frameloom.checkpoint.resharding import Layout, Piece, plan_files
from tests.distributed.jobs import Jobs
from tests.distributed.saving import SHAPES, make_whole

pytestmark = pytest.mark.timeout(900)
# (name, processes, how tensors are held, whether a thread writes)
WRITTEN = (
    ("rows", 3, "rows", True),
    ("state", 2, "state", False),
    ("alike", 2, "alike", True),
    ("first", 2, "first", True),
    ("copies", 2, "copies", False),
)
READ = (("rows", 2, "rows"), ("rows", 2, "state"), ("state", 3, "rows"), ("first", 2, "rows"), ("copies", 3, "alike"))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """All of it, done once however many test processes there are."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "saving"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = Jobs(folder)
        if (folder / "done.json").is_file():
            jobs.jobs = json.loads((folder / "done.json").read_text())
            return jobs
        add_all(jobs)
        assert jobs.run() == [0, 0, 0], [jobs.errors(index) for index in range(3)]
        (folder / "done.json").write_text(json.dumps(jobs.jobs))
    return jobs


def add_all(jobs: Jobs) -> None:
    def add(name: str, world: int, act: str, root: str, **more: object) -> None:
        place = str(jobs.folder / "checkpoints" / root)
        jobs.add(name, world, Path(), kind="saving", act=act, root=place, **more)

    for name, world, how, in_background in WRITTEN:
        add(f"write {name}", world, "write", name, how=how, in_background=in_background)
    for name, world, how in READ:
        add(f"read {name} {world} {how}", world, "read", name, how=how)
    for in_background in (True, False):
        name = f"failed {in_background}"
        add(name, 2, "fail", name, how="rows", in_background=in_background)
    add("write elsewhere", 2, "write", "elsewhere", how="rows", in_background=False)
    add("elsewhere", 2, "elsewhere", "elsewhere")


def ranks(jobs: Jobs, name: str) -> list[dict[str, object]]:
    return jobs.found(name).ranks


@pytest.mark.parametrize("name", [name for name, *_ in WRITTEN])
def test_one_process_reads_what_many_wrote_bit_for_bit(saved, name):
    for step in (1, 2):
        found = load_checkpoint(step_folder(saved.folder / "checkpoints" / name, step))
        right, other = make_whole(step), make_whole(step + 1)
        assert found.tensors.keys() == right.keys() and found.state["position"] == step
        for kind, named in right.items():
            assert found.tensors[kind].keys() == named.keys()
            assert all(torch.equal(found.tensors[kind][key], value) for key, value in named.items())
        assert not torch.equal(found.tensors["model"]["weight"], other["model"]["weight"])


@pytest.mark.parametrize("case", READ)
def test_any_number_of_processes_reads_its_parts_of_any_others(saved, case):
    name, world, how = case
    found = ranks(saved, f"read {name} {world} {how}")
    assert [rank["step"] for rank in found] == [2] * world
    assert all(rank["is_same"] and not rank["is_other"] for rank in found)
    assert all(rank["left_over"] == [] for rank in found)
    if how == "rows":
        whole = sum(value.numel() for named in make_whole(0).values() for value in named.values())
        assert max(rank["numbers"] for rank in found) < 0.75 * whole


def test_everyone_writes_its_part_and_what_all_have_is_written_once(saved):
    root = saved.folder / "checkpoints"
    for name, world, how, _ in WRITTEN:
        folder = step_folder(root / name, 2)
        state = read_state(folder)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.suffix == ".safetensors"}
        assert state["format"] == 3 and state["files"].keys() == sizes.keys()
        if how == "first":
            assert set(sizes) == {"model.safetensors", "optimizer.safetensors", "nothing.safetensors"}
            assert "placement" not in state
            continue
        assert "placement" in state and f"model-0000{world}-of-0000{world}.safetensors" in sizes
        assert sum(size for file, size in sizes.items()) < 1.2 * 8 * sum(math.prod(shape) for shape in SHAPES.values())


def test_an_error_of_one_process_reaches_all_and_leaves_nothing(saved):
    for in_background in (True, False):
        found = ranks(saved, f"failed {in_background}")
        for rank, told in enumerate(found):
            kind = "RuntimeError: the disk is gone" if rank == 1 else "CheckpointError"
            assert told["told"].startswith(kind) and "the disk is gone" in told["told"]
            assert told["names"] == ["step-00000001"] and told["steps"] == [1, 3]
            assert told["noted"] == (1 if in_background else 0)
        assert "rank 1: RuntimeError: the disk is gone" in found[0]["told"] and "bytes" in found[0]["told"]


def test_a_process_that_does_not_see_the_files_stops_all_and_damages_nothing(saved):
    found = ranks(saved, "elsewhere")
    for rank in found:
        assert "rank 0 sees" in rank["told"][0] and "rank 1 does not see it" in rank["told"][0]
        assert "step-00000009: could not be saved (rank 1:" in rank["told"][1]
        assert rank["steps"] == [1, 2]
    assert not list((saved.folder / "checkpoints" / "elsewhere").glob(".partial-*"))


def test_what_several_hold_is_shared_out_by_size():
    sizes = {f"layer {number}": 100 * (number + 1) for number in range(9)}
    alike: Layout = {"model": {name: Piece((size,), (0,), (size,), 4) for name, size in sizes.items()}}
    own: Layout = {"model": {**alike["model"], "own": Piece((9000,), (0,), (9000,), 4)}}
    plan = plan_files([alike, alike, own])
    loads = [
        sum((own["model"][name].num_bytes for members in files.values() for _, name in members), 0)
        for files in plan.files
    ]
    assert loads[2] == 36_000 and abs(loads[0] - loads[1]) <= 400 and sum(loads) == plan.num_bytes == 36_000 + 18_000
    assert plan_files([own]).placement == {} and list(plan_files([own]).files[0]) == ["model.safetensors"]
