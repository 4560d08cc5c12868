"""Linear layers whose float32 products on the CPU are those of torch (MKL) or of oneDNN, whichever is faster there.

MKL uses AVX-512 on Intel's processors only; oneDNN, which torch ships for convolutions, uses it on all. On an AMD EPYC
with AVX-512 a training step of a transformer of 30 million parameters takes 0.56 to 0.69 of the time with oneDNN.

Shape letters: N rows, K width of a row, M width of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.device import onednn_may_use_avx512, read_cpuinfo

# Multiplications from which a product gains more than the way to it costs.
_LEAST_WORK = 1 << 27
# Numbers of a weight from which compiled code goes this way: it is compiled for any number of rows.
_LEAST_WEIGHT = 1 << 17


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """`F.linear`; with "onednn", large products in float32 on the CPU are equal to it within rounding."""
    return _product(x, weight_MK, bias_M)


def choose_product() -> str:
    """The faster product of this processor, by its name in the table."""
    vendor = read_cpuinfo("vendor_id")
    is_foreign = bool(vendor) and "GenuineIntel" not in vendor
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return "onednn" if is_foreign and has_onednn and onednn_may_use_avx512() else "torch"


def _linear_onednn(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    is_single = x.dtype == weight_MK.dtype == torch.float32
    if not is_single or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight_MK, bias_M)
    if torch.compiler.is_compiling():
        is_large = weight_MK.numel() >= _LEAST_WEIGHT
    else:  # tensors of other classes may hold no numbers
        is_large = type(x) is Tensor and _is_large(x, weight_MK)
    return cast(Tensor, _multiply(x, weight_MK, bias_M)) if is_large else F.linear(x, weight_MK, bias_M)


def _is_large(x: Tensor, weight_MK: Tensor) -> bool:
    return x.numel() * len(weight_MK) >= _LEAST_WORK


@torch.library.custom_op(
    "frameloom::linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
def _multiply(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
    """A custom op: opaque to the compiler, and with a gradient, which oneDNN's op lacks."""
    if not _is_large(x, weight_MK):
        return F.linear(x, weight_MK, bias_M)
    if not weight_MK.is_contiguous() and not weight_MK.t().is_contiguous():
        # oneDNN multiplies the columns of a larger matrix one number after the other; a copy costs little.
        is_by_rows = weight_MK.stride(1) == 1
        weight_MK = weight_MK.contiguous() if is_by_rows else weight_MK.t().contiguous().t()
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_MK, bias_M, "none", [], "")
    return made


@_multiply.register_fake
def _(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight_MK))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight_MK, _ = inputs
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if needs_weight else None, weight_MK if needs_x else None)


def _find_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight_MK = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad_NM = grad.flatten(0, -2)
    return (
        _multiply(grad, weight_MK.t(), None) if needs_x else None,
        _multiply(grad_NM.t(), x.flatten(0, -2).t(), None) if needs_weight else None,
        grad_NM.sum(0) if needs_bias else None,
    )


_multiply.register_autograd(_find_gradients, setup_context=_keep)

PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {"torch": F.linear, "onednn": _linear_onednn}
_product = PRODUCTS[choose_product()]
