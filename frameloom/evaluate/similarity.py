"""Likeness of frames to each other and to a text, from features; cosines, so 1 is the same direction.

Shape letters: F frames, D width of a feature.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def measure_consistency(features_FD: Tensor) -> float | None:
    """Subject consistency as VBench defines it (Huang et al. 2023): the mean over frames, from the second on, of the
    likeness to the first frame and to the frame before; negative cosines count as 0. None for a picture.
    """
    if len(features_FD) < 2:
        return None
    unit_FD = F.normalize(features_FD.double(), dim=1)
    to_first = (unit_FD[1:] * unit_FD[:1]).sum(1).clamp(min=0)
    to_previous = (unit_FD[1:] * unit_FD[:-1]).sum(1).clamp(min=0)
    return float(((to_first + to_previous) / 2).mean())


def measure_text_similarity(features_FD: Tensor, text_D: Tensor) -> float:
    """The mean over frames of the cosine between frame and text."""
    return float(F.cosine_similarity(features_FD.double(), text_D.double()[None], dim=1).mean())
