"""Writing checkpoints: `step-00001200/` with safetensors files and `state.json`, complete or absent.

A folder is written under another name, digested, synced and renamed once. `state.json` lists the digest of every file
beside it and one of itself, so a reader notices a flipped byte before a weight is used. One process writes
`model.safetensors`; several write `model-00001-of-00008.safetensors` and so on together (see `resharding.py`).

In the background, a step waits only for a copy in host memory. With several processes, the writing threads of all use
a process group of their own, never the one that gradients travel on. Each process writes its files and sends their
digests to the first one, which renames the folder when it has all.

Format 1 came from one process, 2 from several; 3 comes from both and has XXH3 digests instead of SHA-256.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from torch import Tensor
from xxhash import xxh3_128

from frameloom.checkpoint.reader import STATE, XXH3, Checkpoint, list_steps, seal_state, step_folder
from frameloom.checkpoint.resharding import FilePlan, Layout, is_simple, local_layout, plan_files, take_local
from frameloom.core.errors import CheckpointError
from frameloom.core.files import PARTIAL, atomic_folder, remove_partial, sync_file
from frameloom.core.hooks import notify
from frameloom.distributed.context import Collective, format_error
from frameloom.weights.lazy_tensors import LazyTensors, defer_tensors
from frameloom.weights.safetensors_file import write_safetensors

Files = dict[str, dict[str, Tensor]]
Report = tuple[dict[str, tuple[str, int]], str | None]
"""the digest and size of each file that a process wrote, or what went wrong"""


@dataclass
class _Save:
    """A save on its way: `files` are what this process writes; the first one holds the folder open."""

    step: int
    folder: Path
    files: Files
    state: dict[str, Any]
    held: ExitStack = field(default_factory=ExitStack)


class Saver:
    """Saves one checkpoint at a time and keeps the newest `keep`; all processes of `collective` call it alike.

    Each process writes what it alone holds, or its share. Where one fails all raise, and nothing is left behind. In the
    background, a save returns when the tensors are copied; the copies stay for the next save. An error of the thread is
    raised by the next call, on every process; `on_error` is called at once, in the thread.
    """

    def __init__(
        self,
        root: Path,
        keep: int | None = None,
        *,
        in_background: bool = False,
        collective: Collective | None = None,
        on_error: Callable[[], object] = lambda: None,
    ) -> None:
        self._root = root
        self._keep = keep
        self._in_background = in_background
        self._collective = collective or Collective()
        self._on_error = on_error
        self._layout: Layout | None = None
        self._plan: FilePlan | None = None
        self._members: dict[str, list[tuple[str, str]]] = {}
        self._copies: Files = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """A step that exists already is left alone, because nothing is written twice."""
        self.wait()
        save = self._begin(checkpoint)
        if save is None:
            return
        if not self._in_background:
            self._finish(save)
            return
        try:
            save.files = self._copy(save.files)
        except BaseException as error:
            save.held.__exit__(type(error), error, error.__traceback__)
            raise
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    close = wait

    def _begin(self, checkpoint: Checkpoint) -> _Save | None:
        """Agree on the folder and on who writes what; None when the step exists already. Nothing is copied yet."""
        tensors = {
            group: {name: value if is_simple(value) else value.full_tensor() for name, value in named.items()}  # type: ignore[attr-defined]
            for group, named in checkpoint.tensors.items()
        }
        layout = local_layout(tensors)
        is_known = self._collective.gather(layout == self._layout)
        held, folder = ExitStack(), step_folder(self._root, checkpoint.step)

        def open_folder() -> str | None:
            if folder.exists():
                return None
            try:
                return held.enter_context(atomic_folder(folder)).name
            except OSError as error:
                num_bytes = sum(piece.num_bytes for named in layout.values() for piece in named.values())
                raise self._save_error(checkpoint.step, error, num_bytes) from error

        with ExitStack() as undo:
            undo.push(held)
            name = self._collective.run_on_rank0(open_folder, error=CheckpointError)
            if name is None:
                return None
            # Who writes what is planned again only when a process holds something else than at the save before.
            if not self._collective.broadcast(all(is_known)):
                layouts = self._collective.gather(layout)
                self._plan = plan_files(layouts) if self._collective.is_first else None
                self._members = self._collective.scatter(self._plan.files if self._plan else None)
                self._layout = layout
            undo.pop_all()
        files = {
            file: {name: take_local(tensors[group][name]) for group, name in members}
            for file, members in self._members.items()
        }
        return _Save(checkpoint.step, self._root / name, files, checkpoint.state, held)

    def _copy(self, files: Files) -> Files:
        """The values in memory of our own, which is reused: fresh pages cost as much as the copying."""
        is_pinned = any(tensor.is_cuda for named in files.values() for tensor in named.values())
        copies: Files = {}
        for file, named in files.items():
            copies[file] = {}
            for name, tensor in named.items():
                buffer = self._copies.get(file, {}).get(name)
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
                copies[file][name] = buffer.copy_(tensor.detach(), non_blocking=is_pinned)
        if is_pinned:
            torch.cuda.synchronize()
        self._copies = copies
        return copies

    def _run(self, save: _Save) -> None:
        try:
            self._finish(save)
        except BaseException as error:  # raised by the next call, in the thread that can act on it
            self._error = error
            self._on_error()

    def _finish(self, save: _Save) -> None:
        """Write the files of this process, rename the folder once all have, and delete old checkpoints."""
        own_error: BaseException | None = None
        with save.held:
            try:
                report: Report = self._write_files(save), None
            except BaseException as error:  # kept back until all know of it
                own_error, report = error, ({}, format_error(error))
                if not (self._collective.is_first or save.folder.is_dir()):
                    text = "is not there, which rank 0 has made; all processes must share the run's folder"
                    report = {}, f"{save.folder} {text}"
            reports = self._collective.gather(report)
            try:
                self._collective.run_on_rank0(lambda: self._seal(save, reports), error=CheckpointError)
            except CheckpointError as error:
                if own_error is not None and not isinstance(own_error, (OSError, SafetensorError, CheckpointError)):
                    raise own_error from error  # a bug keeps its trace
                raise
        if self._collective.is_first and self._keep is not None:
            apply_retention(self._root, self._keep)

    def _write_files(self, save: _Save) -> dict[str, tuple[str, int]]:
        notify("save", step=save.step, rank=self._collective.rank)
        written = {}
        for name, named in save.files.items():
            path = save.folder / name
            digest = write_digested(path, defer_tensors(named))
            if not self._collective.is_first:
                sync_file(path)  # the first process's own are synced with the folder
            written[name] = digest, path.stat().st_size
        return written

    def _seal(self, save: _Save, reports: Sequence[Report]) -> None:
        """On the first process: check that all files are complete, write `state.json`, rename the folder."""
        assert self._plan is not None
        try:
            digests = {}
            for rank, (_, problem) in enumerate(reports):
                if problem is not None:
                    raise CheckpointError(problem if self._collective.size == 1 else f"rank {rank}: {problem}")
            for name, (digest, num_bytes) in (item for files, _ in reports for item in files.items()):
                path = save.folder / name
                if not path.is_file() or path.stat().st_size != num_bytes:
                    raise CheckpointError(f"{path} was written elsewhere; all processes must share the run's folder")
                digests[name] = digest
            placed = {"placement": self._plan.placement} if self._plan.placement else {}
            state = {**save.state, "step": save.step, "files": digests, **placed}
            (save.folder / STATE).write_text(seal_state(state))
            save.held.close()
        except (OSError, CheckpointError) as error:
            raise self._save_error(save.step, error, self._plan.num_bytes) from error

    def _save_error(self, step: int, error: BaseException, num_bytes: int) -> CheckpointError:
        free = shutil.disk_usage(next(place for place in (self._root, *self._root.parents) if place.is_dir())).free
        return CheckpointError(
            f"{step_folder(self._root, step)}: could not be saved ({error}); it needs {num_bytes:,} bytes and {free:,} "
            "are free. Earlier checkpoints are untouched: free some space and start the run again"
        )


def write_digested(path: Path, tensors: LazyTensors) -> str:
    """Write a safetensors file and return its digest, with the name of its kind before it."""
    return XXH3 + write_safetensors(path, tensors, digest=xxh3_128())


def apply_retention(root: Path, keep: int) -> None:
    """Delete all but the newest `keep`. Call after a save: a crash then leaves one too many, never one too few."""
    for step in list_steps(root)[:-keep]:
        doomed = root / f"{PARTIAL}{uuid4().hex[:8]}-doomed"
        os.rename(step_folder(root, step), doomed)
        shutil.rmtree(doomed)


def clear_leftovers(root: Path) -> None:
    """Remove what a killed save or deletion left; only the owner of the run may call this."""
    if root.is_dir():
        remove_partial(root)
