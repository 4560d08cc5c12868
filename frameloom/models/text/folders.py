"""Where the parts of a text encoder lie in a local folder: weights, configuration, tokenizer. Nothing is loaded here.

Two layouts are known: one folder with everything in it, and the folders of a diffusers pipeline, `text_encoder` with
`tokenizer`, `text_encoder_2` with `tokenizer_2` and so on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import digest_file, digest_value
from frameloom.core.json_objects import read_object

CONFIG = "config.json"
# Any one of these groups of files makes a tokenizer.
TOKENIZERS = (("tokenizer.json",), ("spiece.model",), ("vocab.json", "merges.txt"))
_TOKENIZER_FILES = (
    *("tokenizer.json", "spiece.model", "vocab.json", "merges.txt"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
_VARIANTS = (None, "fp16", "bf16")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class EncoderFolder:
    """`weights` holds config.json and `files`, the safetensors files in the published number format `variant`."""

    weights: Path
    files: tuple[Path, ...]
    variant: str | None
    tokenizer: Path

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file that the states depend on, by its role rather than by its place."""
        parts = [self.weights / CONFIG, *self.files]
        named = {f"weights/{path.name}": path for path in parts}
        return {name: digest_file(path) for name, path in named.items()} | digest_tokenizer(self.tokenizer)


@dataclass(frozen=True)
class EncoderFile:
    """An encoder in a single file beside other parts of a model: `weights` is that file.

    `tensors` are those of this encoder under transformers' names, read when they are asked for; `config` is what its
    config.json would say.
    """

    weights: Path
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    tokenizer: Path

    def digests(self) -> dict[str, str]:
        """Of this encoder's tensors alone: what else is in the file does not matter to the states."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            tensor = self.tensors[name].contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        words = digest_tokenizer(self.tokenizer)
        return {"weights/config.json": digest_value(dict(self.config)), "weights/tensors": digest.hexdigest(), **words}


def list_tokenizer(folder: Path) -> list[Path]:
    """The files of a folder that make its tokenizer."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def digest_tokenizer(folder: Path) -> dict[str, str]:
    return {f"tokenizer/{path.name}": digest_file(path) for path in list_tokenizer(folder)}


def holds_tokenizer(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in group) for group in TOKENIZERS)


def find_folder(path: Path | None, *, encoder: str, kinds: Collection[str], subfolders: Sequence[str]) -> EncoderFolder:
    """The parts of an encoder below `path`, whose config.json must name one of `kinds` as its model type."""
    if path is None:
        raise ConfigError(
            f"text encoder {encoder}: its weights come with no package; give the folder that holds them as path"
        )
    weights = _find_weights(path, encoder, kinds, subfolders)
    files, variant = _find_files(weights, encoder)
    return EncoderFolder(weights, files, variant, _find_tokenizer(weights, encoder))


def _find_weights(path: Path, encoder: str, kinds: Collection[str], subfolders: Sequence[str]) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; name the folder of the text encoder {encoder}")
    places = [path] if (path / CONFIG).is_file() else [path / name for name in subfolders]
    found = {place: _read_kind(place / CONFIG) for place in places if (place / CONFIG).is_file()}
    if not found:
        inside = " or ".join(f"{name}/{CONFIG}" for name in subfolders)
        raise CheckpointError(
            f"{path}: has neither {CONFIG} nor {inside}; name the folder of the text encoder {encoder}"
        )
    for place, kind in found.items():
        if kind in kinds:
            return place
    listed = ", ".join(f"{place} holds '{kind}'" for place, kind in found.items())
    raise CheckpointError(
        f"{path}: the text encoder {encoder} is a model of type {' or '.join(sorted(kinds))}, but {listed}; "
        "name another folder or another encoder"
    )


def _read_kind(config: Path) -> str:
    kind = _read_json(config).get("model_type")
    return kind if isinstance(kind, str) else "no model_type"


def _find_files(weights: Path, encoder: str) -> tuple[tuple[Path, ...], str | None]:
    for variant in _VARIANTS:
        mark = f".{variant}" if variant else ""
        index = weights / f"model.safetensors.index{mark}.json"
        if (whole := weights / f"model{mark}.safetensors").is_file():
            return (whole,), variant
        if index.is_file():
            return _read_index(index), variant
    pickles = sorted(found.name for pattern in _PICKLES for found in weights.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{weights}: has its weights as {', '.join(pickles)} only, a pickle, which can run code when opened; "
            f"convert it: frameloom convert {weights / pickles[0]} {weights / 'model.safetensors'}"
        )
    raise CheckpointError(
        f"{weights}: has no model.safetensors and no model.safetensors.index.json; copy {encoder} again"
    )


def _read_index(index: Path) -> tuple[Path, ...]:
    placed = _read_json(index).get("weight_map")
    names = sorted(set(placed.values())) if isinstance(placed, dict) else []
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(f"{index}: does not list the files that hold the weights; copy the folder again")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{index.parent}: {', '.join(missing)} missing; copy the folder again")
    return tuple(index.parent / name for name in names)


def _find_tokenizer(weights: Path, encoder: str) -> Path:
    sibling = weights.with_name(weights.name.replace("text_encoder", "tokenizer"))
    for place in (weights, sibling):
        if holds_tokenizer(place):
            return place
    files = ", ".join(" with ".join(group) for group in TOKENIZERS)
    raise CheckpointError(
        f"{weights}: no tokenizer here or in {sibling} ({files}); copy that of the text encoder {encoder} there"
    )


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, error=CheckpointError, fix="copy it again")
