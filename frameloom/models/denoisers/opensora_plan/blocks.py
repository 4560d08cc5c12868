"""The blocks of OpenSoraT2V. Module and parameter names are those of the published checkpoints.

Blocks take and return tensors only. LayerNorms have no parameters.

Shape letters: B batch, N video tokens, K text tokens, D width, H heads, P rotary pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frameloom.models.denoisers.opensora_plan.config import OpenSoraPlanConfig
from frameloom.models.denoisers.opensora_plan.skiparse import SkiparseAttention
from frameloom.models.layers.attention import Projections, attend_tokens
from frameloom.models.layers.dropout import KeyedDropout
from frameloom.models.layers.mlp import FeedForward
from frameloom.models.layers.modulation import ModulationTable, modulate


class SelfAttention(Projections):
    """`attend` works on heads: [B, N, H, head width] three times, the rotary table and a mask, to [B, N, D]."""

    def __init__(self, config: OpenSoraPlanConfig, layer: int) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads, bias=config.attention_bias)
        self.attend = SkiparseAttention(config.pattern(layer), config.sparse_n)

    def forward(self, x_BND: Tensor, rope_N1P: Tensor, mask: Tensor | None) -> Tensor:
        attended: Tensor = self.to_out(self.attend(*self.project(x_BND, x_BND), rope_N1P, mask))
        return attended


class CrossAttention(Projections):
    """Always over all tokens: dealing the queries into sub-sequences would not change what they see of the text."""

    def forward(self, x_BND: Tensor, text_BKD: Tensor, mask_B11K: Tensor | None) -> Tensor:
        attended: Tensor = self.to_out(attend_tokens(*self.project(x_BND, text_BKD), mask_B11K))
        return attended


class Block(ModulationTable):
    """Self-attention, cross-attention to the text, MLP. The cross-attention has neither norm nor gate."""

    def __init__(self, config: OpenSoraPlanConfig, layer: int) -> None:
        super().__init__(6, config.hidden_size)
        self.eps = config.norm_eps
        self.attn1 = SelfAttention(config, layer)
        self.attn2 = CrossAttention(config.hidden_size, config.num_attention_heads, bias=config.attention_bias)
        self.ff = FeedForward(config.hidden_size, config.dropout)
        self.drop_mixed, self.drop_told = (KeyedDropout(config.dropout, site) for site in (2, 3))

    def forward(
        self,
        x_BND: Tensor,
        text_BKD: Tensor,
        modulation_B6D: Tensor,
        rope_N1P: Tensor,
        mask: Tensor | None = None,
        text_mask_B11K: Tensor | None = None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        vectors = (self.scale_shift_table + modulation_B6D).chunk(6, dim=1)
        shift1, scale1, gate1, shift2, scale2, gate2 = vectors
        mixed_BND = self.attn1(modulate(x_BND, shift1, scale1, self.eps), rope_N1P, mask)
        x_BND = torch.addcmul(x_BND, gate1, self.drop_mixed(mixed_BND, dropout_keys))
        x_BND = x_BND + self.drop_told(self.attn2(x_BND, text_BKD, text_mask_B11K), dropout_keys)
        return torch.addcmul(x_BND, gate2, self.ff(modulate(x_BND, shift2, scale2, self.eps), dropout_keys))
