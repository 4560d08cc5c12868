"""Finding, verifying and reading the checkpoints of a run.

Every file is checked against its digest before a tensor is used. Digests are XXH3 in 128 bits: several times as fast as
SHA-256, so that a resume waits for the disk and not for the processor. Neither would stop a person who may write there:
`state.json`, with the digests, lies beside the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor
from xxhash import xxh3_128

from frameloom.checkpoint.resharding import StoredTensors
from frameloom.core.errors import CheckpointError
from frameloom.core.files import digest_file, digest_value
from frameloom.core.logging import get_logger
from frameloom.distributed.context import Collective

FORMAT, _READABLE = 3, (1, 2, 3)
STATE = "state.json"
XXH3 = "xxh3:"
"""before the digests of format 3; others are SHA-256"""
_STEP = re.compile(r"^step-(\d{8,})$")
_DIGEST_THREADS = 4
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


class UnseenError(CheckpointError):
    """A process does not see the files that the first one sees: no checkpoint is damaged, all must stop."""


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


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
    again. If all are damaged this is an error: a run never restarts from scratch by itself.
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
                damaged = folder.with_name(f"damaged-{folder.name}-{uuid4().hex[:8]}")
                collective.run_on_rank0(partial(os.rename, folder, damaged), error=CheckpointError)
    if steps:
        raise CheckpointError(
            f"{root}: none of the {len(steps)} checkpoints is complete; restore one, "
            "or move the run folder away to start again"
        )
    return None


def load_latest(root: Path) -> Checkpoint | None:
    """`find_latest`, with all tensors whole."""
    found = find_latest(root)
    return None if found is None else found.load()


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint after checking every digest; CheckpointError names the file that is wrong."""
    return StoredCheckpoint(folder, verify_checkpoint(folder)).load()


def verify_checkpoint(folder: Path, collective: Collective | None = None) -> dict[str, Any]:
    """The state of a complete and undamaged checkpoint.

    Each file is digested by one process of `collective`, and all of them raise the same error.
    """
    collective = collective or Collective()
    state, sizes = collective.run_on_rank0(lambda: _stat_files(folder), error=CheckpointError)
    found = collective.gather(_check_share(folder, state["files"], sizes, collective))
    unseen = [problem for is_unseen, problem in found if is_unseen]
    damaged = [problem for is_unseen, problem in found if problem and not is_unseen]
    is_unseen, problem = collective.broadcast((bool(unseen), (unseen + damaged + [""])[0]))
    if problem:
        raise (UnseenError if is_unseen else CheckpointError)(problem)
    return dict(state)


def _stat_files(folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
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
        checks = {name: pool.submit(is_undamaged, folder / name, files[name]) for name in names}
    for name, check in checks.items():
        if error := check.exception():
            if not isinstance(error, OSError):
                raise error
            return False, f"{folder / name}: damaged, it cannot be read ({error})"
        if not check.result():
            return False, f"{folder / name}: damaged, its content does not match the digest in {STATE}"
    return False, ""


def is_undamaged(path: Path, digest: str) -> bool:
    """Whether the content has this digest; one without a kind is the SHA-256 of formats 1 and 2."""
    if not digest.startswith(XXH3):
        return digest_file(path) == digest
    with path.open("rb") as file:
        return XXH3 + hashlib.file_digest(file, xxh3_128).hexdigest() == digest


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` alone, checked against its own seal; the tensor files are not looked at."""
    path = folder / STATE
    if not path.is_file():
        raise CheckpointError(f"{folder}: incomplete, {STATE} is missing")
    text = path.read_bytes()
    try:
        state = json.loads(text)
        sealed = seal_state({key: value for key, value in state.items() if key != "seal"}, state["format"])
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: damaged, not the JSON that was written") from error
    if sealed.encode() != text:
        raise CheckpointError(f"{path}: damaged, its content does not match its seal")
    if state["format"] not in _READABLE:
        readable = f"{_READABLE[0]} to {_READABLE[-1]}"
        raise CheckpointError(f"{path}: format {state['format']}, this version reads formats {readable}")
    return dict(state)


def seal_state(state: Mapping[str, Any], number: int = FORMAT) -> str:
    content = {**state, "format": number}
    return json.dumps({**content, "seal": digest_value(content)}, indent=1, sort_keys=True) + "\n"
