"""The blocks of the MMDiT. Module and parameter names are those of the published checkpoints.

Blocks take and return tensors only. LayerNorms have no parameters; all attention is full and unmasked.

Shape letters: B batch, N video tokens, K text tokens, M = K + N, D width, H heads, P rotary pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.denoisers.opensora2.config import MMDiTConfig
from frameloom.models.denoisers.opensora2.head_norm import HeadNorm
from frameloom.models.layers.activation import TanhGELU
from frameloom.models.layers.attention import RotaryAttention
from frameloom.models.layers.modulation import modulate

QKV = tuple[Tensor, Tensor, Tensor]


class QKNorm(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.query_norm = HeadNorm(head_dim)
        self.key_norm = HeadNorm(head_dim)

    def forward(self, q_BNHD: Tensor, k_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q_BNHD), self.key_norm(k_BNHD)


class Modulation(nn.Module):
    def __init__(self, width: int, num_parts: int) -> None:
        super().__init__()
        self.num_parts = num_parts
        self.lin = nn.Linear(width, num_parts * width)

    def forward(self, vec_BD: Tensor) -> tuple[Tensor, ...]:
        """Three or six vectors [B, 1, D]: shift, scale, gate, in this order, once or twice."""
        vectors: Tensor = self.lin(F.silu(vec_BD))[:, None]
        return vectors.chunk(self.num_parts, dim=-1)


class StreamAttention(nn.Module):
    """The projections of one stream of a double block; the attention itself joins both streams."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_heads
        self.fused = config.fused_qkv
        if self.fused:
            self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        else:
            self.q_proj = nn.Linear(width, width, bias=config.qkv_bias)
            self.k_proj = nn.Linear(width, width, bias=config.qkv_bias)
            self.v_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.norm = QKNorm(config.head_dim)
        self.proj = nn.Linear(width, width)

    def project(self, x_BND: Tensor) -> QKV:
        if self.fused:
            q, k, v = self.qkv(x_BND).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        else:
            parts = (self.q_proj, self.k_proj, self.v_proj)
            q, k, v = (part(x_BND).unflatten(-1, (self.num_heads, -1)) for part in parts)
        return *self.norm(q, k), v


def build_mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), TanhGELU(), nn.Linear(hidden, width))


class DoubleBlock(nn.Module):
    """Video and text keep their own weights and meet in the attention."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.img_mod = Modulation(width, 6)
        self.img_attn = StreamAttention(config)
        self.img_mlp = build_mlp(width, config.mlp_hidden_dim)
        self.txt_mod = Modulation(width, 6)
        self.txt_attn = StreamAttention(config)
        self.txt_mlp = build_mlp(width, config.mlp_hidden_dim)
        self.attend = RotaryAttention(parts=int(config.use_liger_rope))

    def forward(self, img_BND: Tensor, txt_BKD: Tensor, vec_BD: Tensor, rope_M1P: Tensor) -> tuple[Tensor, Tensor]:
        img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = self.img_mod(vec_BD)
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = self.txt_mod(vec_BD)
        img_qkv = self.img_attn.project(modulate(img_BND, img_shift1, img_scale1))
        txt_qkv = self.txt_attn.project(modulate(txt_BKD, txt_shift1, txt_scale1))
        q, k, v = (torch.cat(pair, dim=1) for pair in zip(txt_qkv, img_qkv, strict=True))
        txt_attended, img_attended = self.attend(q, k, v, rope_M1P).tensor_split((txt_BKD.shape[1],), dim=1)

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
        self.widths = (width, width, width, mlp_width)
        if self.fused:
            self.linear1 = nn.Linear(width, 3 * width + mlp_width)
        else:
            self.q_proj = nn.Linear(width, width)
            self.k_proj = nn.Linear(width, width)
            self.v_mlp = nn.Linear(width, width + mlp_width)
        self.linear2 = nn.Linear(width + mlp_width, width)
        self.norm = QKNorm(config.head_dim)
        self.mlp_act = TanhGELU()
        self.modulation = Modulation(width, 3)
        self.attend = RotaryAttention(parts=int(config.use_liger_rope))

    def forward(self, x_BMD: Tensor, vec_BD: Tensor, rope_M1P: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(vec_BD)
        q, k, v, mlp = self._project(modulate(x_BMD, shift, scale))
        q, k = self.norm(q, k)
        attended = self.attend(q, k, v, rope_M1P)
        return torch.addcmul(x_BMD, gate, self.linear2(torch.cat((attended, self.mlp_act(mlp)), dim=-1)))

    def _project(self, x_BMD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.fused:
            q, k, v, mlp = self.linear1(x_BMD).split(self.widths, dim=-1)
        else:
            q, k = self.q_proj(x_BMD), self.k_proj(x_BMD)
            v, mlp = self.v_mlp(x_BMD).split(self.widths[2:], dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in (q, k, v))
        return q, k, v, mlp
