"""Blocks of the MMDiT; module and parameter names are those of the published checkpoints.

Shape letters: B batch, N video tokens, K text tokens, M = K + N, D width, H heads, P rotary pairs.

Blocks take and return tensors only. LayerNorms have no parameters; all attention is full and unmasked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.denoisers.opensora2.config import MMDiTConfig
from frameloom.models.layers.attention.attention import RotaryAttention
from frameloom.models.layers.linear import Linear
from frameloom.models.layers.mlp import gelu
from frameloom.models.layers.modulation import modulate

QKV = tuple[Tensor, Tensor, Tensor]
EPS = 1e-6


class DoubleBlock(nn.Module):
    """Video and text keep their own weights and meet in the attention."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.img_mod = Modulation(width, 6)
        self.img_attn = StreamAttention(config)
        self.img_mlp = StreamMLP(config)
        self.txt_mod = Modulation(width, 6)
        self.txt_attn = StreamAttention(config)
        self.txt_mlp = StreamMLP(config)
        self.attend = RotaryAttention(parts=int(config.use_liger_rope))

    def forward(self, img_BND: Tensor, txt_BKD: Tensor, vec_BD: Tensor, rope_M1P: Tensor) -> tuple[Tensor, Tensor]:
        img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = self.img_mod(vec_BD)
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = self.txt_mod(vec_BD)
        img_qkv = self.img_attn.project(modulate(img_BND, img_shift1, img_scale1))
        txt_qkv = self.txt_attn.project(modulate(txt_BKD, txt_shift1, txt_scale1))
        q, k, v = (torch.cat(pair, dim=1) for pair in zip(txt_qkv, img_qkv, strict=True))
        # The gradient of a split is one joining, that of two slices two whole tensors and their sum.
        sizes = [txt_BKD.shape[1], img_BND.shape[1]]
        txt_attended, img_attended = torch.split(self.attend(q, k, v, rope_M1P), sizes, dim=1)

        img_BND = torch.addcmul(img_BND, img_gate1, self.img_attn.proj(img_attended))
        img_BND = torch.addcmul(img_BND, img_gate2, self.img_mlp(modulate(img_BND, img_shift2, img_scale2)))
        txt_BKD = torch.addcmul(txt_BKD, txt_gate1, self.txt_attn.proj(txt_attended))
        txt_BKD = torch.addcmul(txt_BKD, txt_gate2, self.txt_mlp(modulate(txt_BKD, txt_shift2, txt_scale2)))
        return img_BND, txt_BKD


class SingleBlock(nn.Module):
    """One stream of all tokens; attention and MLP run side by side and share their last projection."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        width, mlp_width = config.hidden_size, config.mlp_hidden_dim
        self.num_heads = config.num_heads
        self.fused = config.fused_qkv
        self.widths = (*[width] * (3 if self.fused else 1), mlp_width)
        if self.fused:
            self.linear1 = Linear(width, 3 * width + mlp_width)
        else:
            self.q_proj = Linear(width, width)
            self.k_proj = Linear(width, width)
            self.v_mlp = Linear(width, width + mlp_width)
        self.linear2 = Linear(width + mlp_width, width)
        self.norm = nn.ModuleDict({name: HeadNorm(config.head_dim) for name in ("query_norm", "key_norm")})
        self.modulation = Modulation(width, 3)
        self.attend = RotaryAttention(parts=int(config.use_liger_rope))

    def forward(self, x_BMD: Tensor, vec_BD: Tensor, rope_M1P: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(vec_BD)
        normal_BMD = modulate(x_BMD, shift, scale)
        if self.fused:
            q, k, v, mlp = self.linear1(normal_BMD).split(self.widths, dim=-1)
        else:
            q, k = self.q_proj(normal_BMD), self.k_proj(normal_BMD)
            v, mlp = self.v_mlp(normal_BMD).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in (q, k, v))
        q, k = self.norm["query_norm"](q), self.norm["key_norm"](k)
        attended_BMD = self.attend(q, k, v, rope_M1P)
        mixed_BMD: Tensor = self.linear2(torch.cat((attended_BMD, gelu(mlp)), dim=-1))
        return torch.addcmul(x_BMD, gate, mixed_BMD)


class StreamAttention(nn.Module):
    """The projections of one stream of a double block; the attention itself joins both streams."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_heads
        self.fused = config.fused_qkv
        if self.fused:
            self.qkv = Linear(width, 3 * width, bias=config.qkv_bias)
        else:
            self.q_proj = Linear(width, width, bias=config.qkv_bias)
            self.k_proj = Linear(width, width, bias=config.qkv_bias)
            self.v_proj = Linear(width, width, bias=config.qkv_bias)
        self.norm = nn.ModuleDict({name: HeadNorm(config.head_dim) for name in ("query_norm", "key_norm")})
        self.proj = Linear(width, width)

    def project(self, x_BND: Tensor) -> QKV:
        if self.fused:
            q, k, v = self.qkv(x_BND).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        else:
            parts = (self.q_proj, self.k_proj, self.v_proj)
            q, k, v = (part(x_BND).unflatten(-1, (self.num_heads, -1)) for part in parts)
        return self.norm["query_norm"](q), self.norm["key_norm"](k), v


class StreamMLP(nn.ModuleList):
    """The published list has GELU in the middle, which has no weights and counts in the names."""

    def __init__(self, config: MMDiTConfig) -> None:
        width, hidden = config.hidden_size, config.mlp_hidden_dim
        super().__init__([Linear(width, hidden), nn.Identity(), Linear(hidden, width)])

    def forward(self, x_BND: Tensor) -> Tensor:
        up, _, down = self
        result: Tensor = down(gelu(up(x_BND)))
        return result


class Modulation(nn.Module):
    def __init__(self, width: int, num_parts: int) -> None:
        super().__init__()
        self.num_parts = num_parts
        self.lin = nn.Linear(width, num_parts * width)

    def forward(self, vec_BD: Tensor) -> tuple[Tensor, ...]:
        """Three or six vectors [B, 1, D]: shift, scale, gate, in this order, once or twice."""
        vectors: Tensor = self.lin(F.silu(vec_BD))[:, None]
        return vectors.chunk(self.num_parts, dim=-1)


class HeadNorm(nn.Module):
    """RMS norm of every head; statistics in float32, rounded to the input's precision before the scale."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(head_dim))

    def initialize_parameters(self, generator: torch.Generator) -> None:
        self.scale.fill_(1.0)

    def forward(self, heads_BNHD: Tensor) -> Tensor:
        num_heads, width = heads_BNHD.shape[-2:]
        normal_BNHD = F.rms_norm(heads_BNHD, (width,), eps=EPS)
        # One long row per token: the gradient of the scale is then a sum over rows, not a slow strided one.
        return torch.unflatten(normal_BNHD.flatten(2) * self.scale.repeat(num_heads), -1, (num_heads, width))
