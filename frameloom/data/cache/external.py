"""Caches that other training systems wrote, read in place: one file per sample, found by the clip's name or a column.

Open-Sora-Plan: folders of text embeddings beside the media (three- and four-path lists). SDXL: `latent_cache`,
`vector_cache` and `crossattn_cache` folders of .npy. Open-Sora 2.0: the columns latents_path, text_t5_path and
text_clip_path. They have no fingerprint, so shapes are all that can be checked; every error names its file.
Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from frameloom.core.errors import ConfigError, DataError
from frameloom.core.logging import get_logger
from frameloom.core.paths import safe_join
from frameloom.data.buckets.policy import Bucket
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.decode import ClipError

_log = get_logger(__name__)

SUFFIXES = (".npz", ".npy", ".safetensors")
_PICKLES = (".pt", ".pth", ".pkl", ".bin", ".ckpt")
_FIELD = re.compile(r"\{(\w+)\}")

LatentShape = Callable[[Bucket], tuple[int, int, int, int]]


@dataclass(frozen=True)
class TextShape:
    """What the denoiser expects: token states [K, D] and a pooled vector."""

    max_length: int
    width: int
    pooled_width: int


def read_arrays(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name ("" in a .npy). Nothing is ever unpickled. DataError names the file."""
    if path.suffix in _PICKLES:
        raise DataError(
            f"{path}: a pickle, which can run code when it is opened; convert it on a machine you trust: "
            f"frameloom convert {path} {path.with_suffix('.safetensors')}"
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            arrays = {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; name another folder, or take the row out of the manifest") from error
    except (OSError, ValueError, TypeError, EOFError, SafetensorError, zipfile.BadZipFile) as error:
        known = ", ".join(SUFFIXES)
        raise DataError(f"{path}: cannot be read ({error}); it must be a plain {known} file of numbers") from error


def _pick(path: Path, arrays: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """The array under the first of `names`, or the only one."""
    for name in names:
        if name in arrays:
            return arrays[name]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise DataError(f"{path}: holds {', '.join(sorted(arrays))}; wanted one named {' or '.join(names)}")


def _drop_leading(tensor: Tensor, num_dims: int) -> Tensor:
    while tensor.ndim > num_dims and tensor.shape[0] == 1:
        tensor = tensor[0]
    return tensor


def _find_file(folder: Path, stems: Sequence[str], where: str) -> Path:
    """The file of the first stem that has one; a pickle is only found to be refused."""
    for stem in stems:
        for suffix in (*SUFFIXES, *_PICKLES):
            path = safe_join(folder, f"{stem}{suffix}", where=where)
            if path.is_file():
                return path
    tried = ", ".join(f"{stem}.npz" for stem in stems)
    raise DataError(f"{folder}: no embedding for {where}; tried {tried} and the endings {', '.join(SUFFIXES[1:])}")


class ExternalText(ABC):
    """Embeddings by manifest row."""

    def __init__(self, manifest: Manifest, shape: TextShape) -> None:
        self._manifest = manifest
        self._shape = shape

    @abstractmethod
    def read_row(self, row: int) -> dict[str, Tensor]:
        """tokens_KD, mask_K and pooled_D of one row, of the expected shape."""

    def get_rows(self, rows: NDArray[np.int64] | Sequence[int]) -> dict[str, Tensor]:
        """The embeddings of these rows, stacked, under the names that batches use."""
        samples = [self.read_row(int(row)) for row in rows]
        names = {"tokens_KD": "tokens_BKD", "mask_K": "mask_BK", "pooled_D": "pooled_BD"}
        return {name: torch.stack([sample[key] for sample in samples]) for key, name in names.items()}

    def _tokens(self, path: Path, tokens: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Padded to the expected length, zero where the mask is."""
        tokens_KD, shape = _drop_leading(tokens, 2).float(), self._shape
        if tokens_KD.ndim != 2 or tokens_KD.shape[1] != shape.width or len(tokens_KD) > shape.max_length:
            raise DataError(
                f"{path}: embedding of shape {tuple(tokens.shape)}; this recipe expects at most {shape.max_length} "
                f"tokens of width {shape.width} (text.encoders): choose the encoder and max_length it was made with"
            )
        mask_K = torch.ones(len(tokens_KD)) if mask is None else _drop_leading(mask, 1)
        if mask_K.shape != tokens_KD.shape[:1]:
            raise DataError(f"{path}: mask of shape {tuple(mask_K.shape)} for {len(tokens_KD)} tokens")
        padded_KD = torch.zeros(shape.max_length, shape.width)
        padded_K = torch.zeros(shape.max_length, dtype=torch.bool)
        padded_K[: len(mask_K)] = mask_K.bool()
        padded_KD[: len(tokens_KD)] = tokens_KD
        return {"tokens_KD": padded_KD * padded_K[:, None], "mask_K": padded_K}

    def _pooled(self, path: Path, vector: Tensor) -> Tensor:
        vector_D = _drop_leading(vector, 1).float()
        if vector_D.shape != (self._shape.pooled_width,):
            raise DataError(
                f"{path}: pooled vector of shape {tuple(vector.shape)}; this recipe expects width "
                f"{self._shape.pooled_width}; choose the last of text.encoders it was made with"
            )
        return vector_D


class OpenSoraPlanText(ExternalText):
    """Open-Sora-Plan: `<path without ending>-<caption>.npz` (1.3) or `<path>-<key>-<value>….npz` (1.1).

    A second folder holds the pooled vectors of the second encoder; without one they are zero, which only a denoiser
    that does not look at them can use. `name` gives the file name in the manifest's columns: "{stem}-part-{part}".
    """

    def __init__(
        self, manifest: Manifest, folders: Sequence[Path], shape: TextShape, *, name: str | None = None
    ) -> None:
        super().__init__(manifest, shape)
        if not 1 <= len(folders) <= 2:
            raise ConfigError(
                f"data.cache.external_folders names {len(folders)} folders; open_sora_plan has one or two"
            )
        self._folders = list(folders)
        self._name = name
        for field in _FIELD.findall(name or ""):
            if field != "stem":
                manifest.column(field)  # refuses a column that is not there
        if len(folders) == 1:
            _log.warning("%s: no folder of a second encoder, so pooled vectors are zero", folders[0])

    def read_row(self, row: int) -> dict[str, Tensor]:
        where, stems = f"{self._manifest.source}: row {row}", self._stems(row)
        path = _find_file(self._folders[0], stems, where)
        arrays = read_arrays(path)
        mask = arrays.get("mask")
        found = self._tokens(path, _pick(path, arrays, ["text_emb", "tokens"]), mask)
        if len(self._folders) == 1:
            return found | {"pooled_D": torch.zeros(self._shape.pooled_width)}
        pooled = _find_file(self._folders[1], stems, where)
        return found | {"pooled_D": self._pooled(pooled, _pick(pooled, read_arrays(pooled), ["text_emb", "pooled"]))}

    def _stems(self, row: int) -> list[str]:
        path = PurePosixPath(self._manifest.clip(row).path)
        stem = str(path.with_suffix(""))
        if self._name is not None:
            return [_FIELD.sub(lambda found: stem if found[1] == "stem" else self._value(found[1], row), self._name)]
        columns = self._manifest.columns
        number = self._value("caption_index", row) if "caption_index" in columns else "0"
        window = [f"{stem}-frame_idx-{self._value('frame_idx', row)}"] if "frame_idx" in columns else []
        return [f"{stem}-{number}", *window, stem]

    def _value(self, column: str, row: int) -> str:
        return str(self._manifest.column(column)[row])


def _sdxl_name(path: str) -> str:
    """The name in the cache: the file's, cut at its first dot."""
    return PurePosixPath(path).name.partition(".")[0]


def check_sdxl_names(manifest: Manifest) -> None:
    """DataError when two rows share a name: the later one has overwritten the earlier in the cache."""
    seen: dict[str, str] = {}
    for path in manifest.column("path").to_list():
        first = seen.setdefault(_sdxl_name(path), path)
        if first != path:
            raise DataError(
                f"{manifest.source}: {first} and {path} have the same name '{_sdxl_name(path)}' in an SDXL cache, so "
                "one has overwritten the other; rename one of them and cache again"
            )


class SDXLText(ExternalText):
    """`crossattn_cache` as token states and the first numbers of `vector_cache` as the pooled vector."""

    def __init__(self, manifest: Manifest, folder: Path, shape: TextShape) -> None:
        super().__init__(manifest, shape)
        check_sdxl_names(manifest)
        self._folder = folder

    def read_row(self, row: int) -> dict[str, Tensor]:
        name, where = _sdxl_name(self._manifest.clip(row).path), f"{self._manifest.source}: row {row}"
        states = safe_join(self._folder / "crossattn_cache", f"{name}.npy", where=where)
        vector = safe_join(self._folder / "vector_cache", f"{name}.npy", where=where)
        found = self._tokens(states, _pick(states, read_arrays(states), [""]), None)
        whole = _drop_leading(_pick(vector, read_arrays(vector), [""]), 1)
        # Behind the pooled text come the embedded sizes and crop, which belong to the denoiser.
        return found | {"pooled_D": self._pooled(vector, whole[: self._shape.pooled_width])}


class ColumnText(ExternalText):
    """Open-Sora 2.0: text_t5_path and text_clip_path, relative to the manifest's root. All tokens count, as there."""

    def read_row(self, row: int) -> dict[str, Tensor]:
        states, vector = (column_file(self._manifest, name, row) for name in ("text_t5_path", "text_clip_path"))
        found = self._tokens(states, _pick(states, read_arrays(states), ["text_t5", "y", ""]), None)
        return found | {"pooled_D": self._pooled(vector, _pick(vector, read_arrays(vector), ["text_clip", "vec", ""]))}


def column_file(manifest: Manifest, column: str, row: int) -> Path:
    """The file that a column names, below the manifest's root."""
    return safe_join(manifest.root, str(manifest.column(column)[row]), where=f"{manifest.source}: row {row}, {column}")


class ExternalLatents:
    """Latents of one file per row; `find` gives its path. The deviation is zero: noise is in the latent."""

    def __init__(self, find: Callable[[int], Path], shape: LatentShape) -> None:
        self._find = find
        self._shape = shape

    @property
    def may_refuse(self) -> bool:
        return True

    def check(self, row: int, bucket: Bucket) -> None:
        """ClipError for a row without a file: it is replaced and counted like a clip that cannot be read."""
        path = self._find(row)
        if not path.is_file():
            raise ClipError(f"{path}: no such latent in the cache")

    def get(self, rows: NDArray[np.int64], bucket: Bucket) -> tuple[Tensor, Tensor]:
        mean = torch.stack([self._read(self._find(int(row)), bucket) for row in rows])
        return mean, torch.zeros_like(mean)

    def _read(self, path: Path, bucket: Bucket) -> Tensor:
        found, wanted = _pick(path, read_arrays(path), ["latents", "latent", "mean", ""]), self._shape(bucket)
        latent = found
        while latent.ndim > 3 and latent.shape[0] == 1 and tuple(latent.shape) != wanted:
            latent = latent[0]
        if latent.ndim == 3:
            latent = latent[:, None]
        if tuple(latent.shape) != wanted:
            raise DataError(
                f"{path}: latent of shape {tuple(found.shape)}; bucket {bucket.name} ({bucket.height}x{bucket.width}) "
                f"needs {wanted}; give data.buckets the sizes that the cache was made with"
            )
        return latent.float()


def sdxl_latents(manifest: Manifest, folder: Path, shape: LatentShape) -> ExternalLatents:
    """The `latent_cache` folder; says once what such a cache has frozen."""
    check_sdxl_names(manifest)
    _log.warning(
        "%s: an SDXL cache holds one draw of each latent, not its mean and deviation, so every epoch sees the same "
        "noise of the autoencoder; and one random crop, taken when it was written, whose coordinates are only in the "
        "vector beside it. Make our own cache to have neither: data.cache.latents and frameloom data cache RECIPE",
        folder,
    )

    def find(row: int) -> Path:
        name = _sdxl_name(manifest.clip(row).path)
        return safe_join(folder / "latent_cache", f"{name}.npy", where=f"{manifest.source}: row {row}")

    return ExternalLatents(find, shape)


def column_latents(manifest: Manifest, shape: LatentShape) -> ExternalLatents:
    """The files of the column latents_path, taken as they are: unscaled, like ours."""
    manifest.column("latents_path")
    _log.warning(
        "%s: the files of latents_path are taken as unscaled latents without deviation, at the frames and the crop "
        "that they were made with",
        manifest.source,
    )
    return ExternalLatents(lambda row: column_file(manifest, "latents_path", row), shape)
