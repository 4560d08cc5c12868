"""Conditioning masks: which pixels and frames of a clip are known, for inpainting and image-to-video training.

Shape letters: F frames, H height, W width.

A mask is [F, H, W], 1 where a pixel is known and 0 where it must be made, as a family's `pack_known` takes it.
`draw_region_mask` has the ten kinds of CogVideoX-Fun, regions in space and stretches of frames; `draw_frame_mask` the
six of Open-Sora-Plan 1.3, whole frames only. Every number comes from a `Dice`, so that a sample's mask follows from
its own random stream.

`draw_end_mask` has the kinds of Open-Sora 2.0, frames at both ends. Lengths of these kinds are latent frames; a causal
autoencoder has one more in a long stretch, because its first frame stands alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.diffusion.mask_kinds import (
    CLIP_SHARES,
    END_KINDS,
    FRAME_SHARES,
    IMAGE_FRAME_SHARES,
    IMAGE_SHARES,
    FrameKind,
    RegionKind,
)

_MOST_END_FRAMES = 4


def draw_region_mask(
    shape_FHW: tuple[int, int, int], dice: Dice, shares: Mapping[RegionKind, float] | None = None
) -> tuple[Tensor, RegionKind]:
    """A mask [F, H, W], and its kind. Shares default to CogVideoX-Fun's for a clip or for a single image."""
    if shares is None:
        shares = IMAGE_SHARES if shape_FHW[0] == 1 else CLIP_SHARES
    if shape_FHW[0] == 1 and not IMAGE_SHARES.keys() >= shares.keys():
        raise ConfigError(f"masks: an image has the kinds {', '.join(IMAGE_SHARES)}; found {', '.join(shares)}")
    kind = list(shares)[dice.kind(list(shares.values()))]
    return _draw_unknown(shape_FHW, kind, dice).bitwise_xor_(1), kind


def draw_frame_mask(
    shape_FHW: tuple[int, int, int],
    dice: Dice,
    shares: Mapping[FrameKind, float] | None = None,
    *,
    known_share: tuple[float, float] = (0.0, 1.0),
) -> tuple[Tensor, FrameKind]:
    """A mask of whole frames, and its kind; `known_share` bounds what "continuation" and "scattered frames" give."""
    F, H, W = shape_FHW
    if shares is None:
        shares = IMAGE_FRAME_SHARES if F == 1 else FRAME_SHARES
    kind = list(shares)[dice.kind(list(shares.values()))]
    known = torch.zeros(F, H, W, dtype=torch.uint8)
    if kind in ("continuation", "scattered frames"):
        count = dice.frame(math.floor(F * known_share[0]), math.ceil(F * known_share[1]) + 1)
        known[slice(count) if kind == "continuation" else dice.some_of(F, count)] = 1
    else:
        given = {"all": [], "head": [0], "ends": [0, F - 1], "none": list(range(F))}
        known[given[kind]] = 1
    return known, kind


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


def usable_kinds(weights: Mapping[str, float], num_cells: int, *, causal: bool) -> dict[str, float]:
    """Without the kinds that would give a clip of `num_cells` latent frames as a whole, or more than it has."""
    return {kind: weight for kind, weight in weights.items() if max(_long(kind, causal)) < num_cells}


def pick_kind(weights: Mapping[str, float], draw: float) -> str:
    """The kind that a uniform draw in [0, 1) falls on."""
    edges = list(accumulate(weights.values()))
    if not edges or edges[-1] <= 0:
        raise ConfigError(f"known: the shares are {dict(weights)}; one must be above 0")
    return list(weights)[min(bisect_right(edges, draw * edges[-1]), len(edges) - 1)]


def _pixel_frames(cells: int, stride: int, causal: bool) -> int:
    if cells <= 1:
        return cells
    return (cells - 1) * stride + 1 if causal else cells * stride


def _long(kind: str, causal: bool) -> tuple[int, int]:
    head, tail = known_cells(kind, causal=causal)
    return (head if head > 1 else 0), (tail if tail > 1 else 0)


