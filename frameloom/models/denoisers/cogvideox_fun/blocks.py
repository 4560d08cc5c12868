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
from frameloom.models.layers.attention import attend

QK_NORM_EPS = 1e-6


def rotate(heads_BHMD: Tensor, rope_MP: Tensor) -> Tensor:
    """Turn every pair of channels (2j, 2j + 1), in float32."""
    pairs = torch.view_as_complex(torch.unflatten(heads_BHMD.float(), -1, (-1, 2)))
    return torch.view_as_real(pairs * rope_MP).flatten(-2).type_as(heads_BHMD)


class JointAttention(nn.Module):
    """Attention over all tokens, text first. It has no parameters; sequence parallelism replaces it from outside."""

    def forward(self, q_BHMD: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, rope_MP: Tensor | None = None) -> Tensor:
        if rope_MP is not None:
            q_BHMD, k_BHMD = rotate(q_BHMD, rope_MP), rotate(k_BHMD, rope_MP)
        return attend(q_BHMD, k_BHMD, v_BHMD).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__()
        width, bias = config.width, config.attention_bias
        self.num_heads = config.num_attention_heads
        self.norm_q = nn.LayerNorm(config.attention_head_dim, eps=QK_NORM_EPS)
        self.norm_k = nn.LayerNorm(config.attention_head_dim, eps=QK_NORM_EPS)
        self.to_q = nn.Linear(width, width, bias=bias)
        self.to_k = nn.Linear(width, width, bias=bias)
        self.to_v = nn.Linear(width, width, bias=bias)
        self.to_out = nn.Sequential(nn.Linear(width, width))
        self.attend = JointAttention()

    def forward(self, x_BMD: Tensor, rope_MP: Tensor | None = None) -> Tensor:
        parts = (layer(x_BMD).unflatten(-1, (self.num_heads, -1)) for layer in (self.to_q, self.to_k, self.to_v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        # Under autocast norms give float32; attention wants one precision for all three.
        q, k = self.norm_q(q).type_as(v), self.norm_k(k).type_as(v)
        attended: Tensor = self.to_out(self.attend(q, k, v, rope_MP))
        return attended


class ModulatedNorm(nn.Module):
    """One LayerNorm for video and text; shift, scale and gate of each follow from the timestep."""

    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.time_embed_dim, 6 * config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)

    def forward(self, video_BND: Tensor, text_BKD: Tensor, time_BE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Modulated video and text, then the gates that their updates are multiplied with."""
        parts_B1D = self.linear(F.silu(time_BE))[:, None].chunk(6, dim=-1)
        shift, scale, gate, text_shift, text_scale, text_gate = parts_B1D
        video = self.norm(video_BND) * (1 + scale) + shift
        text = self.norm(text_BKD) * (1 + text_scale) + text_shift
        return video, text, gate, text_gate


class Gelu(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # The published list has a dropout in the middle, which never drops; it still counts in the names.
        self.net = nn.Sequential(Gelu(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width))

    def forward(self, x_BMD: Tensor) -> Tensor:
        out: Tensor = self.net(x_BMD)
        return out


class Block(nn.Module):
    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__()
        self.norm1 = ModulatedNorm(config)
        self.attn1 = SelfAttention(config)
        self.norm2 = ModulatedNorm(config)
        self.ff = FeedForward(config.width)

    def forward(
        self, video_BND: Tensor, text_BKD: Tensor, time_BE: Tensor, rope_MP: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        num_text = text_BKD.shape[1]
        video, text, gate, text_gate = self.norm1(video_BND, text_BKD, time_BE)
        attended_BMD = self.attn1(torch.cat([text, video], dim=1), rope_MP)
        video_BND = video_BND + gate * attended_BMD[:, num_text:]
        text_BKD = text_BKD + text_gate * attended_BMD[:, :num_text]

        video, text, gate, text_gate = self.norm2(video_BND, text_BKD, time_BE)
        out_BMD = self.ff(torch.cat([text, video], dim=1))
        return video_BND + gate * out_BMD[:, num_text:], text_BKD + text_gate * out_BMD[:, :num_text]
