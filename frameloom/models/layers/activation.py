"""tanh-GELU. On a CPU in float32 it is written with a sigmoid, whose kernel is cheaper than that of tanh."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# 0.5 * (1 + tanh(u)) = sigmoid(2u), with 2u = _OUTER * (x + _CUBIC * x^3)
_OUTER = 2 * (2 / torch.pi) ** 0.5
_CUBIC = 0.044715


class _SigmoidGELU(torch.autograd.Function):
    """Finds the slope along with the value: one tensor is kept for the backward pass, which is one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        gate = torch.addcmul(x, square, x, value=_CUBIC).mul_(_OUTER).sigmoid_()
        value = x * gate
        if ctx.needs_input_grad[0]:
            inner = torch.addcmul(x, square, x, value=3 * _CUBIC, out=square)
            curve = torch.addcmul(gate, gate, gate, value=-1)
            ctx.save_for_backward(torch.addcmul(gate, curve, inner, value=_OUTER, out=gate))
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return cast(Tensor, grad * slope)


class TanhGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return F.gelu(x, approximate="tanh")
        if torch.compiler.is_compiling():  # a compiler fuses the plain form and its gradient by itself
            return x * torch.sigmoid(torch.addcmul(x, x * x, x, value=_CUBIC) * _OUTER)
        return cast(Tensor, _SigmoidGELU.apply(x))  # type: ignore[no-untyped-call]
