"""Conditioning masks: which pixels and frames of a clip are known, for inpainting and image-to-video.

Shape letters: B batch, F frames, H height, W width.

A mask is [F, H, W], 1 where a pixel is known and 0 where it must be made. `draw_region_mask` has the ten kinds of
CogVideoX-Fun, regions in space and stretches of frames; `draw_frame_mask` the six of Open-Sora-Plan 1.3, whole frames
only. Every number comes from a `MaskRandom`, so that a sample's mask follows from its own random stream.

`draw_end_mask` has the kinds of Open-Sora 2.0, frames at both ends. Lengths of these kinds are latent frames; a causal
autoencoder has one more in a long stretch, because its first frame stands alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool3d

from frameloom.core.errors import ConfigError
from frameloom.diffusion.tables import (
    CLIP_SHARES,
    END_KINDS,
    END_SHARES,
    FRAME_SHARES,
    IMAGE_FRAME_SHARES,
    IMAGE_SHARES,
    FrameKind,
    RegionKind,
)

_MOST_END_FRAMES = 4


def draw_mask(
    kinds: str,
    shape_FHW: tuple[int, int, int],
    random: MaskRandom,
    shares: Mapping[str, float] | None,
    *,
    known_share: tuple[float, float],
    stride: int,
    causal: bool,
) -> Tensor:
    """A mask of one of the `kinds`: "regions", "frames" or "ends"; without shares, as often as they are published."""
    own: Any = shares or None
    if kinds == "regions":
        return draw_region_mask(shape_FHW, random, own)[0]
    if kinds == "frames":
        return draw_frame_mask(shape_FHW, random, own, known_share=known_share)[0]
    return draw_end_mask(shape_FHW, random.chance(), own or END_SHARES, stride=stride, causal=causal)


def draw_region_mask(
    shape_FHW: tuple[int, int, int], random: MaskRandom, shares: Mapping[RegionKind, float] | None = None
) -> tuple[Tensor, RegionKind]:
    """A mask [F, H, W], and its kind. Shares default to CogVideoX-Fun's for a clip or for a single image."""
    if shares is None:
        shares = IMAGE_SHARES if shape_FHW[0] == 1 else CLIP_SHARES
    if shape_FHW[0] == 1 and not IMAGE_SHARES.keys() >= shares.keys():
        raise ConfigError(f"masks: an image has the kinds {', '.join(IMAGE_SHARES)}; found {', '.join(shares)}")
    kind = list(shares)[random.kind(list(shares.values()))]
    return _draw_unknown(shape_FHW, kind, random).bitwise_xor_(1), kind


def draw_frame_mask(
    shape_FHW: tuple[int, int, int],
    random: MaskRandom,
    shares: Mapping[FrameKind, float] | None = None,
    *,
    known_share: tuple[float, float] = (0.0, 1.0),
) -> tuple[Tensor, FrameKind]:
    """A mask of whole frames, and its kind; `known_share` bounds what "continuation" and "scattered frames" give."""
    F, H, W = shape_FHW
    if shares is None:
        shares = IMAGE_FRAME_SHARES if F == 1 else FRAME_SHARES
    kind = list(shares)[random.kind(list(shares.values()))]
    known = torch.zeros(F, H, W, dtype=torch.uint8)
    if kind in ("continuation", "scattered frames"):
        count = random.frame(math.floor(F * known_share[0]), math.ceil(F * known_share[1]) + 1)
        known[slice(count) if kind == "continuation" else random.some_of(F, count)] = 1
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
    cells = known_cells(kind, causal=causal)
    head, tail = (count if count <= 1 else (count - causal) * stride + causal for count in cells)
    if max(head, tail) >= num_frames:
        raise ConfigError(f"condition {kind}: needs more than {max(head, tail)} frames, the clip has {num_frames}")
    known_F[:head] = 1
    known_F[num_frames - tail :] = 1
    return known_F


def usable_kinds(weights: Mapping[str, float], num_cells: int, *, causal: bool) -> dict[str, float]:
    """Without the kinds that would give a clip of `num_cells` latent frames as a whole, or more than it has."""
    # A single frame never counts as the whole.
    stretches = {kind: [cells for cells in known_cells(kind, causal=causal) if cells > 1] for kind in weights}
    return {kind: weight for kind, weight in weights.items() if max(stretches[kind], default=0) < num_cells}


