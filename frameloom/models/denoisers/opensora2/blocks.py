"""Blocks of the MMDiT; module and parameter names are those of the published checkpoints.

Shape letters: B batch, N video tokens, K text tokens, M = K + N, D width, H heads, P rotary pairs.

Blocks take and return tensors only. LayerNorms have no parameters; all attention is full and unmasked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.denoisers.opensora2.config import MMDiTConfig
from frameloom.models.layers.attention.attention import RotaryAttention
from frameloom.models.layers.linear import Linear, linear
from frameloom.models.layers.mlp import are_plain, gelu, run_mlp, sigmoid_gelu
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
        self.norm = QKNorm(config.head_dim)
        self.modulation = Modulation(width, 3)
        self.attend = RotaryAttention(parts=int(config.use_liger_rope))

    def forward(self, x_BMD: Tensor, vec_BD: Tensor, rope_M1P: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(vec_BD)
        normal_BMD = modulate(x_BMD, shift, scale)
        mix = self._mix_apart if are_plain(normal_BMD, self._joint, self.linear2) else self._mix
        return torch.addcmul(x_BMD, gate, mix(normal_BMD, rope_M1P))

    @property
    def _joint(self) -> nn.Module:
        """The layer whose last outputs go into the MLP, and those before them into the heads."""
        return self.linear1 if self.fused else self.v_mlp

    def _mix(self, x_BMD: Tensor, rope_M1P: Tensor) -> Tensor:
        *heads, mlp = self._joint(x_BMD).split(self.widths, dim=-1)
        attended = self._attend(x_BMD, heads, rope_M1P)
        mixed_BMD: Tensor = self.linear2(torch.cat((attended, gelu(mlp)), dim=-1))
        return mixed_BMD

    def _mix_apart(self, x_BMD: Tensor, rope_M1P: Tensor) -> Tensor:
        """The same with attention and MLP each on its part of the weights."""
        *head_widths, mlp_width = self.widths
        widths = [sum(head_widths), mlp_width]
        (into_heads, into_mlp), (heads_bias, mlp_bias) = (
            torch.split(part, widths) for part in self._joint.parameters()
        )
        of_heads, of_mlp = torch.split(self.linear2.weight, [head_widths[0], mlp_width], dim=1)
        heads = torch.split(linear(x_BMD, into_heads, heads_bias), head_widths, dim=-1)
        attended = self._attend(x_BMD, heads, rope_M1P)
        mlp = linear(sigmoid_gelu(linear(x_BMD, into_mlp, mlp_bias)), of_mlp)
        return mlp + linear(attended, of_heads, self.linear2.bias)

    def _attend(self, x_BMD: Tensor, heads: Sequence[Tensor], rope_M1P: Tensor) -> Tensor:
        """`heads` are queries, keys and values, or the values alone where the others have layers of their own."""
        q, k, v = heads if self.fused else (self.q_proj(x_BMD), self.k_proj(x_BMD), *heads)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in (q, k, v))
        attended: Tensor = self.attend(*self.norm(q, k), v, rope_M1P)
        return attended


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
        self.norm = QKNorm(config.head_dim)
        self.proj = Linear(width, width)

    def project(self, x_BND: Tensor) -> QKV:
        if self.fused:
            q, k, v = self.qkv(x_BND).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        else:
            parts = (self.q_proj, self.k_proj, self.v_proj)
            q, k, v = (part(x_BND).unflatten(-1, (self.num_heads, -1)) for part in parts)
        return *self.norm(q, k), v


class StreamMLP(nn.ModuleList):
    """The published list has GELU in the middle, which has no weights and counts in the names."""

    def __init__(self, config: MMDiTConfig) -> None:
        width, hidden = config.hidden_size, config.mlp_hidden_dim
        super().__init__([Linear(width, hidden), nn.Identity(), Linear(hidden, width)])

    def forward(self, x_BND: Tensor) -> Tensor:
        up, _, down = self
        return run_mlp(x_BND, up, down)


class Modulation(nn.Module):
    def __init__(self, width: int, num_parts: int) -> None:
        super().__init__()
        self.num_parts = num_parts
        self.lin = nn.Linear(width, num_parts * width)

    def forward(self, vec_BD: Tensor) -> tuple[Tensor, ...]:
        """Three or six vectors [B, 1, D]: shift, scale, gate, in this order, once or twice."""
        vectors: Tensor = self.lin(F.silu(vec_BD))[:, None]
        return vectors.chunk(self.num_parts, dim=-1)


class QKNorm(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.query_norm = HeadNorm(head_dim)
        self.key_norm = HeadNorm(head_dim)

    def forward(self, q_BNHD: Tensor, k_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q_BNHD), self.key_norm(k_BNHD)


class HeadNorm(nn.Module):
    """RMS norm of every head; statistics in float32, rounded to the input's precision before the scale."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(head_dim))

    def initialize_parameters(self, generator: torch.Generator) -> None:
        self.scale.fill_(1.0)

    def forward(self, heads_BNHD: Tensor) -> Tensor:
        if heads_BNHD.device.type != "cpu" or not heads_BNHD.dtype == self.scale.dtype == torch.float32:
            return _scale(F.rms_norm(heads_BNHD, heads_BNHD.shape[-1:], eps=EPS), self.scale)
        if torch.compiler.is_compiling():  # a compiler finds a gradient as short by itself
            return _scale(heads_BNHD * _invert_length(heads_BNHD), self.scale)
        return cast(Tensor, _ScaledUnit.apply(heads_BNHD, self.scale))  # type: ignore[no-untyped-call]


class _ScaledUnit(torch.autograd.Function):
    """x / rms(x) * scale; keeps the unit heads and one number for each."""

    @staticmethod
    def forward(ctx: Any, heads_BNHD: Tensor, scale_D: Tensor) -> Tensor:
        inverse = _invert_length(heads_BNHD)
        unit = heads_BNHD * inverse
        ctx.save_for_backward(unit, inverse, scale_D)
        return unit * scale_D

    @staticmethod
    def backward(ctx: Any, grad_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        unit, inverse, scale_D = ctx.saved_tensors
        num_heads, width = unit.shape[-2:]
        product = grad_BNHD.flatten(2) * unit.flatten(2)
        grad_scale = product.flatten(0, 1).sum(0).view(num_heads, width).sum(0)
        mean = (product.reshape(-1, width) @ (scale_D / width)).view_as(inverse)
        grad = torch.addcmul(grad_BNHD * scale_D, unit, mean, value=-1)
        return grad.mul_(inverse), grad_scale


def _invert_length(heads_BNHD: Tensor) -> Tensor:
    """[B, N, H, 1]: what makes the mean square of a head 1."""
    length = torch.linalg.vector_norm(heads_BNHD, dim=-1, keepdim=True)
    return cast(Tensor, (length.square() / heads_BNHD.shape[-1] + EPS).rsqrt())


def _scale(heads_BNHD: Tensor, scale_D: Tensor) -> Tensor:
    """One long row per token: the gradient that torch finds is then a sum over rows, not a slow strided one."""
    num_heads, width = heads_BNHD.shape[-2:]
    return torch.unflatten(heads_BNHD.flatten(2) * scale_D.repeat(num_heads), -1, (num_heads, width))
