"""Finding the weights at a path: a file, an index of shards, a published folder, or a part of a whole pipeline."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frameloom.core.errors import CheckpointError
from frameloom.core.text_files import read_object
from frameloom.weights.lazy_tensors import LazyTensors
from frameloom.weights.pickle_reader import PICKLES
from frameloom.weights.safetensors_file import open_safetensors
from frameloom.weights.shard_index import INDEX, join_parts, open_sharded, read_index

CONFIG = "config.json"
SAFETENSORS = ".safetensors"
# Sub-folders of published pipelines and of other trainers' checkpoints.
_PARTS: dict[str, tuple[str, ...]] = {
    "denoiser": ("transformer", "unet", "model", "transformer_ema", "unet_ema", "model_ema"),
    "vae": ("vae", "vae_ema"),
}
# A folder may also hold variants (`.fp16.`) or other models; these names are the ones that libraries open by default.
_USUAL = ("diffusion_pytorch_model", "model", "pytorch_model")
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.\w+")


@dataclass(frozen=True)
class WeightFiles:
    """The files of one model: `path` is the file or index to name to people, `files` hold the tensors.

    `config` is the published `config.json` beside them; empty when there is none.
    """

    path: Path
    files: tuple[Path, ...]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """`diffusion_pytorch_model` for a file, a set of shards and an index of that name."""
        name = self.path.name.removesuffix(INDEX)
        if match := _NUMBERED.fullmatch(name):
            return match["stem"]
        return Path(name).stem

    @property
    def is_pickle(self) -> bool:
        return any(is_pickle(file) for file in self.files)


def is_pickle(path: Path) -> bool:
    return path.suffix.lower() in PICKLES


def find_weights(path: Path, *, kind: str = "") -> WeightFiles:
    """The one set of weights at `path`; CheckpointError lists the candidates when there is none or several.

    `kind` (denoiser or vae) chooses the part of a pipeline.
    """
    if path.is_dir():
        return _find_in_folder(path, kind)
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file or folder; name a model folder, a run folder or a .safetensors file"
        )
    config = _read_config_beside(path.parent)
    if path.name.endswith(INDEX):
        return WeightFiles(path, tuple(read_index(path).files), config)
    if path.suffix.lower() == SAFETENSORS or is_pickle(path):
        return WeightFiles(path, (path,), config)
    raise CheckpointError(
        f"{path}: not a file of weights by its name; expected .safetensors, {SAFETENSORS}{INDEX}, {', '.join(PICKLES)}"
    )


def open_weights(found: WeightFiles, open_file: Callable[[Path], LazyTensors] = open_safetensors) -> LazyTensors:
    """All tensors of a set of files; nothing but headers is read."""
    if found.path.name.endswith(INDEX):
        return open_sharded(read_index(found.path), open_file)
    return join_parts({file: open_file(file) for file in found.files})


def refuse_pickle(found: WeightFiles) -> None:
    """Training and sampling never open a pickle; say how it becomes a file that they do open."""
    if found.is_pickle:
        out = found.path.parent / f"{found.stem}{SAFETENSORS}"
        raise CheckpointError(
            f"{found.path}: this is a pickle, which can run code when opened; convert it first: "
            f"frameloom convert {shlex.quote(str(found.path))} {shlex.quote(str(out))}"
        )


def _find_in_folder(folder: Path, kind: str) -> WeightFiles:
    own = _list_sets(folder)
    if own:
        chosen = _choose_usual(folder, own)
        return WeightFiles(chosen.path, chosen.files, _read_config_beside(folder))
    names = _PARTS.get(kind) or [name for parts in _PARTS.values() for name in parts]
    parts = [folder / name for name in names if (folder / name).is_dir() and _list_sets(folder / name)]
    if len(parts) == 1:
        return _find_in_folder(parts[0], kind)
    if parts:
        listing = ", ".join(str(part) for part in parts)
        raise CheckpointError(f"{folder}: holds several models; name one of them: {listing}")
    raise CheckpointError(
        f"{folder}: holds no weights: neither {CONFIG} of a model folder, nor export/{CONFIG} of a finished run, nor "
        f"{SAFETENSORS} files here or in a part of a pipeline ({', '.join(names)})"
    )


def _list_sets(folder: Path) -> list[WeightFiles]:
    """All sets of weights of a folder; pickles count only where there is no safetensors file."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return _group(path for path in files if _holds(path, (SAFETENSORS,))) or _group(
        path for path in files if _holds(path, PICKLES)
    )


def _holds(path: Path, suffixes: tuple[str, ...]) -> bool:
    return Path(path.name.removesuffix(INDEX)).suffix.lower() in suffixes


def _group(paths: Iterable[Path]) -> list[WeightFiles]:
    """Indexes with their shards, numbered shards without an index, and single files."""
    files = list(paths)
    sets = [WeightFiles(path, tuple(read_index(path).files)) for path in files if path.name.endswith(INDEX)]
    listed = {file for one in sets for file in (one.path, *one.files)}
    numbered: dict[tuple[str, int], list[Path]] = {}
    for path in (path for path in files if path not in listed):
        if match := _NUMBERED.fullmatch(path.name):
            numbered.setdefault((match["stem"], int(match["total"])), []).append(path)
        else:
            sets.append(WeightFiles(path, (path,)))
    return sets + [_join_numbered(total, paths) for (_, total), paths in numbered.items()]


def _join_numbered(total: int, files: list[Path]) -> WeightFiles:
    if len(files) != total:
        raise CheckpointError(f"{files[0]}: one of {total} shards, but {len(files)} are there; download the others")
    return WeightFiles(files[0], tuple(files))


def _choose_usual(folder: Path, sets: list[WeightFiles]) -> WeightFiles:
    usual = [one for one in sets if one.stem in _USUAL]
    choice = usual or sets
    if len(choice) > 1:
        names = ", ".join(one.path.name for one in choice)
        raise CheckpointError(f"{folder}: holds several sets of weights ({names}); name the file itself")
    return choice[0]


def _read_config_beside(folder: Path) -> dict[str, Any]:
    return read_config(folder) if (folder / CONFIG).is_file() else {}


def read_config(folder: Path) -> dict[str, Any]:
    return read_object(folder / CONFIG, error=CheckpointError, fix="export or download it again")
