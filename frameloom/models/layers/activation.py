"""tanh-GELU. On a CPU in float32 it is written with a sigmoid, whose kernel is cheaper than that of tanh."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# 0.5 * (1 + tanh(u)) = sigmoid(2u), with 2u = _OUTER * (x + _CUBIC * x^3)
_OUTER = 2 * (2 / torch.pi) ** 0.5
_CUBIC = 0.044715
# Numbers that are worked on at a time: what is computed on the way then stays in the caches of a core.
_PIECE = 1 << 17


class _SigmoidGELU(torch.autograd.Function):
    """Finds the slope along with the value: one tensor is kept for the backward pass, which is one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        value = torch.empty(rows.shape)
        slope = torch.empty(rows.shape) if ctx.needs_input_grad[0] else None
        num_rows = max(1, _PIECE // rows.shape[-1])
        for start in range(0, len(rows), num_rows):
            piece = slice(start, start + num_rows)
            _fill_piece(rows[piece], value[piece], None if slope is None else slope[piece])
        if slope is not None:
            ctx.save_for_backward(slope.view(x.shape))
        return value.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return cast(Tensor, grad * slope)


def _fill_piece(x: Tensor, value: Tensor, slope: Tensor | None) -> None:
    square = x * x
    gate = torch.addcmul(x, square, x, value=_CUBIC, out=slope).mul_(_OUTER).sigmoid_()
    torch.mul(x, gate, out=value)
    if slope is not None:
        inner = torch.addcmul(x, square, x, value=3 * _CUBIC, out=square)
        curve = torch.addcmul(gate, gate, gate, value=-1)
        torch.addcmul(gate, curve, inner, value=_OUTER, out=slope)


class TanhGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        # Tensors of another kind may hold no numbers at all, and what keeps its input needs as much memory.
        if x.device.type != "cpu" or x.dtype != torch.float32 or type(x) is not Tensor:
            return F.gelu(x, approximate="tanh")
        if torch.compiler.is_compiling():  # a compiler fuses the plain form and its gradient by itself
            return x * torch.sigmoid(torch.addcmul(x, x * x, x, value=_CUBIC) * _OUTER)
        return cast(Tensor, _SigmoidGELU.apply(x))  # type: ignore[no-untyped-call]
