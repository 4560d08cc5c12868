"""One process of a test with several: runs the jobs of a list that name its number, one after the other.

Starting processes and importing torch costs more than a tiny run, so one start serves many settings.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from frameloom.checkpoint import writer as store
from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import DataError, FrameloomError, PeerFailed
from frameloom.distributed import context, fsdp
from frameloom.distributed.ranks import read_ranks
from frameloom.training import caching
from frameloom.training import step as steps
from frameloom.training import text_sharing as encoders
from frameloom.training.loop import Trainer
from frameloom.training.run.folder import RunFolder
from frameloom.training.tasks import build as tasks
from frameloom.training.train import build_trainer, join_ranks, train
from tests.distributed.saving import run_saving
from tests.faults.injection import install

# The text encoder is frozen, and the largest part of a tiny run's start.
KEEP_TEXT: dict[str, Any] = {}


def main(jobs_file: Path, number: int) -> None:
    torch.set_num_threads(1)
    install()
    logging.getLogger("frameloom").addHandler(logging.NullHandler())
    keep_text_encoders()
    for job in json.loads(jobs_file.read_text()):
        if number in job["processes"]:
            rank = job["processes"].index(number)
            set_environment(job, rank)
            try:
                KINDS[job["kind"]](job, rank)
            finally:
                FAULTS[None](rank)
                if "--parallel.encoders" in job["overrides"]:
                    KEEP_TEXT.clear()  # encoders that were split stay so


def keep_text_encoders() -> None:
    build = tasks.build_text

    def build_once(section: Any, model: Any) -> Any:
        key = f"{section!r} {model.family}"
        if key not in KEEP_TEXT:
            KEEP_TEXT[key] = build(section, model)
        return KEEP_TEXT[key]

    tasks.build_text = caching.build_text = build_once


def set_environment(job: Mapping[str, Any], rank: int) -> None:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(job["processes"]), "MASTER_PORT": job["port"]}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in values.items()}}


def run_steps(job: Mapping[str, Any], rank: int) -> None:
    """Build a trainer, take some steps, and put down what was read, lost, sent and learnt."""
    recipe = load_recipe(job["recipe"], job["overrides"])
    folder = RunFolder(Path(job["out"]))
    with join_ranks(recipe, read_ranks()) as parallel:
        FAULTS[job["fault"]](rank)
        parallel.context.run_on_rank0(lambda: folder.path.mkdir(parents=True, exist_ok=True))
        trainer = build_trainer(recipe, folder, first_step=1, parallel=parallel)
        found = take_steps(trainer, job["steps"])
        tensors = parallel.gather_tensors(trainer.snapshot().tensors)
        held = sum(tensor.nbytes for tensor in local_optimizer_tensors(trainer))
        for tracker in trainer.trackers:
            tracker.close()
    found |= {"position": [trainer.epoch, trainer.position], "state_bytes": held}
    (folder.path / f"rank-{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        for kind, members in tensors.items():
            save_file({name: tensor.contiguous() for name, tensor in members.items()}, folder.path / f"{kind}.st")


def local_optimizer_tensors(trainer: Trainer) -> list[torch.Tensor]:
    found = trainer.stepper.tensors()["optimizer"].values()
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in found]


class Sent(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.strip("_").startswith("c10d"):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def take_steps(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Values of each step, the rows that this process read for it (fillers left out), and what was sent."""
    found: dict[str, Any] = {"values": [], "rows": [], "sent": {}}
    for batches, planned in trainer.feed.steps(trainer.epoch, trainer.position, trainer.recipe.train.accumulate):
        # Counting slows every operation down, and one step is like another.
        with Sent() if trainer.step == 1 else nullcontext() as sent:
            found["values"].append(trainer.take_step(batches, planned).values)
        if sent is not None:
            found["sent"] = dict(sent.counts)
        found["rows"].append([int(row) for batch in batches if not batch.is_filler for row in batch.rows])
        trainer.feed.bad_clips.add(trainer.stepper.agreement.gather_bad_clips(batches))
        trainer.epoch, trainer.position = planned.position
        if trainer.step == steps:
            return found
    raise AssertionError("the feed ended")


def run_whole(job: Mapping[str, Any], rank: int) -> None:
    """`frameloom train` as it is; the outcome of each process is put down beside the run."""
    overrides = [*job["overrides"], *job["overrides_of"].get(str(rank), [])]
    outcome = "done"
    FAULTS[job["fault"]](rank)
    try:
        train(load_recipe(job["recipe"], overrides))
    except PeerFailed as error:
        outcome = f"silent {error.exit_code}"
    except FrameloomError as error:
        outcome = f"{type(error).__name__} {error.exit_code}: {error}"
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    (out / f"outcome-{rank}").write_text(outcome)


RIGHT_SYNC, RIGHT_STEP, RIGHT_WRITE = steps.sync_gradients, Trainer.take_step, store.write_digested
RIGHT_GROUP = tasks.join_sequence_group


def put_right(rank: int) -> None:
    steps.sync_gradients, Trainer.take_step, store.write_digested = RIGHT_SYNC, RIGHT_STEP, RIGHT_WRITE  # type: ignore[method-assign]
    tasks.join_sequence_group = RIGHT_GROUP


def scale_gradients_wrongly(rank: int) -> None:
    """What averaging instead of adding up would do with two processes."""

    def average(params: Any, num_ranks: int, factor: float) -> None:
        RIGHT_SYNC(params, num_ranks, factor)
        fsdp.scale_gradients([param for param in params if not isinstance(param, DTensor)], 0.5)

    steps.sync_gradients = average  # type: ignore[assignment]


def average_shards(rank: int) -> None:
    """FSDP's mean over processes, taken for a sum."""
    steps.sync_gradients = lambda params, num_ranks, factor: RIGHT_SYNC(params, 1, factor)


