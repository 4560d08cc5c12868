"""Means with confidence intervals: Student's t, which stays honest for a handful of clips, or the bootstrap.

The bootstrap (Efron 1979, percentiles) assumes no law and never leaves the range of the numbers; of fewer than about
ten clips it comes out too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np

from frameloom.core.random import numpy_stream

CONFIDENCE = 0.95
Intervals = Literal["student", "bootstrap"]
_RESAMPLES = 4000
_MAX_DRAWS = 4_000_000  # indices that are held at once
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)
_EXPAND_FROM = 200  # degrees of freedom from which the expansion around the normal law is exact to 1e-7


@dataclass(frozen=True)
class Summary:
    """`low` and `high` bound the mean with the given confidence; None for a single number or an infinite mean."""

    count: int
    mean: float
    std: float | None
    low: float | None
    high: float | None
    smallest: float
    largest: float


def summarise(values: Sequence[float], *, confidence: float = CONFIDENCE, intervals: Intervals = "student") -> Summary:
    """Of at least one number; an infinite one (the PSNR of equal clips) makes the mean infinite."""
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers) or np.isnan(numbers).any():
        raise ValueError("a mean needs at least one number, and no NaN")
    ends = float(numbers.min()), float(numbers.max())
    mean = float(numbers.mean())
    if len(numbers) < 2 or not math.isfinite(mean):
        return Summary(len(numbers), mean, None, None, None, *ends)
    std = float(numbers.std(ddof=1))
    if intervals == "bootstrap":
        return Summary(len(numbers), mean, std, *bootstrap_mean(values, confidence=confidence), *ends)
    reach = t_quantile((1 + confidence) / 2, len(numbers) - 1) * std / math.sqrt(len(numbers))
    return Summary(len(numbers), mean, std, mean - reach, mean + reach, *ends)


def bootstrap_mean(values: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0) -> tuple[float, float]:
    """Where the mean of so many numbers, drawn from `values` with replacement, falls with this confidence.

    Of differences between two sets on the same prompts this is the paired bootstrap. The ends are a function of the
    values.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers) or not np.isfinite(numbers).all():
        raise ValueError("a bootstrap needs at least one number, and finite ones")
    generator = numpy_stream(seed, "bootstrap")
    rows = max(1, _MAX_DRAWS // len(numbers))
    means = [
        numbers[generator.integers(0, len(numbers), (min(rows, _RESAMPLES - start), len(numbers)))].mean(1)
        for start in range(0, _RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@lru_cache(maxsize=256)
def t_quantile(share: float, freedom: int) -> float:
    """Where Student's law with `freedom` degrees of freedom reaches `share`, which lies in (0.5, 1)."""
    if not 0.5 < share < 1 or freedom < 1:
        raise ValueError(f"a share in (0.5, 1) and 1 or more degrees of freedom, got {share} and {freedom}")
    if freedom > _EXPAND_FROM:
        return _expand_around_normal(NormalDist().inv_cdf(share), freedom)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_up_to(middle, freedom) < share - 0.5 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _share_up_to(angle: float, freedom: int) -> float:
    """Probability between 0 and sqrt(freedom) tan(angle): with that substitution the density is a power of cos."""
    integral = float((_WEIGHTS * np.cos(angle * (_NODES + 1) / 2) ** (freedom - 1)).sum()) * angle / 2
    return math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi) * integral


def _expand_around_normal(z: float, freedom: int) -> float:
    """Cornish and Fisher's series (Abramowitz and Stegun 26.7.5)."""
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
