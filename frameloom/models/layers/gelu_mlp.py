"""Two linear maps with a tanh-GELU between them; on a CPU in float32 in one piece.

In one piece the bias of the first map is added where GELU reads its input anyway, GELU's slope is found along with its
value and takes the place of its input, and the backward pass is one product with it. Where our kernels compile
(`native/gelu.cpp`) that is one pass; elsewhere it works on pieces that stay in the caches of a core, with a sigmoid,
whose kernel in torch is cheaper than that of tanh.

Shape letters: N rows, D and E outer widths, H inner width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from frameloom.models.layers.linear import Linear, is_plain, multiply, multiply_rows
from frameloom.models.layers.native import find_passes, get_kernels

# 0.5 * (1 + tanh(u)) = sigmoid(2u), with 2u = _OUTER * (x + _CUBIC * x^3)
_OUTER = 2 * (2 / torch.pi) ** 0.5
_CUBIC = 0.044715
# Numbers that are worked on at a time: in larger pieces they leave the caches, in smaller ones calls take longer than
# they work.
_PIECE = 1 << 18


def gelu(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        return x * torch.sigmoid(torch.addcmul(x, x * x, x, value=_CUBIC) * _OUTER)
    return F.gelu(x, approximate="tanh")


def run_mlp(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
    """`down` of the GELU of `up`, which are linear layers or adapters around them."""
    if can_fuse(x, up, down):
        return fused_mlp(x, *up.parameters(), *down.parameters())
    result: Tensor = down(gelu(up(x)))
    return result


def can_fuse(x: Tensor, *maps: nn.Module) -> bool:
    """Whether these are plain linear layers on plain numbers: nothing else may expect to be called in between."""
    return is_plain(x) and all(map(_is_plain_layer, maps))


def _is_plain_layer(layer: nn.Module) -> bool:
    return (
        type(layer) is Linear
        and layer.bias is not None
        and layer.weight.dtype == torch.float32
        and type(layer.weight) is nn.Parameter
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )


def fused_mlp(x: Tensor, up_HD: Tensor, bias_H: Tensor, down_EH: Tensor, bias_E: Tensor | None) -> Tensor:
    """What `can_fuse` allows; the weights may be parts of a layer's."""
    made_NE = _FusedMLP.apply(x.reshape(-1, x.shape[-1]), up_HD, bias_H, down_EH, bias_E)  # type: ignore[no-untyped-call]
    return cast(Tensor, made_NE).view(*x.shape[:-1], len(down_EH))


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, up_HD: Tensor, bias_H: Tensor, down_EH: Tensor, bias_E: Tensor | None
    ) -> Tensor:
        hidden_NH = multiply(x_ND, up_HD)
        has_slope = any(ctx.needs_input_grad[:3])
        value_NH = torch.empty_like(hidden_NH) if has_slope else hidden_NH
        _activate(hidden_NH, bias_H, value_NH)
        if any(ctx.needs_input_grad):
            needs_up, needs_down = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
            ctx.save_for_backward(
                x_ND if needs_up else None,
                up_HD,
                down_EH,
                value_NH if needs_down else None,
                hidden_NH if has_slope else None,
            )
        return multiply(value_NH, down_EH, bias_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NE: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, up_HD, down_EH, value_NH, slope_NH = ctx.saved_tensors
        needs_x, needs_up, needs_bias, needs_down, needs_down_bias = ctx.needs_input_grad
        grad_down = multiply_rows(grad_NE, value_NH) if needs_down else None
        grad_down_bias = grad_NE.sum(0) if needs_down_bias else None
        if slope_NH is None:
            return None, None, None, grad_down, grad_down_bias
        grad_NH = multiply(grad_NE, down_EH.t()).mul_(slope_NH)
        return (
            multiply(grad_NH, up_HD.t()) if needs_x else None,
            multiply_rows(grad_NH, x_ND) if needs_up else None,
            grad_NH.sum(0) if needs_bias else None,
            grad_down,
            grad_down_bias,
        )


def _activate(hidden_NH: Tensor, bias_H: Tensor, value_NH: Tensor) -> None:
    """Fill `value` with GELU(hidden + bias), and `hidden` with its slope, unless both are the same."""
    fill = activate_in_pieces if find_passes() is None else activate_natively
    fill(hidden_NH, bias_H, value_NH)


def activate_natively(hidden_NH: Tensor, bias_H: Tensor, value_NH: Tensor) -> None:
    bias_H = bias_H.contiguous()
    places = (part.data_ptr() for part in (hidden_NH, bias_H, value_NH))
    get_kernels().activate(*places, *hidden_NH.shape, torch.get_num_threads())


def activate_in_pieces(hidden_NH: Tensor, bias_H: Tensor, value_NH: Tensor) -> None:
    # Three rooms for a piece, which together are not larger than what is worked on.
    num_rows = max(1, min(_PIECE // hidden_NH.shape[1], len(hidden_NH) // 3))
    rooms = torch.empty(3, num_rows, hidden_NH.shape[1])
    for start in range(0, len(hidden_NH), num_rows):
        hidden, value = hidden_NH[start : start + num_rows], value_NH[start : start + num_rows]
        x, square, gate = rooms[:, : len(hidden)]
        torch.add(hidden, bias_H, out=x)
        torch.mul(x, x, out=square)
        torch.addcmul(x, square, x, value=_CUBIC, out=gate).mul_(_OUTER).sigmoid_()
        torch.mul(x, gate, out=value)
        if value_NH is not hidden_NH:
            inner = torch.addcmul(x, square, x, value=3 * _CUBIC, out=square)
            curve = torch.addcmul(gate, gate, gate, value=-1, out=x)
            torch.addcmul(gate, curve, inner, value=_OUTER, out=hidden)
