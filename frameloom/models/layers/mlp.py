"""MLPs of transformer blocks and of embeddings, with GELU; parameter names are those of published checkpoints."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.models.layers.dropout import KeyedDropout
from frameloom.models.layers.linear import Linear


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
        result: Tensor = self.drop_result(down(self.net[1](gelu(up(x)), keys)), keys)
        return result


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, that of all published models here."""
    return F.gelu(x, approximate="tanh")
