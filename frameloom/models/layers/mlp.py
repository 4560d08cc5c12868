"""Layers of two linear maps. Names inside are those of published checkpoints."""

from __future__ import annotations

from torch import Tensor, nn

from frameloom.models.layers.gelu_mlp import run_mlp
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
    """The MLP of a block, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        up, down = Linear(width, 4 * width), Linear(4 * width, width)
        # The published list has a dropout in the middle, which never drops; it still counts in the names.
        self.net = nn.ModuleList([nn.ModuleDict({"proj": up}), nn.Identity(), down])

    def forward(self, x: Tensor) -> Tensor:
        return run_mlp(x, self.get_submodule("net.0.proj"), self.get_submodule("net.2"))
