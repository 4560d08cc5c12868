"""Model folders: `config.json` and `model.safetensors`, what a finished run exports and another one starts from."""

from __future__ import annotations

import json
import os
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
from frameloom.core.files import PARTIAL, atomic_folder, digest_file

CONFIG = "config.json"
TENSORS = "model.safetensors"
EXPORT = "export"
_PICKLES = {".pt", ".pth", ".ckpt", ".bin", ".pkl", ".tar"}


@dataclass(frozen=True)
class ModelFolder:
    """`kind` is denoiser or vae, `name` its family, `config` the architecture; empty for a bare tensor file."""

    kind: str
    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str


def write_model_folder(
    folder: Path, *, kind: str, name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write the folder; one that is already there is replaced in a single rename."""
    old = folder.with_name(f"{PARTIAL}{uuid4().hex[:8]}-old")
    fresh = folder.with_name(f"{PARTIAL}{uuid4().hex[:8]}-new")
    with atomic_folder(fresh) as temporary:
        save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, temporary / TENSORS)
        content = {"kind": kind, "name": name, "config": dict(config), "sha256": digest_file(temporary / TENSORS)}
        (temporary / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    if folder.exists():
        os.rename(folder, old)
    os.rename(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def read_weights(path: Path) -> ModelFolder:
    """Read a model folder, a run folder (its export) or a bare `.safetensors` file. A pickle is never opened."""
    if path.is_dir():
        return _read_folder(path if (path / CONFIG).is_file() else path / EXPORT, asked=path)
    if path.suffix in _PICKLES:
        raise CheckpointError(
            f"{path}: this is a pickle, which can run code when opened; give a .safetensors file or a model folder"
        )
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file or folder; name a model folder, a run folder or a .safetensors file"
        )
    return ModelFolder(kind="", name="", config={}, tensors=_load(path), digest=digest_file(path))


def _read_folder(folder: Path, *, asked: Path) -> ModelFolder:
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{asked}: neither a model folder (no {CONFIG}) nor a finished run (no {EXPORT}/{CONFIG})"
        )
    try:
        content = json.loads((folder / CONFIG).read_text())
        kind, name, config, digest = (content[key] for key in ("kind", "name", "config", "sha256"))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / CONFIG}: not a model description ({error!r}); export the model again"
        ) from error
    if not (folder / TENSORS).is_file() or digest_file(folder / TENSORS) != digest:
        raise CheckpointError(
            f"{folder / TENSORS}: missing or damaged, it does not match {CONFIG}; export the model again"
        )
    return ModelFolder(kind=kind, name=name, config=config, tensors=_load(folder / TENSORS), digest=digest)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error}); copy it again") from error
