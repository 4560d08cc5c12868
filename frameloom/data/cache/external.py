"""Caches that other training systems wrote, read in place: one file per sample, found by the clip's name or a column.

Open-Sora-Plan: folders of text embeddings beside the media (three- and four-path lists). SDXL: `latent_cache`,
`vector_cache` and `crossattn_cache` folders of .npy. Open-Sora 2.0: the columns latents_path, text_t5_path and
text_clip_path. They have no fingerprint, so shapes are all that can be checked; every error names its file.
Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

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


class TextFiles(NamedTuple):
    """Where the embeddings of a row are, and the names of the arrays there; without `pooled` that vector is zero."""

    tokens: Path
    token_names: Sequence[str]
    pooled: Path | None
    pooled_names: Sequence[str]
    has_mask: bool = False


@dataclass(frozen=True)
class ExternalText:
    """Embeddings by manifest row; `find` gives their files. What lies behind the pooled width is not read."""

    shape: TextShape
    find: Callable[[int], TextFiles]
    cuts_pooled: bool = False

    def get_rows(self, rows: NDArray[np.int64] | Sequence[int]) -> dict[str, Tensor]:
        """The embeddings of these rows, stacked, under the names that batches use."""
        found = [(*self._read_tokens(files), self._read_pooled(files)) for files in map(self.find, map(int, rows))]
        names = ("tokens_BKD", "mask_BK", "pooled_BD")
        return {name: torch.stack(parts) for name, parts in zip(names, zip(*found, strict=True), strict=True)}

    def _read_tokens(self, files: TextFiles) -> tuple[Tensor, Tensor]:
        """Padded to the expected length, zero where the mask is; and the mask."""
        path, arrays, shape = files.tokens, read_arrays(files.tokens), self.shape
        tokens = _pick(path, arrays, files.token_names)
        tokens_KD = _drop_leading(tokens, 2).float()
        if tokens_KD.ndim != 2 or tokens_KD.shape[1] != shape.width or len(tokens_KD) > shape.max_length:
            raise DataError(
                f"{path}: embedding of shape {tuple(tokens.shape)}; this recipe expects at most {shape.max_length} "
                f"tokens of width {shape.width} (text.encoders): choose the encoder and max_length it was made with"
            )
        mask_K = _drop_leading(arrays["mask"], 1) if files.has_mask and "mask" in arrays else torch.ones(len(tokens_KD))
        if mask_K.shape != tokens_KD.shape[:1]:
            raise DataError(f"{path}: mask of shape {tuple(mask_K.shape)} for {len(tokens_KD)} tokens")
        padded_KD = torch.zeros(shape.max_length, shape.width)
        padded_K = torch.zeros(shape.max_length, dtype=torch.bool)
        padded_K[: len(mask_K)] = mask_K.bool()
        padded_KD[: len(tokens_KD)] = tokens_KD
        return padded_KD * padded_K[:, None], padded_K

    def _read_pooled(self, files: TextFiles) -> Tensor:
        if files.pooled is None:
            return torch.zeros(self.shape.pooled_width)
        vector = _pick(files.pooled, read_arrays(files.pooled), files.pooled_names)
        vector_D = _drop_leading(vector, 1).float()
        if self.cuts_pooled:
            vector_D = vector_D[: self.shape.pooled_width]
        if vector_D.shape != (self.shape.pooled_width,):
            raise DataError(
                f"{files.pooled}: pooled vector of shape {tuple(vector.shape)}; this recipe expects width "
                f"{self.shape.pooled_width}; choose the last of text.encoders it was made with"
            )
        return vector_D


def open_sora_plan_text(
    manifest: Manifest, folders: Sequence[Path], shape: TextShape, *, name: str | None = None
) -> ExternalText:
    """Open-Sora-Plan: `<path without ending>-<caption>.npz` (1.3) or `<path>-<key>-<value>….npz` (1.1).

    A second folder holds the pooled vectors of the second encoder; without one they are zero, which only a denoiser
    that does not look at them can use. `name` gives the file name in the manifest's columns: "{stem}-part-{part}".
    """
    if not 1 <= len(folders) <= 2:
        raise ConfigError(f"data.cache.external_folders names {len(folders)} folders; open_sora_plan has one or two")
    for column in _FIELD.findall(name or ""):
        if column != "stem":
            manifest.column(column)  # refuses a missing column
    if len(folders) == 1:
        _log.warning("%s: no folder of a second encoder, so pooled vectors are zero", folders[0])
    return ExternalText(shape, partial(_find_plan_text, manifest, folders, name))


def _find_plan_text(manifest: Manifest, folders: Sequence[Path], name: str | None, row: int) -> TextFiles:
    stem, columns = str(PurePosixPath(manifest.clip(row).path).with_suffix("")), manifest.columns
    values = {"stem": stem} | {
        column: str(manifest.column(column)[row]) for column in _FIELD.findall(name or "") if column != "stem"
    }
    if name is not None:
        stems = [_FIELD.sub(lambda found: values[found[1]], name)]
    else:
        number = manifest.column("caption_index")[row] if "caption_index" in columns else 0
        window = [f"{stem}-frame_idx-{manifest.column('frame_idx')[row]}"] if "frame_idx" in columns else []
        stems = [f"{stem}-{number}", *window, stem]
    found = [_find_file(folder, stems, f"{manifest.source}: row {row}") for folder in folders]
    pooled = found[1] if len(found) > 1 else None
    return TextFiles(found[0], ("text_emb", "tokens"), pooled, ("text_emb", "pooled"), has_mask=True)


def _sdxl_file(manifest: Manifest, folder: Path, row: int) -> Path:
    """The file of a row has its name, cut at its first dot."""
    name = PurePosixPath(manifest.clip(row).path).name.partition(".")[0]
    return safe_join(folder, f"{name}.npy", where=f"{manifest.source}: row {row}")


def check_sdxl_names(manifest: Manifest) -> None:
    """DataError when two rows share a name: the later one has overwritten the earlier in the cache."""
    seen: dict[str, str] = {}
    for path in manifest.column("path").to_list():
        name = PurePosixPath(path).name.partition(".")[0]
        first = seen.setdefault(name, path)
        if first != path:
            raise DataError(
                f"{manifest.source}: {first} and {path} have the same name '{name}' in an SDXL cache, so "
                "one has overwritten the other; rename one of them and cache again"
            )


def sdxl_text(manifest: Manifest, folder: Path, shape: TextShape) -> ExternalText:
    """`crossattn_cache` as token states and the first numbers of `vector_cache` as the pooled vector.

    Behind the pooled text come the embedded sizes and crop, which belong to the denoiser.
    """
    check_sdxl_names(manifest)
    find = [partial(_sdxl_file, manifest, folder / part) for part in ("crossattn_cache", "vector_cache")]
    return ExternalText(shape, partial(_find_pair, find, [("",), ("",)]), cuts_pooled=True)


def column_text(manifest: Manifest, shape: TextShape) -> ExternalText:
    """Open-Sora 2.0: text_t5_path and text_clip_path, relative to the manifest's root. All tokens count, as there."""
    find = [partial(column_file, manifest, name) for name in ("text_t5_path", "text_clip_path")]
    return ExternalText(shape, partial(_find_pair, find, [("text_t5", "y", ""), ("text_clip", "vec", "")]))


