"""Training checkpoints: `step-00001200/` with safetensors files and `state.json`, complete or absent.

A folder is written under another name, digested, synced and renamed once. `state.json` lists the digest of every file
beside it and one of itself, so a reader notices a flipped byte before a weight is used. One process writes
`model.safetensors`; several write `model-00001-of-00008.safetensors` and so on together (see `stored.py`).

Format 1 came from one process, 2 from several; 3 comes from both and has digests of another kind (`digests.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from torch import Tensor

from frameloom.checkpoint.digests import is_undamaged, write_digested
from frameloom.checkpoint.lazy_tensors import defer_tensors
from frameloom.checkpoint.pieces import FilePlan, Layout, describe_pieces, is_simple, plan_files, take_local
from frameloom.checkpoint.stored import StoredTensors
from frameloom.core.errors import CheckpointError
from frameloom.core.files import PARTIAL, atomic_folder, digest_value, remove_partial, sync_file
from frameloom.core.hooks import notify
from frameloom.core.log import get_logger
from frameloom.distributed.context import Collective, format_error

FORMAT, _READABLE = 3, (1, 2, 3)
STATE = "state.json"
_STEP = re.compile(r"^step-(\d{8,})$")
_log = get_logger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: `tensors["model"]["blocks.0.weight"]`, and the JSON `state` of the run."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete and undamaged one on disk; its tensors are not read yet."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def open(self) -> StoredTensors:
        return StoredTensors(self.folder, self.state)

    def load(self) -> Checkpoint:
        with self.open() as stored:
            return Checkpoint(self.step, stored.read_all(), self.state)


Report = tuple[dict[str, tuple[str, int]], str | None]
"""the digest and size of each file that a process wrote, or what went wrong"""


_DIGEST_THREADS = 4


class UnseenError(CheckpointError):
    """A process does not see the files that the first one sees: no checkpoint is damaged, all must stop."""


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


# Writing


@contextmanager
def new_step(root: Path, step: int) -> Iterator[Path | None]:
    """The folder to write a step into; None for a step that is there, because nothing is written twice."""
    folder = step_folder(root, step)
    if folder.exists():
        yield None
        return
    with atomic_folder(folder) as temporary:
        yield temporary


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
    all have told it the digests of their files. Where one fails all hear it, and nothing is left behind.
    """

    def __init__(self, root: Path, collective: Collective | None = None) -> None:
        self._root = root
        self._collective = collective or Collective()
        self._layout: Layout | None = None
        self._plan: FilePlan | None = None
        self._files: dict[str, list[tuple[str, str]]] = {}

    def begin(self, checkpoint: Checkpoint) -> Save | None:
        """None when the step is there already. Tensors are not copied yet."""
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
            told, own = self._write_own(save)
            reports = self._collective.gather(told)
            try:
                self._collective.run_on_rank0(lambda: self._seal(save, reports), error=CheckpointError)
            except CheckpointError as error:
                if own is not None and not isinstance(own, (OSError, SafetensorError, CheckpointError)):
                    raise own from error  # a mistake of ours keeps its trace
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
            for name, (_, num_bytes) in ((name, told) for files, _ in reports for name, told in files.items()):
                path = save.folder / name
                if not path.is_file() or path.stat().st_size != num_bytes:
                    raise CheckpointError(f"{path} was written elsewhere; all processes must share the run's folder")
            self._write_state(save, {name: told[0] for files, _ in reports for name, told in files.items()})
            save.held.close()
        except (OSError, CheckpointError) as error:
            assert self._plan is not None
            raise CheckpointError(self._describe(save.step, error, self._plan.num_bytes)) from error

    def _write_state(self, save: Save, files: dict[str, str]) -> None:
        assert self._plan is not None
        placed = {"placement": self._plan.placement} if self._plan.placement else {}
        state = {**save.state, "step": save.step, "files": files, **placed}
        (save.folder / STATE).write_text(_sealed(state))

    def _describe(self, step: int, error: BaseException, num_bytes: int) -> str:
        free = shutil.disk_usage(next(place for place in (self._root, *self._root.parents) if place.is_dir())).free
        return (
            f"{step_folder(self._root, step)}: could not be saved ({error}); it needs {num_bytes:,} bytes and {free:,} "
            "are free. Earlier checkpoints are untouched: free some space and start the run again"
        )


def save_checkpoint(root: Path, checkpoint: Checkpoint, collective: Collective | None = None) -> Path:
    """Write the checkpoint; a step that is already there is left alone, because nothing is written twice."""
    writer = Writer(root, collective)
    save = writer.begin(checkpoint)
    if save is not None:
        writer.finish(save)
    return step_folder(root, checkpoint.step)


