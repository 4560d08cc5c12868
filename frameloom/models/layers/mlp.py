"""MLPs of transformer blocks and of embeddings, with GELU; parameter names are those of published checkpoints."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from frameloom.models.layers.dropout import KeyedDropout
from frameloom.models.layers.linear import Linear

# 0.5 * (1 + tanh(u)) = sigmoid(2u), with 2u = _OUTER * (x + _CUBIC * x^3)
_OUTER = 2 * (2 / torch.pi) ** 0.5
_CUBIC = 0.044715


class TwoLinear(nn.Module):
    """The embedding of a noise level, or the projection of a caption."""

    def __init__(self, in_width: int, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_width, width)
        self.activation = activation
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear_2(self.activation(self.linear_1(x)))
        return result


class FeedForward(nn.Module):
    """The MLP of a block, four times as wide inside; `dropout` is behind the activation and, if `drops_result`, behind
    the second map."""

    def __init__(self, width: int, dropout: float = 0.0, *, drops_result: bool = False) -> None:
        super().__init__()
        up, down = Linear(width, 4 * width), Linear(4 * width, width)
        # The dropout in the middle has a number in the published names.
        self.net = nn.ModuleList([nn.ModuleDict({"proj": up}), KeyedDropout(dropout), down])
        self.drop_result = KeyedDropout(dropout if drops_result else 0.0, site=1)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """`keys` are those of the dropout."""
        up, down = self.get_submodule("net.0.proj"), self.get_submodule("net.2")
        if keys is None or not self.training:
            return run_mlp(x, up, down)
        result: Tensor = self.drop_result(down(self.net[1](gelu(up(x)), keys)), keys)
        return result


def run_mlp(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
    """`down` of the GELU of `up`, which are linear layers or adapters around them."""
    activate = sigmoid_gelu if are_plain(x, up, down) else gelu
    result: Tensor = down(activate(up(x)))
    return result


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form. A compiler finds the gradient of the sigmoid form, which is the same, by itself."""
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        return x * torch.sigmoid(torch.addcmul(x, x * x, x, value=_CUBIC) * _OUTER)
    return F.gelu(x, approximate="tanh")


def are_plain(x: Tensor, *layers: nn.Module) -> bool:
    """Whether float32 numbers on the CPU go through linear layers without adapters or hooks, outside of compiled code.

    Runs there have used the sigmoid form of GELU and, in single blocks, separate products from their beginning. These
    round otherwise than torch's GELU and one joint product, so a run resumes to the bit only with the same forms.
    """
    is_host = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    is_eager = type(x) is Tensor and not torch.compiler.is_compiling()
    return is_host and is_eager and all(map(_is_bare, layers))


def _is_bare(layer: nn.Module) -> bool:
    """Hooks expect the layer to be called, which separate products do not do."""
    return type(layer) is Linear and not layer._forward_hooks and not layer._forward_pre_hooks


def sigmoid_gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, written with a sigmoid, and with a gradient of one product."""
    return cast(Tensor, _SigmoidGELU.apply(x))  # type: ignore[no-untyped-call]


class _SigmoidGELU(torch.autograd.Function):
    """Keeps the slope instead of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        gate = torch.addcmul(x, square, x, value=_CUBIC).mul_(_OUTER).sigmoid_()
        value = x * gate
        if ctx.needs_input_grad[0]:
            inner = torch.addcmul(x, square, x, value=3 * _CUBIC, out=square)
            curve = torch.addcmul(gate, gate, gate, value=-1)
            ctx.save_for_backward(torch.addcmul(gate, curve, inner, value=_OUTER, out=inner))
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return cast(Tensor, grad * slope)
