"""Writing checkpoints: `step-00001200/` with safetensors files and `state.json`, complete or absent.

A folder is written under another name, digested, synced and renamed once. `state.json` lists the digest of every file
beside it and one of itself, so a reader notices a flipped byte before a weight is used. One process writes
`model.safetensors`; several write `model-00001-of-00008.safetensors` and so on together (see `resharding.py`).

Format 1 came from one process, 2 from several; 3 comes from both and has XXH3 digests instead of SHA-256.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from xxhash import xxh3_128

from frameloom.checkpoint.reader import STATE, XXH3, Checkpoint, seal_state, step_folder
from frameloom.checkpoint.resharding import FilePlan, Layout, describe_pieces, is_simple, plan_files, take_local
from frameloom.core.errors import CheckpointError
from frameloom.core.files import atomic_folder, sync_file
from frameloom.core.hooks import notify
from frameloom.distributed.context import Collective, format_error
from frameloom.weights.lazy_tensors import LazyTensors, defer_tensors
from frameloom.weights.safetensors_file import write_safetensors

Report = tuple[dict[str, tuple[str, int]], str | None]
"""the digest and size of each file that a process wrote, or what went wrong"""


@dataclass
class Save:
    """A save on its way: `files` are what this process writes; the first one holds the folder open."""

    step: int
    folder: Path
    files: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    held: ExitStack = field(default_factory=ExitStack)


class Writer:
    """Writes checkpoints into `root`, all processes of `collective` together, each what it alone holds or its share.

    `begin` agrees on the folder and on who writes what; `finish` writes, and the first process seals and renames once
    all have sent it the digests of their files. Where one fails all raise, and nothing is left behind.
    """

    def __init__(self, root: Path, collective: Collective | None = None) -> None:
        self._root = root
        self._collective = collective or Collective()
        self._layout: Layout | None = None
        self._plan: FilePlan | None = None
        self._files: dict[str, list[tuple[str, str]]] = {}

    def begin(self, checkpoint: Checkpoint) -> Save | None:
        """None when the step exists already. Tensors are not copied yet."""
        tensors = {
            group: {name: value if is_simple(value) else value.full_tensor() for name, value in named.items()}  # type: ignore[attr-defined]
            for group, named in checkpoint.tensors.items()
        }
        layout = describe_pieces(tensors)
        is_known = self._collective.gather(layout == self._layout)
        held = ExitStack()
        with ExitStack() as undo:
            undo.push(held)
            name = self._collective.run_on_rank0(
                lambda: self._open(checkpoint.step, layout, held), error=CheckpointError
            )
            if name is None:
                return None
            if not self._collective.broadcast(all(is_known)):
                self._agree(layout)
            undo.pop_all()
        files = {
            file: {name: take_local(tensors[group][name]) for group, name in members}
            for file, members in self._files.items()
        }
        return Save(checkpoint.step, self._root / name, files, checkpoint.state, held)

    def _open(self, step: int, layout: Layout, held: ExitStack) -> str | None:
        """The name of the folder to write into, on the first process."""
        try:
            folder = held.enter_context(new_step(self._root, step))
            return None if folder is None else folder.name
        except OSError as error:
            num_bytes = sum(piece.num_bytes for named in layout.values() for piece in named.values())
            raise CheckpointError(self._describe(step, error, num_bytes)) from error

    def _agree(self, layout: Layout) -> None:
        """Who writes what; asked again only when a process holds something else than at the save before."""
        layouts = self._collective.gather(layout)
        self._plan = plan_files(layouts) if self._collective.is_first else None
        self._files = self._collective.scatter(self._plan.files if self._plan else None)
        self._layout = layout

    def finish(self, save: Save) -> None:
        """Write and rename; may be called by another thread than `begin`, one at a time."""
        with save.held:
            report, own = self._write_own(save)
            reports = self._collective.gather(report)
            try:
                self._collective.run_on_rank0(lambda: self._seal(save, reports), error=CheckpointError)
            except CheckpointError as error:
                if own is not None and not isinstance(own, (OSError, SafetensorError, CheckpointError)):
                    raise own from error  # a bug keeps its trace
                raise

    def _write_own(self, save: Save) -> tuple[Report, BaseException | None]:
        """The files of this process; an error is kept back until all know of it."""
        try:
            notify("save", step=save.step, rank=self._collective.rank)
            return ({name: self._write(save.folder / name, named) for name, named in save.files.items()}, None), None
        except BaseException as error:
            return ({}, self._explain(save, error)), error

    def _explain(self, save: Save, error: BaseException) -> str:
        if self._collective.is_first or save.folder.is_dir():
            return format_error(error)
        return f"{save.folder} is not there, which rank 0 has made; all processes must share the run's folder"

    def _write(self, path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
        """The digest and the size of a file, written and safe on the disk."""
        digest = write_digested(path, defer_tensors(tensors))
        if not self._collective.is_first:
            sync_file(path)  # the first process's own are synced with the folder
        return digest, path.stat().st_size

    def _seal(self, save: Save, reports: Sequence[Report]) -> None:
        """On the first process: everything is there, so `state.json` can say so, and the folder gets its name."""
        try:
            for rank, (_, problem) in enumerate(reports):
                if problem is not None:
                    raise CheckpointError(problem if self._collective.size == 1 else f"rank {rank}: {problem}")
            for name, (_, num_bytes) in ((name, found) for files, _ in reports for name, found in files.items()):
                path = save.folder / name
                if not path.is_file() or path.stat().st_size != num_bytes:
                    raise CheckpointError(f"{path} was written elsewhere; all processes must share the run's folder")
            self._write_state(save, {name: found[0] for files, _ in reports for name, found in files.items()})
            save.held.close()
        except (OSError, CheckpointError) as error:
            assert self._plan is not None
            raise CheckpointError(self._describe(save.step, error, self._plan.num_bytes)) from error

    def _write_state(self, save: Save, files: dict[str, str]) -> None:
        assert self._plan is not None
        placed = {"placement": self._plan.placement} if self._plan.placement else {}
        state = {**save.state, "step": save.step, "files": files, **placed}
        (save.folder / STATE).write_text(seal_state(state))

    def _describe(self, step: int, error: BaseException, num_bytes: int) -> str:
        free = shutil.disk_usage(next(place for place in (self._root, *self._root.parents) if place.is_dir())).free
        return (
            f"{step_folder(self._root, step)}: could not be saved ({error}); it needs {num_bytes:,} bytes and {free:,} "
            "are free. Earlier checkpoints are untouched: free some space and start the run again"
        )


@contextmanager
def new_step(root: Path, step: int) -> Iterator[Path | None]:
    """The folder to write a step into; None for a step that is there, because nothing is written twice."""
    folder = step_folder(root, step)
    if folder.exists():
        yield None
        return
    with atomic_folder(folder) as temporary:
        yield temporary


def write_digested(path: Path, tensors: LazyTensors) -> str:
    """Write a safetensors file and return its digest, with the name of its kind before it."""
    return XXH3 + write_safetensors(path, tensors, digest=xxh3_128())
