"""Model folders: `config.json` and `model.safetensors`, written by a finished run and read as weights to start from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from frameloom.checkpoint.reader import (
    STATE,
    StoredCheckpoint,
    find_latest,
    list_steps,
    read_state,
    step_folder,
    verify_checkpoint,
)
from frameloom.checkpoint.resharding import list_groups
from frameloom.core.errors import CheckpointError
from frameloom.core.files import digest_file, digest_value, replace_folder
from frameloom.core.logging import get_logger
from frameloom.weights.files import CONFIG, find_weights, open_weights, read_config, refuse_pickle
from frameloom.weights.lazy_tensors import LazyTensors, defer_tensors
from frameloom.weights.safetensors_file import open_safetensors, write_safetensors

TENSORS = "model.safetensors"
EXPORT = "export"
LORA = "lora"  # the kind of an export that holds adapters alone
_KEYS = ("kind", "name", "config", "sha256")
_log = get_logger(__name__)


@dataclass(frozen=True)
class Architecture:
    """`kind` is denoiser or vae, `name` its family; all are empty for published files."""

    kind: str
    name: str
    config: dict[str, Any]


@dataclass(frozen=True)
class ModelFolder(Architecture):
    """`tensors` are read one at a time, at each access. `original_config` is the `config.json` that
    published files came with."""

    tensors: LazyTensors
    digest: str
    original_config: Mapping[str, Any] = field(default_factory=dict)


def write_model_folder(
    folder: Path,
    *,
    kind: str,
    name: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> str:
    """Write the folder tensor by tensor and return the digest; one that is already there is replaced in one rename."""
    with replace_folder(folder) as temporary:
        # Tied tensors get a copy each: a model folder is complete for any reader of safetensors.
        digest = write_safetensors(temporary / TENSORS, defer_tensors(tensors).untied(), advance=advance)
        content = {"kind": kind, "name": name, "config": dict(config), "sha256": digest}
        (temporary / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    return digest


def read_weights(path: Path, *, kind: str = "") -> ModelFolder:
    """Read a model folder, a run folder (its export, or else its newest checkpoint), a folder of one checkpoint, or
    published safetensors: a file, an index, a folder, a pipeline.

    `kind` (denoiser or vae) selects the part of a pipeline. A pickle is never opened.
    """
    own = find_own(path)
    if own is not None:
        content = _read_description(own)
        if not (own / TENSORS).is_file() or digest_file(own / TENSORS) != content["sha256"]:
            raise CheckpointError(
                f"{own / TENSORS}: missing or damaged, it does not match {CONFIG}; export the model again"
            )
        tensors = open_safetensors(own / TENSORS)
        return ModelFolder(content["kind"], content["name"], content["config"], tensors, content["sha256"])
    if (path / STATE).is_file():
        return _read_step(StoredCheckpoint(path, verify_checkpoint(path)))
    if _is_run(path) and (stored := find_latest(path / "checkpoints")) is not None:
        return _read_step(stored)
    found = find_weights(path, kind=kind)
    refuse_pickle(found)
    tensors = open_weights(found)
    digests = {file.name: digest_file(file) for file in found.files}
    digest = digests.popitem()[1] if len(digests) == 1 else digest_value(digests)
    # The file of a model folder may be named by itself, to go on from it with another architecture.
    published = {} if find_own(found.path.parent) == found.path.parent else found.config
    return ModelFolder("", "", {}, tensors, digest, published)


def read_architecture(path: Path) -> Architecture | None:
    """What the weights at `path` would be built as, without a look at them; None for anything that is not ours."""
    own = find_own(path)
    if own is not None:
        content = _read_description(own)
        return Architecture(content["kind"], content["name"], content["config"])
    steps = path / "checkpoints"
    latest = list_steps(steps)[-1:] if _is_run(path) else []
    folder = step_folder(steps, latest[0]) if latest else path
    state = read_state(folder) if (folder / STATE).is_file() else {}
    return Architecture(state["kind"], state["name"], state["architecture"]) if "kind" in state else None


def find_own(path: Path) -> Path | None:
    """The model folder at `path`, which may be a run folder; None for anything that is not ours."""
    for folder in (path, path / EXPORT):
        if (folder / CONFIG).is_file() and any(key in read_config(folder) for key in ("kind", "sha256")):
            return folder
    return None


def _read_description(folder: Path) -> dict[str, Any]:
    content = read_config(folder)
    if missing := [key for key in _KEYS if key not in content]:
        raise CheckpointError(
            f"{folder / CONFIG}: not a model description ({', '.join(missing)} missing); export the model again"
        )
    if content["kind"] == LORA:
        raise CheckpointError(
            f"{folder}: holds a LoRA, not a whole model; name it in lora.weights or sample.lora, and the weights it "
            "belongs to in model.weights"
        )
    return content


def _is_run(path: Path) -> bool:
    return (path / "recipe.yaml").is_file() and (path / "checkpoints").is_dir()


def _read_step(stored: StoredCheckpoint) -> ModelFolder:
    """The weights of a step, averaged where there are averages, as an export of that step would have them."""
    folder, state = stored.folder, stored.state
    if "kind" not in state or "lora" in state or "inversion" in state:
        found = "a word or adapters" if "kind" in state else "weights that an older version saved"
        raise CheckpointError(
            f"{folder}: holds {found}, not a whole model with its description; take the model away with "
            f"`frameloom export {folder.parent.parent} --step {stored.step}` and name what that writes"
        )
    if state["kind"] == "vae":
        raise CheckpointError(
            f"{folder}: the scale of an autoencoder's latents is measured at the end of its run; let it finish, and "
            f"name {folder.parent.parent}"
        )
    groups = stored.open()
    pending = groups.defer("model").pending
    has_average = "ema" in list_groups(state)
    if has_average:
        pending = {**pending, **groups.defer("ema").pending}
    _log.info("%s: %s weights of step %d", folder, "averaged" if has_average else "last", stored.step)
    digest = digest_value(state["files"])
    return ModelFolder(state["kind"], state["name"], state["architecture"], LazyTensors(pending), digest)
