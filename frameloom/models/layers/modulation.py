"""Adaptive layer norm: scales, shifts and gates computed from the noise level.

In the "single" form all blocks share one set of six vectors, and each adds a learned table of its own to them.

Shape letters: B batch, N tokens, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.layers.mlp import TwoLinear
from frameloom.models.layers.positions import embed_index

TIME_WIDTH = 256


def modulate(x_BND: Tensor, shift_B1D: Tensor, scale_B1D: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm without parameters, then a scale and a shift."""
    return norm_samples(x_BND, 1 + scale_B1D, shift_B1D, eps)


def norm_samples(x_BND: Tensor, weight_B1D: Tensor, bias_B1D: Tensor, eps: float) -> Tensor:
    """LayerNorm with a weight and a bias of each sample's own.

    For one sample they are those of an ordinary norm, which is one pass forward and one backward instead of two and
    six, and does not keep what it multiplies.
    """
    width = x_BND.shape[-1:]
    if len(weight_B1D) == 1 and x_BND.dtype == weight_B1D.dtype == bias_B1D.dtype:
        return F.layer_norm(x_BND, width, weight_B1D.flatten(), bias_B1D.flatten(), eps)
    return torch.addcmul(bias_B1D, F.layer_norm(x_BND, width, eps=eps), weight_B1D)


class ModulationTable(nn.Module):
    """The base of modules that add a table of their own, `scale_shift_table`, to the shared modulation."""

    def __init__(self, num_vectors: int, width: int) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.empty(num_vectors, width))

    def initialize_parameters(self, generator: torch.Generator) -> None:
        table = self.scale_shift_table
        table.normal_(std=table.shape[1] ** -0.5, generator=generator)


class SharedModulation(nn.Module):
    """One embedding of the noise level, and from it one set of six vectors for all blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({"timestep_embedder": TwoLinear(TIME_WIDTH, width, nn.SiLU())})
        self.linear = nn.Linear(width, 6 * width)

    def forward(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 6, D] for the blocks and [B, D] for the last layer."""
        sinusoids = embed_index(index_B, TIME_WIDTH).to(self.linear.weight.dtype)
        time_BD: Tensor = self.emb["timestep_embedder"](sinusoids)
        return torch.unflatten(self.linear(F.silu(time_BD)), -1, (6, -1)), time_BD
