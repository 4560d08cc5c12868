"""Training checkpoints: `step-00001200/` with safetensors files and `state.json`, complete or absent.

A folder is written under another name, digested, synced and renamed once. `state.json` lists the SHA-256
of every file beside it and one of itself, so a reader notices a flipped byte before a weight is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from frameloom.core.errors import CheckpointError
from frameloom.core.files import PARTIAL, atomic_folder, digest_file, digest_value, remove_partial
from frameloom.core.log import get_logger

FORMAT = 1
STATE = "state.json"
_STEP = re.compile(r"^step-(\d{8,})$")
_log = get_logger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: `tensors["model"]["blocks.0.weight"]`, and the JSON `state` of the run."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def save_checkpoint(root: Path, checkpoint: Checkpoint) -> Path:
    """Write the checkpoint; a step that is already there is left alone, because nothing is written twice."""
    folder = step_folder(root, checkpoint.step)
    if folder.exists():
        return folder
    try:
        with atomic_folder(folder) as temporary:
            for name, tensors in checkpoint.tensors.items():
                save_file(
                    {key: tensor.detach().contiguous() for key, tensor in tensors.items()}, _file(temporary, name)
                )
            files = {path.name: digest_file(path) for path in sorted(temporary.iterdir())}
            (temporary / STATE).write_text(_sealed({**checkpoint.state, "step": checkpoint.step, "files": files}))
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(root).free
        needed = sum(tensor.nbytes for group in checkpoint.tensors.values() for tensor in group.values())
        raise CheckpointError(
            f"{folder}: could not be saved ({error}); it needs {needed:,} bytes and {free:,} are free. "
            "Earlier checkpoints are untouched: free some space and start the run again"
        ) from error
    return folder


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint after checking every digest; CheckpointError names the file that is wrong."""
    state = verify_checkpoint(folder)
    tensors = {Path(name).stem: load_file(folder / name) for name in state["files"]}
    return Checkpoint(step=state["step"], tensors=tensors, state=state)


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """The state of a complete and undamaged checkpoint."""
    state = read_state(folder)
    for name, digest in state["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: incomplete, {name} is missing")
        if digest_file(path) != digest:
            raise CheckpointError(f"{path}: damaged, its content does not match the digest in {STATE}")
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` alone, checked against its own seal; the tensor files are not looked at."""
    path = folder / STATE
    if not path.is_file():
        raise CheckpointError(f"{folder}: incomplete, {STATE} is missing")
    text = path.read_bytes()
    try:
        state = json.loads(text)
        sealed = _sealed({key: value for key, value in state.items() if key != "seal"})
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged, not the JSON that was written") from error
    if sealed.encode() != text:
        raise CheckpointError(f"{path}: damaged, its content does not match its seal")
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {state['format']}, this version reads format {FORMAT}")
    return dict(state)


def list_steps(root: Path) -> list[int]:
    """Steps that have a folder, oldest first; unfinished ones have another name and do not show."""
    if not root.is_dir():
        return []
    return sorted(int(found.group(1)) for path in root.iterdir() if (found := _STEP.match(path.name)))


def load_latest(root: Path, *, set_aside: bool = False) -> Checkpoint | None:
    """The newest undamaged checkpoint; None for an unused folder.

    Damaged ones are passed over with a warning; `set_aside` also renames them, so that their step can be saved
    again. When only damaged ones are there this is an error: a run never starts from scratch by itself.
    """
    steps = list_steps(root)
    for step in reversed(steps):
        try:
            return load_checkpoint(step_folder(root, step))
        except (CheckpointError, SafetensorError) as error:
            _log.warning("%s; trying the one before", error)
            if set_aside:
                _set_aside(step_folder(root, step))
    if steps:
        raise CheckpointError(
            f"{root}: none of the {len(steps)} checkpoints is complete; restore one, "
            "or move the run folder away to start again"
        )
    return None


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


def _sealed(state: Mapping[str, Any]) -> str:
    content = {"format": FORMAT, **state}
    return json.dumps({**content, "seal": digest_value(content)}, indent=1, sort_keys=True) + "\n"


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"
