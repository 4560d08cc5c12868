"""Position embeddings: sinusoids, rotary tables, and a cache of tables by shape.

Shape letters: B batch, N tokens, A axes, H heads, D width of a head, P pairs of a head.

A pair of channels (x, y) of a head is the complex number x + iy; along an axis with `dim` of the head's channels, a
token at position p turns pair j by the angle p * theta^(-2j / dim). Models differ in positions, in the share of the
channels that each axis has, and in which channels are a pair.

Complex tables have two merits besides speed: no mixed-precision wrapper rounds them to bf16 on the way into a block,
and all pairings share one rotation, because attention does not see the order of a head's channels.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

THETA = 10_000.0


def grid_positions(axes: Sequence[Tensor]) -> Tensor:
    """[N, A]: the position of every token of a grid, the last axis running fastest; `axes` has those along each."""
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def axis_angles(position: Tensor, dim: int, theta: float = THETA, *, precision: torch.dtype = torch.float32) -> Tensor:
    """Angles [..., dim / 2] along one axis."""
    exponent = torch.arange(0, dim, 2, dtype=precision, device=position.device) / dim
    return position.to(precision)[..., None] * (1.0 / theta**exponent)


def rotary_table(
    position_NA: Tensor, axes_dim: Sequence[int], theta: float = THETA, *, precision: torch.dtype = torch.float32
) -> Tensor:
    """Unit complex numbers [N, 1, P], the pairs of the first axis first; a batch may stand before N."""
    axes = zip(position_NA.unbind(-1), axes_dim, strict=True)
    angles = torch.cat([axis_angles(position, dim, theta, precision=precision) for position, dim in axes], dim=-1)
    return torch.complex(angles.cos().float(), angles.sin().float()).unsqueeze(-2)


def rotate(heads_BNHD: Tensor, table_N1P: Tensor, *, parts: int = 0) -> Tensor:
    """Turn every pair; the result is float32.

    Pairs are channels (2j, 2j + 1), or, with `parts`, channels (j, j + half) of so many equal parts of a head. Those
    come out side by side: in q and k alike, so their products are those of the original order.
    """
    heads = heads_BNHD.float()
    if parts:
        first, second = torch.unflatten(heads, -1, (parts, 2, -1)).unbind(-2)
        pairs = torch.complex(first, second).flatten(-2)
    else:
        pairs = torch.view_as_complex(torch.unflatten(heads, -1, (-1, 2)))
    return torch.view_as_real(pairs * table_N1P).flatten(-2)


def embed_index(index_B: Tensor, width: int, *, shift: int = 0) -> Tensor:
    """[B, width] of a noise level's index: cosines, then sines, in float32, as half precision would merge neighbours.

    An odd width ends in a zero. `shift` is taken from the number of frequencies that their exponents are divided by.
    """
    half = width // 2
    exponent = torch.arange(half, dtype=torch.float32, device=index_B.device)
    angles = index_B.float()[:, None] * torch.exp(-math.log(THETA) * exponent / (half - shift))
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=-1), (0, width % 2))


def embed_position(position_N: Tensor, width: int) -> Tensor:
    """[N, width] in float32: sines, then cosines; computed in float64."""
    exponent = torch.arange(width // 2, dtype=torch.float64, device=position_N.device) / (width / 2)
    angles = position_N.double()[:, None] * THETA**-exponent
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


class PositionTables:
    """The tables of one kind that a model needs; `compute` gets what `get` is asked for, but for the device.

    Tables are computed on the host, so that their numbers do not depend on the device they go to.
    """

    KEPT = 16

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self._compute = compute
        self._tables: OrderedDict[tuple[Hashable, ...], Tensor] = OrderedDict()

    def get(self, *shape: Hashable, device: torch.device) -> Tensor:
        key = (*shape, device)
        if key not in self._tables:
            # A table made while sampling must also serve training, which refuses inference-mode tensors.
            with torch.inference_mode(False), torch.device("cpu"):
                self._tables[key] = self._compute(*shape).to(device)
            if len(self._tables) > self.KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]
