"""Writers of checkpoints for processes that are killed: at a file operation of their choice, or from outside."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PosixPath

import torch

from frameloom.checkpoint import writer as store
from frameloom.checkpoint.reader import Checkpoint, list_steps, load_checkpoint, step_folder
from frameloom.checkpoint.writer import apply_retention
from frameloom.core.random import stream
from tests.checkpoint.saving import save_checkpoint

SIZE = 200_000
# Each changes what is on disk, or opens a file to do so.
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def make(step: int, size: int = SIZE) -> Checkpoint:
    draw = stream(0, "weights", step)
    tensors = {
        group: {"a": torch.randn(size, generator=draw), "b": torch.randn(3, 3, generator=draw)}
        for group in ("model", "ema")
    }
    return Checkpoint(step, tensors, {"epoch": 1, "position": step * 10})


def is_same(ours: Checkpoint, theirs: Checkpoint) -> bool:
    return ours.step == theirs.step and all(
        torch.equal(ours.tensors[group][name], theirs.tensors[group][name])
        for group in theirs.tensors
        for name in theirs.tensors[group]
    )


def loads_as_made(root: Path, step: int) -> bool:
    return is_same(load_checkpoint(step_folder(root, step)), make(step))


def watch(folder: Path, die_at: int = 0) -> list[str]:
    """The file operations inside `folder` from now on; this process is killed before number `die_at` of them.

    A hook of Python's own, which cannot be taken away.
    """
    seen: list[str] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS and str(folder) in str(arguments[0]):
            seen.append(event)
            if len(seen) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return seen


def act(what: str, root: str, number: int, *given: int) -> None:
    """Do one of `ACTS`, and die before file operation `number`; or print how many there were."""
    seen = watch(Path(root), number)
    ACTS[what](Path(root), *given)
    print(len(seen))


def save(root: Path, step: int, content: int | None = None) -> None:
    """Save a step (with the tensors of another, `content`)."""
    save_checkpoint(root, replace(make(step if content is None else content), step=step))


def save_in_place(root: Path, step: int, content: int | None = None) -> None:
    """The control: as `save`, but straight into the final place, whatever is there."""
    store.atomic_folder = plain_folder  # type: ignore[assignment]
    find = store.step_folder
    store.step_folder = lambda root, step: Unseen(find(root, step))
    save(root, step, content)


class Unseen(PosixPath):
    """A path that nobody finds taken."""

    def exists(self) -> bool:  # type: ignore[override]
        return False


@contextmanager
def plain_folder(path: Path) -> Iterator[Path]:
    path.mkdir(parents=True, exist_ok=True)
    yield path


def retain_in_place(root: Path, keep: int) -> None:
    """The control: as `apply_retention`, but old checkpoints are not renamed before they are deleted."""
    for step in list_steps(root)[:-keep]:
        shutil.rmtree(step_folder(root, step))


ACTS: dict[str, Callable[..., None]] = {
    "save": save,
    "save in place": save_in_place,
    "retain": apply_retention,
    "retain in place": retain_in_place,
}