def _find_pair(find: Sequence[Callable[[int], Path]], names: Sequence[Sequence[str]], row: int) -> TextFiles:
    """The files of token states and of the pooled vector, each with the names of its array."""
    return TextFiles(find[0](row), names[0], find[1](row), names[1])


def column_file(manifest: Manifest, column: str, row: int) -> Path:
    """The file that a column names, below the manifest's root."""
    return safe_join(manifest.root, str(manifest.column(column)[row]), where=f"{manifest.source}: row {row}, {column}")


@dataclass(frozen=True)
class ExternalLatents:
    """Latents of one file per row; `find` gives its path. The deviation is zero: noise is in the latent."""

    find: Callable[[int], Path]
    shape: LatentShape

    @property
    def may_refuse(self) -> bool:
        return True

    def check(self, row: int, bucket: Bucket) -> None:
        """ClipError for a row without a file: it is replaced and counted like a clip that cannot be read."""
        path = self.find(row)
        if not path.is_file():
            raise ClipError(f"{path}: no such latent in the cache")

    def get(self, rows: NDArray[np.int64], bucket: Bucket) -> tuple[Tensor, Tensor]:
        mean = torch.stack([self._read(self.find(int(row)), bucket) for row in rows])
        return mean, torch.zeros_like(mean)

    def _read(self, path: Path, bucket: Bucket) -> Tensor:
        found, wanted = _pick(path, read_arrays(path), ["latents", "latent", "mean", ""]), self.shape(bucket)
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
    return ExternalLatents(partial(_sdxl_file, manifest, folder / "latent_cache"), shape)


def column_latents(manifest: Manifest, shape: LatentShape) -> ExternalLatents:
    """The files of the column latents_path, taken as they are: unscaled, like ours."""
    manifest.column("latents_path")
    _log.warning(
        "%s: the files of latents_path are taken as unscaled latents without deviation, at the frames and the crop "
        "that they were made with",
        manifest.source,
    )
    return ExternalLatents(partial(column_file, manifest, "latents_path"), shape)
