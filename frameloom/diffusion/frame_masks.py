"""The kinds of condition that Open-Sora 2.0 is trained with: which frames at the ends of a clip are given.

Lengths are latent frames. A causal autoencoder has one more in a long stretch, because its first frame stands alone.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.diffusion.mask_kinds import END_KINDS


def draw_end_mask(
    shape_FHW: tuple[int, int, int], draw: float, shares: Mapping[str, float], *, stride: int, causal: bool
) -> Tensor:
    """A mask [F, H, W], 1 where a pixel is given, of the kind that a uniform `draw` falls on; kinds that a clip is too
    short for are left out."""
    F, H, W = shape_FHW
    cells = (F - 1) // stride + 1 if causal else F // stride
    left = usable_kinds(shares, cells, causal=causal)
    kind = pick_kind(left, draw) if F > 1 and any(left.values()) else "t2v"
    return known_frames(kind, F, stride=stride, causal=causal)[:, None, None].expand(F, H, W)


def known_cells(kind: str, *, causal: bool) -> tuple[int, int]:
    """Latent frames that are given at the head and at the tail."""
    if kind not in END_KINDS:
        raise ConfigError(f"known: '{kind}' is no kind of given ends; choose one of {', '.join(END_KINDS)}")
    head, tail = (count + 1 if causal and count > 1 else count for count in END_KINDS[kind])
    return head, tail


def known_frames(kind: str, num_frames: int, *, stride: int, causal: bool) -> Tensor:
    """[F], 1 for the pixel frames that are given. A single image is no condition: of a still nothing is given."""
    known_F = torch.zeros(num_frames)
    if num_frames == 1:
        return known_F
    head, tail = (_pixel_frames(cells, stride, causal) for cells in known_cells(kind, causal=causal))
    if max(head, tail) >= num_frames:
        raise ConfigError(f"condition {kind}: needs more than {max(head, tail)} frames, the clip has {num_frames}")
    known_F[:head] = 1
    known_F[num_frames - tail :] = 1
    return known_F


def _pixel_frames(cells: int, stride: int, causal: bool) -> int:
    if cells <= 1:
        return cells
    return (cells - 1) * stride + 1 if causal else cells * stride


def usable_kinds(weights: Mapping[str, float], num_cells: int, *, causal: bool) -> dict[str, float]:
    """Without the kinds that would give a clip of `num_cells` latent frames as a whole, or more than it has."""
    return {kind: weight for kind, weight in weights.items() if max(_long(kind, causal)) < num_cells}


def _long(kind: str, causal: bool) -> tuple[int, int]:
    head, tail = known_cells(kind, causal=causal)
    return (head if head > 1 else 0), (tail if tail > 1 else 0)


def pick_kind(weights: Mapping[str, float], draw: float) -> str:
    """The kind that a uniform draw in [0, 1) falls on."""
    edges = list(accumulate(weights.values()))
    if not edges or edges[-1] <= 0:
        raise ConfigError(f"known: the shares are {dict(weights)}; one must be above 0")
    return list(weights)[min(bisect_right(edges, draw * edges[-1]), len(edges) - 1)]
