"""The blocks of the transformer. Module and parameter names are those of the published checkpoints.

Text and video tokens share all weights except the modulation, which each gets for itself. Blocks take and return
tensors only. Attention is full and unmasked.

Shape letters: B batch, N video tokens, K text tokens, M = K + N, D width, H heads, P rotary pairs, E time width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.denoisers.cogvideox_fun.config import CogVideoXFunConfig
from frameloom.models.layers.attention import Projections, RotaryAttention
from frameloom.models.layers.mlp import FeedForward
from frameloom.models.layers.modulation import norm_samples

QK_NORM_EPS = 1e-6


class SelfAttention(Projections):
    """Over all tokens, text first."""

    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__(config.width, config.num_attention_heads, bias=config.attention_bias)
        self.norm_q = nn.LayerNorm(config.attention_head_dim, eps=QK_NORM_EPS)
        self.norm_k = nn.LayerNorm(config.attention_head_dim, eps=QK_NORM_EPS)
        self.attend = RotaryAttention()

    def forward(self, x_BMD: Tensor, rope_M1P: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x_BMD, x_BMD)
        # Under autocast norms give float32; attention wants one precision for all three.
        q, k = self.norm_q(q).type_as(v), self.norm_k(k).type_as(v)
        attended: Tensor = self.to_out(self.attend(q, k, v, rope_M1P))
        return attended


def modulate_norm(norm: nn.LayerNorm, x_BND: Tensor, shift_B1D: Tensor, factor_B1D: Tensor) -> Tensor:
    """A norm, a factor and a shift; they go into the norm's own weight and bias, instead of all that it gives."""
    if not norm.elementwise_affine:
        return norm_samples(x_BND, factor_B1D, shift_B1D, norm.eps)
    weight_B1D, bias_B1D = factor_B1D * norm.weight, torch.addcmul(shift_B1D, factor_B1D, norm.bias)
    return norm_samples(x_BND, weight_B1D, bias_B1D, norm.eps)


class ModulatedNorm(nn.Module):
    """One LayerNorm for video and text; shift, scale and gate of each follow from the timestep."""

    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.time_embed_dim, 6 * config.width)
        self.norm = nn.LayerNorm(config.width, config.norm_eps, config.norm_elementwise_affine)

    def forward(self, video_BND: Tensor, text_BKD: Tensor, time_BE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Modulated video and text, then the gates that their updates are multiplied with."""
        parts_B1D = self.linear(F.silu(time_BE))[:, None].chunk(6, dim=-1)
        shift, scale, gate, text_shift, text_scale, text_gate = parts_B1D
        video = modulate_norm(self.norm, video_BND, shift, 1 + scale)
        text = modulate_norm(self.norm, text_BKD, text_shift, 1 + text_scale)
        return video, text, gate, text_gate


class Block(nn.Module):
    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__()
        self.norm1 = ModulatedNorm(config)
        self.attn1 = SelfAttention(config)
        self.norm2 = ModulatedNorm(config)
        self.ff = FeedForward(config.width, config.dropout, drops_result=True)

    def forward(
        self,
        video_BND: Tensor,
        text_BKD: Tensor,
        time_BE: Tensor,
        rope_M1P: Tensor | None = None,
        dropout_keys: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        sizes = [text_BKD.shape[1], video_BND.shape[1]]
        video, text, gate, text_gate = self.norm1(video_BND, text_BKD, time_BE)
        # The gradient of a split is one joining, that of two slices two whole tensors and their sum.
        text, video = torch.split(self.attn1(torch.cat([text, video], dim=1), rope_M1P), sizes, dim=1)
        video_BND = torch.addcmul(video_BND, gate, video)
        text_BKD = torch.addcmul(text_BKD, text_gate, text)

        video, text, gate, text_gate = self.norm2(video_BND, text_BKD, time_BE)
        text, video = torch.split(self.ff(torch.cat([text, video], dim=1), dropout_keys), sizes, dim=1)
        return torch.addcmul(video_BND, gate, video), torch.addcmul(text_BKD, text_gate, text)
