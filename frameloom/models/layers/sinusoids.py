"""Sinusoids of noise levels and of positions.

Shape letters: B batch, N tokens, D width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_THETA = 10_000.0


def embed_index(index_B: Tensor, width: int, *, shift: int = 0) -> Tensor:
    """[B, width] of a noise level's index: cosines, then sines, in float32, as half precision would merge neighbours.

    An odd width ends in a zero. `shift` is taken from the number of frequencies that their exponents are divided by.
    """
    half = width // 2
    exponent = torch.arange(half, dtype=torch.float32, device=index_B.device)
    angles = index_B.float()[:, None] * torch.exp(-math.log(_THETA) * exponent / (half - shift))
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=-1), (0, width % 2))


def embed_position(position_N: Tensor, width: int) -> Tensor:
    """[N, width] in float32: sines, then cosines; computed in float64."""
    exponent = torch.arange(width // 2, dtype=torch.float64, device=position_N.device) / (width / 2)
    angles = position_N.double()[:, None] * _THETA**-exponent
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()
