"""Linear layers, whose products on some processors are oneDNN's instead of MKL's.

torch multiplies matrices of float32 with MKL, which has code for AVX-512 on Intel's processors alone; oneDNN, which
torch has for convolutions, has it for all. On an AMD EPYC with AVX-512 its products of tokens with weights, and of
their gradients with weights, take a tenth to a sixth less time. Those of both with each other, which give the gradient
of a weight, it could multiply after a copy only; they have a kernel of our own (`native/products.cpp`).

Shape letters: N rows, K width of a row, M width of the result.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from frameloom.core.host_cpu import mkl_misses_avx512
from frameloom.models.layers.native import find_products, get_kernels, wants_products

_WANTS_ONEDNN: bool = mkl_misses_avx512() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
# Multiplications from which a product gains more than the way to it costs.
_LEAST_WORK = 1 << 27
# Numbers of a weight from which compiled code takes that way: it is for any number of rows.
_LEAST_WEIGHT = 1 << 17


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """What torch's function of this name gives, within rounding."""
    is_single = x.dtype == weight_MK.dtype == torch.float32
    if is_single and is_on_host(x) and (_WANTS_ONEDNN or wants_products()):
        if torch.compiler.is_compiling():
            if weight_MK.numel() >= _LEAST_WEIGHT:
                return cast(Tensor, _compiled_linear(x, weight_MK, bias_M))
        elif type(x) is Tensor and _is_large(x, weight_MK):
            return cast(Tensor, _Linear.apply(x, weight_MK, bias_M))  # type: ignore[no-untyped-call]
    return F.linear(x, weight_MK, bias_M)


def is_plain(x: Tensor) -> bool:
    """Whether these are numbers in float32 on the host that nothing watches or converts.

    Tensors of another kind may hold no numbers at all, and a compiler fuses the plain form by itself.
    """
    is_bare = type(x) is Tensor and not torch.compiler.is_compiling()
    return is_bare and x.dtype == torch.float32 and is_on_host(x)


def multiply(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """The same for plain numbers (`is_plain`), without a gradient."""
    if not _WANTS_ONEDNN or not _is_large(x, weight_MK):
        return F.linear(x, weight_MK, bias_M)
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, _in_one_piece(weight_MK), bias_M, "none", [], "")
    return made


def multiply_rows(grad_NM: Tensor, x_NK: Tensor) -> Tensor:
    """The gradient [M, K] of a weight, for plain numbers: the sum of outer products of rows."""
    if _is_large(x_NK, grad_NM.t()) and find_products() is not None:
        made: Tensor = torch.ops.frameloom.multiply_rows(grad_NM, x_NK)
        return made
    return torch.mm(grad_NM.t(), x_NK)


def _multiply_rows(left_NM: Tensor, right_NK: Tensor) -> Tensor:
    kernels, threads = get_kernels(), torch.get_num_threads()
    left_NM, right_NK = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (left_NM, right_NK))
    (num_rows, height), width = left_NM.shape, right_NK.shape[1]
    made_MK, room = left_NM.new_empty(height, width), left_NM.new_empty(kernels.count_product_room(width, threads))
    places = left_NM.data_ptr(), left_NM.stride(0), right_NK.data_ptr(), right_NK.stride(0), made_MK.data_ptr()
    kernels.multiply_rows(*places, num_rows, height, width, room.data_ptr(), threads)
    return made_MK


# As an operation of torch, so that whoever watches torch's operations sees it, and a compiler does not look inside.
torch.library.define("frameloom::multiply_rows", "(Tensor left, Tensor right) -> Tensor")
torch.library.impl("frameloom::multiply_rows", "CPU", _multiply_rows)
torch.library.register_fake(
    "frameloom::multiply_rows", lambda left, right: left.new_empty(left.shape[1], right.shape[1])
)


def is_on_host(x: Tensor) -> bool:
    """And nothing converts it on the way."""
    return x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _is_large(x: Tensor, weight_MK: Tensor) -> bool:
    return x.numel() * len(weight_MK) >= _LEAST_WORK


def _in_one_piece(weight_MK: Tensor) -> Tensor:
    """With some columns of a layer's weights, oneDNN would multiply one number after the other; a copy costs little."""
    if weight_MK.is_contiguous() or weight_MK.t().is_contiguous():
        return weight_MK
    return weight_MK.contiguous() if weight_MK.stride(1) == 1 else weight_MK.t().contiguous().t()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
        _keep(ctx, (x, weight_MK, bias_M))
        return multiply(x, weight_MK, bias_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _find_gradients(ctx, grad, multiply, multiply_rows)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor | None = None) -> None:
    x, weight_MK, _ = inputs
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if needs_weight else None, weight_MK if needs_x else None)


def _find_gradients(ctx: Any, grad: Tensor, product: Any, product_of_rows: Any) -> tuple[Tensor | None, ...]:
    x, weight_MK = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad_NM = grad.flatten(0, -2)
    return (
        product(grad, weight_MK.t(), None) if needs_x else None,
        product_of_rows(grad_NM, x.flatten(0, -2)) if needs_weight else None,
        grad_NM.sum(0) if needs_bias else None,
    )


# A compiler takes it as it is, and does not look inside.
_compiled_linear = torch.library.custom_op(
    "frameloom::linear", multiply, mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
_compiled_linear.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)))


def _find_compiled_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    has_kernel = find_products() is not None
    product_of_rows = torch.ops.frameloom.multiply_rows if has_kernel else lambda left, right: torch.mm(left.t(), right)
    return _find_gradients(ctx, grad, _compiled_linear, product_of_rows)


_compiled_linear.register_autograd(_find_compiled_gradients, setup_context=_keep)
