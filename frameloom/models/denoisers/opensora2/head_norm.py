"""RMS norm of every head. On a CPU in float32 it has a gradient of its own, with half of the passes over memory.

Shape letters: B batch, N tokens, H heads, D width of a head.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


def _invert_length(heads_BNHD: Tensor) -> Tensor:
    """[B, N, H, 1]: what makes the mean square of a head 1."""
    length = torch.linalg.vector_norm(heads_BNHD, dim=-1, keepdim=True)
    return cast(Tensor, (length.square() / heads_BNHD.shape[-1] + EPS).rsqrt())


def _scale(heads_BNHD: Tensor, scale_D: Tensor) -> Tensor:
    """One long row per token: the gradient that torch finds is then a sum over rows, not a slow strided one."""
    num_heads, width = heads_BNHD.shape[-2:]
    return torch.unflatten(heads_BNHD.flatten(2) * scale_D.repeat(num_heads), -1, (num_heads, width))


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
