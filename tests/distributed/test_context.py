"""What two ranks exchange, what both of them see of an error on rank 0, and which of them reports one."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.distributed.context import Collective, build_mesh, join_host, process_group
from frameloom.distributed.ranks import read_ranks
from tests.ports import free_ports

LOUD = logging.getLogger("frameloom.loud")


def test_one_process_alone_has_all_answers_itself() -> None:
    alone = Collective()
    assert (alone.rank, alone.size, alone.is_first) == (0, 1, True)
    assert alone.gather("a") == alone.all_gather("a") == ["a"]
    assert alone.broadcast("a") == alone.scatter(["a"]) == alone.run_on_rank0(lambda: "a") == "a"
    tensor = torch.ones(2)
    assert alone.sum(tensor) is tensor
    for error in (None, CheckpointError):
        with pytest.raises(DataError, match="clip"):
            alone.run_on_rank0(fail_with(DataError("a clip is damaged")), error=error)


def fail_with(error: Exception) -> Callable[[], Any]:
    def fail() -> None:
        raise error

    return fail


def name_failure(act: Callable[[], object]) -> list[Any]:
    """[kind, message, exit code] of what `act` raises."""
    try:
        act()
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "exit_code", None)]
    return []


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What `exchange` found on each of two ranks."""
    root = Path(__file__).parents[2]
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.distributed.test_context"]
    started = [
        subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, **common, "PYTHONPATH": str(root), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [json.loads(text.splitlines()[-1]) for text in said]


def exchange() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def talk() -> None:
        with process_group(read_ranks(), on_gpu=False, timeout=timedelta(seconds=60), keep_warnings=[LOUD]) as context:
            rank = context.rank
            context.barrier()
            found["gather"], found["all_gather"] = context.gather(rank * 10), context.all_gather({"rank": rank})
            found["broadcast"] = context.broadcast(f"from {rank}")
            found["scatter"] = context.scatter(["a", "b"] if rank == 0 else None)
            found["sum"] = context.sum(torch.tensor([1.0, float(rank)])).tolist()
            found["result"] = context.run_on_rank0(lambda: f"by {rank}")
            damaged = fail_with(DataError("a clip is damaged"))
            found["failed"] = name_failure(lambda: context.run_on_rank0(damaged))
            found["failed as"] = name_failure(lambda: context.run_on_rank0(damaged, error=CheckpointError))
            found["bug as"] = name_failure(
                lambda: context.run_on_rank0(fail_with(KeyError("x")), error=CheckpointError)
            )
            mesh = build_mesh("cpu", replicate=1, shard=2)
            found["mesh"] = [mesh.mesh_dim_names, mesh.get_local_rank("shard"), join_host().size()]
            levels = (logging.getLogger("frameloom"), LOUD)
            found["levels"] = [logging.getLevelName(logger.getEffectiveLevel()) for logger in levels]
            raise ConfigError("a key is wrong")

    found["reported"] = name_failure(talk)
    found["levels after"] = [logging.getLogger("frameloom").level, LOUD.level]
    return found


def test_tensors_and_objects_reach_the_ranks_that_they_are_meant_for(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["gather"] == [0, 10] and second["gather"] == []
    assert first["scatter"] == "a" and second["scatter"] == "b"
    for own in found:
        assert own["all_gather"] == [{"rank": 0}, {"rank": 1}] and own["broadcast"] == "from 0"
        assert own["sum"] == [2.0, 1.0] and own["result"] == "by 0"
    assert first["mesh"] == [["replicate", "shard"], 0, 2] and second["mesh"][1] == 1


def test_an_error_of_rank_0_ends_the_others_quietly_or_as_they_ask(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["failed"] == first["failed as"] == ["DataError", "a clip is damaged", 2]
    assert second["failed"][::2] == ["PeerFailed", 2]
    assert second["failed as"] == ["CheckpointError", "a clip is damaged", 2]
    assert first["bug as"] == ["KeyError", "'x'", None]
    assert second["bug as"] == ["CheckpointError", "KeyError: 'x'", 2]


def test_one_rank_reports_what_all_have_found(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["reported"] == ["ConfigError", "a key is wrong", 2]
    assert second["reported"][::2] == ["PeerFailed", 2]


def test_the_other_ranks_log_errors_and_the_warnings_that_are_kept(found: list[dict[str, Any]]) -> None:
    assert found[0]["levels"] == ["WARNING", "WARNING"] and found[1]["levels"] == ["ERROR", "WARNING"]
    assert all(own["levels after"] == [logging.NOTSET, logging.NOTSET] for own in found)


if __name__ == "__main__":
    print(json.dumps(exchange()))
