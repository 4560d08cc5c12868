"""tanh-GELU. On a CPU in float32 it is written with a sigmoid, whose kernel is cheaper than that of tanh."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# 0.5 * (1 + tanh(u)) = sigmoid(2u), with u = sqrt(2 / pi) * (x + 0.044715 * x^3)
_LINEAR = 2 * (2 / torch.pi) ** 0.5
_CUBIC = _LINEAR * 0.044715


class _SigmoidGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = x.square().mul_(_CUBIC).add_(_LINEAR).mul_(x).sigmoid_()
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, gate = ctx.saved_tensors
        slope = x.square().mul_(3 * _CUBIC).add_(_LINEAR).mul_(x)
        slope.mul_(torch.addcmul(gate, gate, gate, value=-1)).add_(gate)
        return cast(Tensor, slope.mul_(grad))


class TanhGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return F.gelu(x, approximate="tanh")
        if torch.compiler.is_compiling():  # a compiler fuses the plain form and its gradient by itself
            return x * torch.sigmoid(x * (_CUBIC * x.square() + _LINEAR))
        return cast(Tensor, _SigmoidGELU.apply(x))  # type: ignore[no-untyped-call]