def _draw_unknown(shape_FHW: tuple[int, int, int], kind: RegionKind, dice: Dice) -> Tensor:
    """1 where a pixel must be made."""
    F, H, W = shape_FHW
    unknown = torch.zeros(F, H, W, dtype=torch.uint8)
    if kind == "all":
        unknown.fill_(1)
    elif kind in ("head", "ends"):
        known = dice.frame(1, _MOST_END_FRAMES + 1)
        unknown[known : -known if kind == "ends" else None] = 1
    elif kind in ("rectangle", "moment"):
        rows, columns = _draw_rectangle(H, W, dice)
        frames = slice(dice.frame(0, F // 2), dice.frame(F // 2, F)) if kind == "moment" else slice(None)
        unknown[frames, rows, columns] = 1
    elif kind == "pixels":
        unknown = dice.pixels((F, H, W))
    elif kind == "blocks":
        for frame in dice.some_of(F, dice.block(1, max(F // 2, 1) + 1)):
            height, width = dice.block(1, H // 4 + 1), dice.block(1, W // 4 + 1)
            top, left = dice.block(0, H - height + 1), dice.block(0, W - width + 1)
            unknown[frame, top : top + height, left : left + width] = 1
    elif kind in ("ellipse", "disc"):
        unknown[:] = _draw_ellipse(H, W, dice, is_disc=kind == "disc")
    else:
        unknown[[dice.chance() > 0.5 for _ in range(F)]] = 1
    return unknown


def _draw_rectangle(height: int, width: int, dice: Dice) -> tuple[slice, slice]:
    """From a quarter to three quarters of each side, around any point, cut at the border."""
    column, row = dice.cell(0, width), dice.cell(0, height)
    half_width = dice.cell(width // 4, width // 4 * 3) // 2
    half_height = dice.cell(height // 4, height // 4 * 3) // 2
    return (
        slice(max(row - half_height, 0), min(row + half_height, height)),
        slice(max(column - half_width, 0), min(column + half_width, width)),
    )


def _draw_ellipse(height: int, width: int, dice: Dice, *, is_disc: bool) -> Tensor:
    """Half axes from an eighth to a quarter of the shorter side, around any point."""
    column, row = dice.cell(0, width), dice.cell(0, height)
    shorter = min(height, width)
    across = dice.cell(shorter // 8, shorter // 4)
    down = across if is_disc else dice.cell(shorter // 8, shorter // 4)
    rows = (torch.arange(height, dtype=torch.float64)[:, None] - row) / max(down, 1)
    columns = (torch.arange(width, dtype=torch.float64) - column) / max(across, 1)
    return rows.square() + columns.square() < 1


class Dice(Protocol):
    """Where a mask's numbers come from. Ranges are [low, high); a method says what its number is for."""

    def kind(self, shares: Sequence[float]) -> int: ...
    def cell(self, low: int, high: int) -> int: ...
    def frame(self, low: int, high: int) -> int: ...
    def block(self, low: int, high: int) -> int: ...
    def some_of(self, total: int, count: int) -> list[int]: ...
    def chance(self) -> float: ...
    def pixels(self, shape: tuple[int, ...]) -> Tensor: ...


@dataclass(frozen=True)
class StreamDice:
    """All numbers from one generator, that of a sample."""

    generator: torch.Generator

    def kind(self, shares: Sequence[float]) -> int:
        # In float64, so that equal shares get equal numbers of the generator's values.
        weights = torch.tensor(shares, dtype=torch.float64)
        edges = torch.cumsum(weights / weights.sum(), dim=0)
        return min(int(torch.searchsorted(edges, self.chance(), right=True)), len(shares) - 1)

    def cell(self, low: int, high: int) -> int:
        return int(torch.randint(low, max(high, low + 1), (), generator=self.generator))

    frame = cell
    block = cell

    def some_of(self, total: int, count: int) -> list[int]:
        order: list[int] = torch.randperm(total, generator=self.generator).tolist()
        return order[:count]

    def chance(self) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))

    def pixels(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, 2, shape, dtype=torch.uint8, generator=self.generator)
