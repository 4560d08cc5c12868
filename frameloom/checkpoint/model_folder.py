"""Model folders: `config.json` and `model.safetensors`, what a finished run exports and another one starts from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from frameloom.checkpoint.folders import replace_folder
from frameloom.checkpoint.lazy_tensors import LazyTensors, defer_tensors
from frameloom.checkpoint.safetensors_file import open_safetensors, write_safetensors
from frameloom.checkpoint.weight_files import CONFIG, find_weights, open_weights, read_config, refuse_pickle
from frameloom.core.errors import CheckpointError
from frameloom.core.files import digest_file, digest_value

__all__ = ["CONFIG", "EXPORT", "LORA", "TENSORS", "ModelFolder", "find_own", "read_weights", "write_model_folder"]

TENSORS = "model.safetensors"
EXPORT = "export"
LORA = "lora"  # the kind of an export that holds adapters alone
_KEYS = ("kind", "name", "config", "sha256")


@dataclass(frozen=True)
class ModelFolder:
    """`kind` is denoiser or vae, `name` its family, `config` the architecture; empty for published files.

    `tensors` are read one at a time, each time they are asked for. `original_config` is the `config.json` that
    published files came with.
    """

    kind: str
    name: str
    config: dict[str, Any]
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
    """Read a model folder, a run folder (its export), or published safetensors: a file, an index, a folder, a pipeline.

    `kind` (denoiser or vae) says which part of a pipeline is meant. A pickle is never opened.
    """
    own = find_own(path)
    if own is not None:
        return _read_own(own)
    found = find_weights(path, kind=kind)
    refuse_pickle(found)
    tensors = open_weights(found)
    digests = {file.name: digest_file(file) for file in found.files}
    digest = digests.popitem()[1] if len(digests) == 1 else digest_value(digests)
    # The file of a model folder of ours may be named by itself, to go on from it with another architecture.
    published = {} if find_own(found.path.parent) == found.path.parent else found.config
    return ModelFolder("", "", {}, tensors, digest, published)


def find_own(path: Path) -> Path | None:
    """The model folder at `path`, which may be a run folder; None for anything that is not ours."""
    for folder in (path, path / EXPORT):
        if (folder / CONFIG).is_file() and any(key in read_config(folder) for key in ("kind", "sha256")):
            return folder
    return None


def _read_own(folder: Path) -> ModelFolder:
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
    if not (folder / TENSORS).is_file() or digest_file(folder / TENSORS) != content["sha256"]:
        raise CheckpointError(
            f"{folder / TENSORS}: missing or damaged, it does not match {CONFIG}; export the model again"
        )
    tensors = open_safetensors(folder / TENSORS)
    return ModelFolder(content["kind"], content["name"], content["config"], tensors, content["sha256"])