def pick_kind(weights: Mapping[str, float], draw: float) -> str:
    """The kind that a uniform draw in [0, 1) falls on."""
    edges = list(accumulate(weights.values()))
    if not edges or edges[-1] <= 0:
        raise ConfigError(f"known: the shares are {dict(weights)}; one must be above 0")
    return list(weights)[min(bisect_right(edges, draw * edges[-1]), len(edges) - 1)]


def _draw_unknown(shape_FHW: tuple[int, int, int], kind: RegionKind, random: MaskRandom) -> Tensor:
    """1 where a pixel must be made."""
    F, H, W = shape_FHW
    unknown = torch.zeros(F, H, W, dtype=torch.uint8)
    if kind == "all":
        unknown.fill_(1)
    elif kind in ("head", "ends"):
        known = random.frame(1, _MOST_END_FRAMES + 1)
        unknown[known : -known if kind == "ends" else None] = 1
    elif kind in ("rectangle", "moment"):
        rows, columns = _draw_rectangle(H, W, random)
        frames = slice(random.frame(0, F // 2), random.frame(F // 2, F)) if kind == "moment" else slice(None)
        unknown[frames, rows, columns] = 1
    elif kind == "pixels":
        unknown = random.pixels((F, H, W))
    elif kind == "blocks":
        for frame in random.some_of(F, random.block(1, max(F // 2, 1) + 1)):
            height, width = random.block(1, H // 4 + 1), random.block(1, W // 4 + 1)
            top, left = random.block(0, H - height + 1), random.block(0, W - width + 1)
            unknown[frame, top : top + height, left : left + width] = 1
    elif kind in ("ellipse", "disc"):
        unknown[:] = _draw_ellipse(H, W, random, is_disc=kind == "disc")
    else:
        unknown[[random.chance() > 0.5 for _ in range(F)]] = 1
    return unknown


def _draw_rectangle(height: int, width: int, random: MaskRandom) -> tuple[slice, slice]:
    """From a quarter to three quarters of each side, around any point, cut at the border."""
    column, row = random.cell(0, width), random.cell(0, height)
    half_width = random.cell(width // 4, width // 4 * 3) // 2
    half_height = random.cell(height // 4, height // 4 * 3) // 2
    return (
        slice(max(row - half_height, 0), min(row + half_height, height)),
        slice(max(column - half_width, 0), min(column + half_width, width)),
    )


def _draw_ellipse(height: int, width: int, random: MaskRandom, *, is_disc: bool) -> Tensor:
    """Half axes from an eighth to a quarter of the shorter side, around any point."""
    column, row = random.cell(0, width), random.cell(0, height)
    shorter = min(height, width)
    across = random.cell(shorter // 8, shorter // 4)
    down = across if is_disc else random.cell(shorter // 8, shorter // 4)
    rows = (torch.arange(height, dtype=torch.float64)[:, None] - row) / max(down, 1)
    columns = (torch.arange(width, dtype=torch.float64) - column) / max(across, 1)
    return rows.square() + columns.square() < 1


class MaskRandom:
    """Numbers of a mask, from the generator of a sample; ranges are [low, high). A method says what its number is."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

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


def find_known_cells(known_B1FHW: Tensor, strides: tuple[int, int, int], *, causal: bool) -> Tensor:
    """1 for the latent cells of which every pixel is known; a causal autoencoder's first frame is a cell by itself."""
    stride = strides[0]
    known = known_B1FHW.float()
    if causal:
        known = torch.cat([known[:, :, :1].expand(-1, -1, stride - 1, -1, -1), known], dim=2)
    elif known.shape[2] % stride:
        known = known[:, :, -1:].expand(-1, -1, stride, -1, -1)
    return -max_pool3d(-known, kernel_size=strides, stride=strides)


def is_at_ends(known_FHW: Tensor) -> bool:
    """Whether whole frames at the head and the tail of a clip are known, and nothing else."""
    known_F = known_FHW.flatten(1).float().mean(1)
    if not bool(((known_F == 0) | (known_F == 1)).all()):
        return False
    # Known, then unknown, then known again: at most two changes, and none from unknown at both ends.
    changes = int((known_F[1:] != known_F[:-1]).sum())
    return changes <= 1 or (changes == 2 and bool(known_F[0] == 1))
