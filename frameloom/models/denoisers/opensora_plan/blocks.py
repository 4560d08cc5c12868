"""The blocks of OpenSoraT2V. Module and parameter names are those of the published checkpoints.

Blocks take and return tensors only. LayerNorms have no parameters.

Shape letters: B batch, N video tokens, K text tokens, D width, H heads, P rotary pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.denoisers.opensora_plan.config import OpenSoraPlanConfig
from frameloom.models.denoisers.opensora_plan.skiparse import SkiparseAttention
from frameloom.models.layers.attention import attend


def modulate(x_BND: Tensor, shift_B1D: Tensor, scale_B1D: Tensor, eps: float) -> Tensor:
    """LayerNorm, then a scale and a shift that follow from the timestep."""
    return torch.addcmul(shift_B1D, F.layer_norm(x_BND, x_BND.shape[-1:], eps=eps), 1 + scale_B1D)


class ModulationTable(nn.Module):
    """A learned offset to the modulation that all blocks share; the base of modules that own a `scale_shift_table`."""

    def __init__(self, num_vectors: int, width: int) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.empty(num_vectors, width))

    def initialize_parameters(self, generator: torch.Generator) -> None:
        table = self.scale_shift_table
        table.normal_(generator=generator).div_(table.shape[1] ** 0.5)


class Projections(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def project(self, x_BND: Tensor, context_BKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads [B, tokens, H, head width] of queries from `x` and of keys and values from `context`."""
        q, k, v = self.to_q(x_BND), self.to_k(context_BKD), self.to_v(context_BKD)
        q, k, v = (torch.unflatten(part, -1, (self.num_heads, -1)) for part in (q, k, v))
        return q, k, v


class SelfAttention(Projections):
    """`attend` works on heads: [B, N, H, head width] three times, the rotary table and a mask, to [B, N, D]."""

    def __init__(self, config: OpenSoraPlanConfig, layer: int) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.attend = SkiparseAttention(config.pattern(layer), config.sparse_n)

    def forward(self, x_BND: Tensor, rope_N1P: Tensor, mask: Tensor | None) -> Tensor:
        attended: Tensor = self.to_out[0](self.attend(*self.project(x_BND, x_BND), rope_N1P, mask))
        return attended


class CrossAttention(Projections):
    """Always over all tokens: dealing the queries into sub-sequences would not change what they see of the text."""

    def forward(self, x_BND: Tensor, text_BKD: Tensor, mask_B11K: Tensor | None) -> Tensor:
        q, k, v = (heads.transpose(1, 2) for heads in self.project(x_BND, text_BKD))
        attended: Tensor = self.to_out[0](attend(q, k, v, mask_B11K).transpose(1, 2).flatten(2))
        return attended


class TanhGELULinear(nn.Module):
    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # The published layout has a dropout in the middle.
        self.net = nn.Sequential(TanhGELULinear(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width))

    def forward(self, x_BND: Tensor) -> Tensor:
        hidden: Tensor = self.net(x_BND)
        return hidden


class Block(ModulationTable):
    """Self-attention, cross-attention to the text, MLP. The cross-attention has neither norm nor gate."""

    def __init__(self, config: OpenSoraPlanConfig, layer: int) -> None:
        super().__init__(6, config.hidden_size)
        self.eps = config.norm_eps
        self.attn1 = SelfAttention(config, layer)
        self.attn2 = CrossAttention(config.hidden_size, config.num_attention_heads)
        self.ff = FeedForward(config.hidden_size)

    def forward(
        self,
        x_BND: Tensor,
        text_BKD: Tensor,
        modulation_B6D: Tensor,
        rope_N1P: Tensor,
        mask: Tensor | None = None,
        text_mask_B11K: Tensor | None = None,
    ) -> Tensor:
        vectors = (self.scale_shift_table + modulation_B6D).chunk(6, dim=1)
        shift1, scale1, gate1, shift2, scale2, gate2 = vectors
        x_BND = torch.addcmul(x_BND, gate1, self.attn1(modulate(x_BND, shift1, scale1, self.eps), rope_N1P, mask))
        x_BND = x_BND + self.attn2(x_BND, text_BKD, text_mask_B11K)
        return torch.addcmul(x_BND, gate2, self.ff(modulate(x_BND, shift2, scale2, self.eps)))