# Reading


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint after checking every digest; CheckpointError names the file that is wrong."""
    return StoredCheckpoint(folder, verify_checkpoint(folder)).load()


def verify_checkpoint(folder: Path, collective: Collective | None = None) -> dict[str, Any]:
    """The state of a complete and undamaged checkpoint.

    Each file is digested by one process of `collective`, and all of them raise the same error.
    """
    collective = collective or Collective()
    state, sizes = collective.run_on_rank0(lambda: _look_at(folder), error=CheckpointError)
    found = collective.gather(_check_share(folder, state["files"], sizes, collective))
    unseen = [problem for is_unseen, problem in found if is_unseen]
    damaged = [problem for is_unseen, problem in found if problem and not is_unseen]
    is_unseen, problem = collective.broadcast((bool(unseen), (unseen + damaged + [""])[0]))
    if problem:
        raise (UnseenError if is_unseen else CheckpointError)(problem)
    return dict(state)


def _look_at(folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The state, and the sizes of the files that it names."""
    state = read_state(folder)
    for name in state["files"]:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: incomplete, {name} is missing")
    return state, {name: (folder / name).stat().st_size for name in state["files"]}


def _check_share(
    folder: Path, files: Mapping[str, str], sizes: Mapping[str, int], collective: Collective
) -> tuple[bool, str]:
    """(whether it is one of sight, a problem of this process's share of the files, or nothing)."""
    for name, num_bytes in sizes.items():
        path = folder / name
        try:
            seen = path.stat().st_size if path.is_file() else -1
        except OSError:
            seen = -1
        if seen != num_bytes:
            found = "does not see it" if seen < 0 else f"sees {seen:,} bytes"
            return True, (
                f"{path}: rank 0 sees {num_bytes:,} bytes, rank {collective.rank} {found}; the run's folder must be on "
                "a file system that all processes share"
            )
    names = sorted(files)[collective.rank :: collective.size]
    with ThreadPoolExecutor(_DIGEST_THREADS) as pool:
        problems = pool.map(lambda name: _find_damage(folder / name, files[name]), names)
        return False, next((problem for problem in problems if problem), "")


def _find_damage(path: Path, digest: str) -> str:
    try:
        is_right = is_undamaged(path, digest)
    except OSError as error:
        return f"{path}: damaged, it cannot be read ({error})"
    return "" if is_right else f"{path}: damaged, its content does not match the digest in {STATE}"


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` alone, checked against its own seal; the tensor files are not looked at."""
    path = folder / STATE
    if not path.is_file():
        raise CheckpointError(f"{folder}: incomplete, {STATE} is missing")
    text = path.read_bytes()
    try:
        state = json.loads(text)
        sealed = _sealed({key: value for key, value in state.items() if key != "seal"}, state["format"])
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: damaged, not the JSON that was written") from error
    if sealed.encode() != text:
        raise CheckpointError(f"{path}: damaged, its content does not match its seal")
    if state["format"] not in _READABLE:
        readable = f"{_READABLE[0]} to {_READABLE[-1]}"
        raise CheckpointError(f"{path}: format {state['format']}, this version reads formats {readable}")
    return dict(state)


def list_steps(root: Path) -> list[int]:
    """Steps that have a folder, oldest first; unfinished ones have another name and do not show."""
    if not root.is_dir():
        return []
    return sorted(int(found.group(1)) for path in root.iterdir() if (found := _STEP.match(path.name)))


def find_latest(
    root: Path, collective: Collective | None = None, *, set_aside: bool = False
) -> StoredCheckpoint | None:
    """The newest undamaged checkpoint, the same on all processes of `collective`; None for an unused folder.

    Damaged ones are passed over with a warning; `set_aside` also renames them, so that their step can be saved
    again. When only damaged ones are there this is an error: a run never starts from scratch by itself.
    """
    collective = collective or Collective()
    steps = collective.run_on_rank0(lambda: list_steps(root), error=CheckpointError)
    for step in reversed(steps):
        folder = step_folder(root, step)
        try:
            return StoredCheckpoint(folder, verify_checkpoint(folder, collective))
        except UnseenError:
            raise
        except CheckpointError as error:
            _log.warning("%s; trying the one before", error)
            if set_aside:
                collective.run_on_rank0(partial(_set_aside, folder), error=CheckpointError)
    if steps:
        raise CheckpointError(
            f"{root}: none of the {len(steps)} checkpoints is complete; restore one, "
            "or move the run folder away to start again"
        )
    return None


def load_latest(root: Path, *, set_aside: bool = False) -> Checkpoint | None:
    """`find_latest`, with all tensors whole."""
    found = find_latest(root, set_aside=set_aside)
    return None if found is None else found.load()


# Keeping


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


def _set_aside(folder: Path) -> None:
    os.rename(folder, folder.with_name(f"damaged-{folder.name}-{uuid4().hex[:8]}"))


def _sealed(state: Mapping[str, Any], number: int = FORMAT) -> str:
    content = {**state, "format": number}
    return json.dumps({**content, "seal": digest_value(content)}, indent=1, sort_keys=True) + "\n"
