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


def act_at(folder: Path, act: Callable[[], None]) -> None:
    """Call `act` before every file operation inside `folder`; a hook of Python's own, which cannot be taken away."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS and str(folder) in str(arguments[0]):
            act()

    sys.addaudithook(hook)


def die_at(folder: Path, number: int) -> None:
    """Kill this process before its file operation `number` in `folder`, counted from 1."""
    seen = []

    def act() -> None:
        seen.append(1)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    act_at(folder, act)


def count_operations(work: Callable[[Path], None], root: Path) -> int:
    seen: list[int] = []
    act_at(root, lambda: seen.append(1))
    work(root)
    return len(seen)


def save(root: str, step: int, number: int = 0, content: int | None = None) -> None:
    """Save a step (with the tensors of another, `content`); die before file operation `number`."""
    if number:
        die_at(Path(root), number)
    made = make(step if content is None else content)
    save_checkpoint(Path(root), replace(made, step=step))


def count_save(root: str, step: int, out: str) -> None:
    Path(out).write_text(str(count_operations(lambda folder: save(str(folder), step), Path(root))))


def save_in_place(root: str, step: int, number: int = 0, content: int | None = None) -> None:
    """The control: as `save`, but straight into the final place, whatever is there."""
    store.atomic_folder = plain_folder  # type: ignore[assignment]
    find = store.step_folder
    store.step_folder = lambda root, step: Unseen(find(root, step))
    save(root, step, number, content)


class Unseen(PosixPath):
    """A path that nobody finds taken."""

    def exists(self) -> bool:  # type: ignore[override]
        return False


@contextmanager
def plain_folder(path: Path) -> Iterator[Path]:
    path.mkdir(parents=True, exist_ok=True)
    yield path


def retain(root: str, keep: int, number: int = 0) -> None:
    if number:
        die_at(Path(root), number)
    apply_retention(Path(root), keep)


def count_retain(root: str, keep: int, out: str) -> None:
    Path(out).write_text(str(count_operations(lambda folder: apply_retention(folder, keep), Path(root))))


def retain_in_place(root: str, keep: int, number: int = 0) -> None:
    """The control: as `retain`, but old checkpoints are not renamed before they are deleted."""
    if number:
        die_at(Path(root), number)
    for step in list_steps(Path(root))[:-keep]:
        shutil.rmtree(step_folder(Path(root), step))
