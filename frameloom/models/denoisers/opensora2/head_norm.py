"""RMS norm of every head. On a CPU in float32 it has a gradient of its own, with half of the passes over memory.

Shape letters: B batch, N tokens, H heads, D width of a head.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


class _ScaledUnit(torch.autograd.Function):
    """x / rms(x) * scale; keeps the unit heads and one number for each."""

    @staticmethod
    def forward(ctx: Any, heads_BNHD: Tensor, scale_D: Tensor) -> Tensor:
        num_heads, width = heads_BNHD.shape[-2:]
        length = torch.linalg.vector_norm(heads_BNHD, dim=-1, keepdim=True)
        inverse = length.square_().div_(width).add_(EPS).rsqrt_()
        unit = heads_BNHD * inverse
        # One long row per token here and below: sums over rows are fast, strided ones over heads are slow.
        row = scale_D.repeat(num_heads)
        ctx.save_for_backward(unit, inverse, row)
        return cast(Tensor, (unit.flatten(2) * row).view_as(unit))

    @staticmethod
    def backward(ctx: Any, grad_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        unit, inverse, row = ctx.saved_tensors
        num_heads, width = unit.shape[-2:]
        product = grad_BNHD.flatten(2) * unit.flatten(2)
        grad_scale = product.flatten(0, 1).sum(0).view(num_heads, width).sum(0)
        mean = (product.reshape(-1, width) @ (row[:width] / width)).view_as(inverse)
        grad = torch.addcmul((grad_BNHD.flatten(2) * row).view_as(unit), unit, mean, value=-1)
        return grad.mul_(inverse), grad_scale


class HeadNorm(nn.Module):
    """RMS norm of every head; statistics in float32, rounded to the input's precision before the scale."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(head_dim))

    def initialize_parameters(self, generator: torch.Generator) -> None:
        self.scale.fill_(1.0)

    def forward(self, heads_BNHD: Tensor) -> Tensor:
        is_plain = heads_BNHD.device.type == "cpu" and heads_BNHD.dtype == self.scale.dtype == torch.float32
        if is_plain and not torch.compiler.is_compiling():  # a compiler fuses the form below by itself
            return cast(Tensor, _ScaledUnit.apply(heads_BNHD, self.scale))  # type: ignore[no-untyped-call]
        unit = F.rms_norm(heads_BNHD, heads_BNHD.shape[-1:], eps=EPS)
        return (unit.flatten(2) * self.scale.repeat(heads_BNHD.shape[2])).view_as(heads_BNHD)