def count_clips_twice(rank: int) -> None:
    """What a clip's gradient would be if its parts were scaled for a mean, and then added up."""
    tasks.join_sequence_group = lambda group, *, reduction: RIGHT_GROUP(group, reduction="mean")  # type: ignore[assignment]


def at_step(step: int, rank: int, act: Callable[[Trainer], object], this: int) -> None:
    """Do something on one process before it takes a step."""

    @functools.wraps(RIGHT_STEP)
    def take_step(trainer: Trainer, batches: Any, planned: Any = None) -> Any:
        if trainer.step + 1 == step and this == rank:
            act(trainer)
        return RIGHT_STEP(trainer, batches, planned)

    Trainer.take_step = take_step  # type: ignore[method-assign]


def spoil_losses(trainer: Trainer) -> None:
    phase = trainer.stepper.updates[0].phase
    losses = phase.losses
    object.__setattr__(phase, "losses", lambda *given: (losses(*given)[0] * torch.nan, {}))


def fail_to_read(trainer: Trainer) -> None:
    raise DataError("clips/7.mp4: cannot be read on this machine")


def fill_disk(rank: int) -> None:
    """The disk of the second process is full when step 2 is saved."""

    def write(path: Path, *args: Any, **more: Any) -> str:
        if "step-00000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return RIGHT_WRITE(path, *args, **more)

    if rank == 1:
        store.write_digested = write


FAULTS: dict[str | None, Callable[[int], None]] = {
    None: put_right,
    "gradient scale": scale_gradients_wrongly,
    "shard scale": average_shards,
    "sequence scale": count_clips_twice,
    "sigterm on rank 1": lambda rank: at_step(2, 1, lambda trainer: os.kill(os.getpid(), signal.SIGTERM), rank),
    "disk full on rank 1": fill_disk,
    "nan on rank 1": lambda rank: at_step(3, 1, spoil_losses, rank),
    "error on rank 1": lambda rank: at_step(3, 1, fail_to_read, rank),
    "kill rank 1": lambda rank: at_step(3, 1, lambda trainer: os.kill(os.getpid(), signal.SIGKILL), rank),
}


def run_encoders(job: Mapping[str, Any], rank: int) -> None:
    """Encode with one process's weights, with split ones, and alone; the first has more captions than fit one pass."""
    from frameloom.models.text.base import build_text_encoder

    recipe = load_recipe(job["recipe"], job["overrides"])
    captions = [f"a {colour} circle moves {way}" for colour in ("red", "blue") for way in ("left", "up")]
    captions = captions * 5 if rank == 0 else captions[: rank + 1]
    made = [build_text_encoder("t5", max_length=16, path=job["t5"], options={"precision": "fp32"}) for _ in range(3)]
    with join_ranks(recipe, read_ranks()) as parallel:
        host, parts = context.join_host(), context.build_mesh("cpu", encoders=parallel.context.size)
        once = encoders.OnceEncoder(made[0], parallel.device, host, owner=1)
        split = encoders.SplitEncoder(made[1], parallel.device, parts)
        found = {"once": once.encode(captions), "split": split.encode(captions)}
    alone = made[2].encode(captions)
    whole = sum(weight.numel() for weight in made[2].load().parameters())
    result = {
        "has_weights": made[0]._model is not None,
        "share": sum(weight.to_local().numel() for weight in made[1].load().parameters()) / whole,
        "differences": {
            name: [float((mine.float() - right.float()).abs().max()) for mine, right in pairs(states, alone)]
            for name, states in found.items()
        },
        "spread": float(alone.tokens_BKD.std(0).max()),
    }
    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    (Path(job["out"]) / f"rank-{rank}.json").write_text(json.dumps(result))


def run_layers(job: Mapping[str, Any], rank: int) -> None:
    """Encode with layers that the processes split, and alone; they have different captions, and differently many."""
    from frameloom.builders.text import TextPipeline
    from frameloom.models.text.base import build_text_encoder

    recipe = load_recipe(job["recipe"], job["overrides"])
    captions = [f"a {colour} circle moves {way}" for colour in ("red", "blue") for way in ("left", "up")]
    captions = captions * 5 if rank == 0 else ["the camera follows a small boat", captions[1]]
    result: dict[str, Any] = {}
    with join_ranks(recipe, read_ranks()) as parallel:
        for kind, folder in job["encoders"].items():
            own, whole, half = (
                build_text_encoder(kind, max_length=16, path=folder, options={"precision": precision})
                for precision in ("fp32", "fp32", "bf16")
            )
            split, split_half = (
                encoders.share_text(TextPipeline([encoder]), parallel).encoders[0] for encoder in (own, half)
            )
            alone, states = whole.encode(captions), split.encode(captions)
            result[kind] = {
                "share": count_weights(own.load()) / count_weights(whole.load()),
                "differences": largest(states, alone),
                "of_half": largest(split_half.encode(captions), alone),
                "spread": float(alone.tokens_BKD.std(0).max()),
                "fingerprints": [split.fingerprint(), whole.fingerprint()],
            }
    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    (Path(job["out"]) / f"rank-{rank}.json").write_text(json.dumps(result))


def count_weights(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


def largest(ours: Any, theirs: Any) -> list[float]:
    return [float((mine.float() - right.float()).abs().max()) for mine, right in pairs(ours, theirs)]


def pairs(ours: Any, theirs: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = zip(vars(ours).values(), vars(theirs).values(), strict=True)
    return [(mine, right) for mine, right in found if right.numel() and mine.shape == right.shape]


KINDS = {"saving": run_saving, "steps": run_steps, "whole": run_whole, "encoders": run_encoders, "layers": run_layers}

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
