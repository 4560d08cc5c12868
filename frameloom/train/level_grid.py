"""Held-out losses on a grid of noise levels, as numbers for the log.

Shape letters: N clips, L noise levels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_Z95 = 1.959964


def summarize_levels(loss_NL: Tensor, share_NL: Tensor) -> dict[str, float]:
    """The loss under the training law, and that of each band of the noise level, each with its 95% interval.

    `share` is the part of the law's draws in each band. "_ci95" is half the width of the interval, from the spread
    between clips; noise and levels are the same at every call, so two models differ by themselves alone.
    """
    loss_NL, share_NL = loss_NL.double(), share_NL.double()
    num_levels = loss_NL.shape[1]
    # A band that the law never reaches may have a loss that is not finite.
    reached_NL = torch.where(share_NL > 0, loss_NL * share_NL, 0.0)
    values = {"validation_loss": reached_NL.sum(dim=1)}
    for band in range(num_levels):
        values[f"loss_{band / num_levels:.2f}-{(band + 1) / num_levels:.2f}"] = loss_NL[:, band]
    numbers = {}
    for name, loss_N in values.items():
        numbers[name] = float(loss_N.mean())
        if len(loss_N) > 1:
            numbers[f"{name}_ci95"] = half_width(loss_N)
    return numbers


def half_width(value_N: Tensor) -> float:
    """Half of the 95% interval of a mean, for two values or more."""
    return student95(len(value_N) - 1) * float(value_N.double().std()) / math.sqrt(len(value_N))


def student95(freedom: int) -> float:
    """The 97.5% quantile of Student's law; exact for 1 and 2, else within 1% (Hill 1970's expansion)."""
    if freedom <= 2:
        return (12.7062, 4.3027)[freedom - 1]
    z = _Z95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
