"""Fréchet distance between two sets of features, as in FVD and FID (Heusel et al. 2017).

The features come from files of the user, one vector for each clip, or from a network. `pool_pixels` needs neither and
learns nothing; its distance is no FVD.
Shape letters: B batch, C channels, F frames, H height, W width, N clips, D width of a feature.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.errors import DataError
from frameloom.weights.safetensors_file import open_safetensors

SUFFIXES = (".npy", ".safetensors")
_POOLED = (2, 4, 4)


class FeatureStatistics:
    """Mean and covariance of vectors that come in batches; none of them is kept."""

    def __init__(self) -> None:
        self.count = 0
        self.mean_D: NDArray[np.float64] = np.zeros(0)
        self._squares_DD: NDArray[np.float64] = np.zeros((0, 0))

    @property
    def width(self) -> int:
        return len(self.mean_D)

    def add(self, features_ND: NDArray[np.floating]) -> None:
        """ValueError for vectors of another width, or numbers that are not finite."""
        batch = np.asarray(features_ND, dtype=np.float64)
        if batch.ndim != 2 or not len(batch) or (self.count and batch.shape[1] != self.width):
            raise ValueError(f"features of shape {batch.shape}; expected (clips, {self.width or 'width'})")
        if not np.isfinite(batch).all():
            raise ValueError("features with numbers that are not finite")
        if not self.count:
            self.mean_D, self._squares_DD = np.zeros(batch.shape[1]), np.zeros((batch.shape[1],) * 2)
        center_D = batch.mean(0)
        total, gap_D = self.count + len(batch), center_D - self.mean_D
        self._squares_DD += (batch - center_D).T @ (batch - center_D)
        self._squares_DD += np.outer(gap_D, gap_D) * (self.count * len(batch) / total)
        self.mean_D = self.mean_D + gap_D * (len(batch) / total)
        self.count = total

    @property
    def covariance_DD(self) -> NDArray[np.float64]:
        """Unbiased, so of at least two vectors."""
        if self.count < 2:
            raise DataError(f"a Fréchet distance needs at least 2 clips on either side, got {self.count}")
        return self._squares_DD / (self.count - 1)


def frechet_distance(ours: FeatureStatistics, reference: FeatureStatistics) -> float:
    """Between the Gaussians of two sets; 0 for equal means and covariances."""
    if ours.width != reference.width:
        raise DataError(
            f"features of {ours.width} and of {reference.width} numbers; take both sides from the same network"
        )
    return distance_of_gaussians(ours.mean_D, ours.covariance_DD, reference.mean_D, reference.covariance_DD)


def distance_of_gaussians(
    mean_a: NDArray[np.float64],
    covariance_a: NDArray[np.float64],
    mean_b: NDArray[np.float64],
    covariance_b: NDArray[np.float64],
) -> float:
    """|a - b|^2 + tr(A + B - 2 (A B)^(1/2)).

    The trace of the root is the sum of the roots of the eigenvalues of the symmetric A^(1/2) B A^(1/2), which are real
    also when there are fewer clips than numbers in a feature.
    """
    values, vectors = np.linalg.eigh(covariance_a)
    root_a = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    between = np.linalg.eigvalsh(root_a @ covariance_b @ root_a)
    trace = np.trace(covariance_a) + np.trace(covariance_b) - 2 * np.sqrt(between.clip(min=0)).sum()
    return float(max(0.0, np.square(mean_a - mean_b).sum() + trace))


def pool_pixels(pixels_BCFHW: Tensor) -> NDArray[np.float64]:
    """A coarse thumbnail of each clip as a vector of 96 numbers: two moments in time, 4 x 4 cells, three colours."""
    pooled = F.adaptive_avg_pool3d(pixels_BCFHW.float(), _POOLED)
    features: NDArray[np.float64] = pooled.flatten(1).double().cpu().numpy()
    return features


def read_features(path: Path) -> FeatureStatistics:
    """A file, or all of a folder: .npy arrays, or safetensors with the features as tensors, [D] or [N, D] each."""
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or not path.exists():
        raise DataError(f"{path}: no {' or '.join(SUFFIXES)} file there; a feature file holds one vector per clip")
    found = FeatureStatistics()
    for file in files:
        for array in _read_arrays(file):
            try:
                found.add(array[None] if array.ndim == 1 else array)
            except ValueError as error:
                raise DataError(f"{file}: {error}; write the features of this set again") from error
    return found


def _read_arrays(file: Path) -> Iterator[NDArray[np.floating]]:
    if file.suffix == ".safetensors":
        tensors = open_safetensors(file)
        for name in tensors:
            yield tensors[name].double().numpy()
        return
    if file.suffix != ".npy":
        raise DataError(f"{file}: features are read from {' or '.join(SUFFIXES)} files")
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file}: not a readable .npy file of numbers ({error}); write it again") from error
    if array.dtype.kind not in "fiu":
        raise DataError(f"{file}: holds {array.dtype}, not numbers; write it again")
    yield array
