"""The Fréchet distance against closed forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from frameloom.core.errors import DataError
from frameloom.core.random import numpy_stream, stream
from frameloom.evaluate.frechet import (
    FeatureStatistics,
    distance_of_gaussians,
    frechet_distance,
    pool_pixels,
    read_features,
)


def draw(index: int, count: int = 40, width: int = 6) -> np.ndarray:
    return numpy_stream(0, "test frechet", index).normal(size=(count, width))


def gather(*batches: np.ndarray) -> FeatureStatistics:
    found = FeatureStatistics()
    for batch in batches:
        found.add(batch)
    return found


def with_law(features: np.ndarray, mean: np.ndarray, root: np.ndarray) -> FeatureStatistics:
    """Features moved so that their sample mean and covariance are exactly `mean` and root @ root.T."""
    centred = features - features.mean(0)
    values, vectors = np.linalg.eigh(np.cov(centred.T))
    white = centred @ (vectors / np.sqrt(values)) @ vectors.T
    return gather(white @ root.T + mean)


def test_equal_sets_have_no_distance_and_others_do() -> None:
    one, two = draw(0), draw(1)
    assert frechet_distance(gather(one), gather(one.copy())) == pytest.approx(0, abs=1e-10)
    assert frechet_distance(gather(one), gather(one[::-1])) == pytest.approx(0, abs=1e-10)
    assert frechet_distance(gather(one), gather(two)) > 0.1


def test_diagonal_gaussians_have_their_closed_form() -> None:
    # |a - b|^2 + sum (sqrt(s) - sqrt(r))^2 for variances s and r.
    s, r = np.array([1.0, 4.0, 9.0, 0.25, 2.0, 1.0]), np.array([4.0, 4.0, 1.0, 1.0, 3.0, 0.0])
    a, b = np.zeros(6), np.array([1.0, 0, 0, 2.0, 0, 0])
    expected = 5.0 + float(((np.sqrt(s) - np.sqrt(r)) ** 2).sum())
    assert distance_of_gaussians(a, np.diag(s), b, np.diag(r)) == pytest.approx(expected, rel=1e-10)
    ours, reference = with_law(draw(0), a, np.diag(np.sqrt(s))), with_law(draw(1), b, np.diag(np.sqrt(r)))
    assert frechet_distance(ours, reference) == pytest.approx(expected, rel=1e-8)


def test_covariances_that_do_not_commute() -> None:
    # For 2x2 matrices tr sqrt(AB) = sqrt(tr AB + 2 sqrt(det A det B)).
    a, b = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([[4.0, -1.0], [-1.0, 1.0]])
    assert not np.allclose(a @ b, b @ a)
    root = np.sqrt(np.trace(a @ b) + 2 * np.sqrt(np.linalg.det(a) * np.linalg.det(b)))
    expected = np.trace(a) + np.trace(b) - 2 * root
    assert distance_of_gaussians(np.zeros(2), a, np.zeros(2), b) == pytest.approx(float(expected), rel=1e-12)


def test_batches_and_rank_do_not_matter() -> None:
    features = draw(2, count=5, width=40) + 1e4
    whole, parts = gather(features), gather(features[:1], features[1:3], features[3:])
    assert parts.count == 5
    np.testing.assert_allclose(parts.covariance_DD, np.cov(features.T), atol=1e-7)
    assert frechet_distance(whole, parts) == pytest.approx(0, abs=1e-6)


def test_features_are_read_from_arrays_tensors_and_folders(tmp_path: Path) -> None:
    features = draw(3).astype(np.float32)
    np.save(tmp_path / "all.npy", features)
    folder = tmp_path / "each"
    folder.mkdir()
    for number, row in enumerate(features[:20]):
        np.save(folder / f"{number:02d}.npy", row)
    save_file({"features": torch.from_numpy(features[20:])}, folder / "rest.safetensors")
    one, two = read_features(tmp_path / "all.npy"), read_features(folder)
    assert one.count == two.count == 40
    assert frechet_distance(one, two) == pytest.approx(0, abs=1e-9)


def test_files_that_hold_no_features_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "object.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "text.npy", np.array(["a"]))
    np.save(tmp_path / "nan.npy", np.array([[np.nan, 1.0]]))
    np.save(tmp_path / "cube.npy", np.zeros((2, 2, 2)))
    for name, words in (("object", "not a readable"), ("text", "not numbers"), ("nan", "finite"), ("cube", "shape")):
        with pytest.raises(DataError, match=words):
            read_features(tmp_path / f"{name}.npy")
    with pytest.raises(DataError, match=r"no \.npy"):
        read_features(tmp_path / "nothing")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match="at least 2"):
        frechet_distance(read_features(tmp_path / "one.npy"), read_features(tmp_path / "one.npy"))
    with pytest.raises(DataError, match="same network"):
        frechet_distance(gather(draw(0)), gather(draw(0, width=5)))


def test_pooled_pixels_see_colour_and_not_noise() -> None:
    video = torch.rand(2, 3, 8, 32, 32, generator=stream(0, "test pool")) * 0.2
    features = pool_pixels(video)
    assert features.shape == (2, 96)
    np.testing.assert_allclose(pool_pixels(video + 0.5) - features, 0.5, atol=1e-6)
