"""Where a token is: rotary tables, and tables that are added to tokens.

Both refer to a base grid of tokens, whatever the size of the clip:
- Rotary, one frame per token (5b): a clip's rows and columns are spread over the largest part of the base grid that has
  its aspect ratio, so positions are fractions for other sizes. Two frames per token (V1.5): plain whole numbers, and
  the base grid is the limit.
- Added (2b): the table of the base grid is stretched in height and width by linear interpolation between centres of
  cells; frames are counted from the first and end with the table.

Shape letters: F frames, H rows, W columns (of tokens), N = F * H * W, K text tokens, D width, P rotary pairs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.models.denoisers.cogvideox_fun.config import FAMILY_NAME, CogVideoXFunConfig

Grid = tuple[int, int, int]
THETA = 10_000.0


def token_grid(config: CogVideoXFunConfig, latent_FHW: tuple[int, int, int]) -> Grid:
    """Tokens along (frames, rows, columns) of a latent; ConfigError for one that the model cannot take."""
    frames, height, width = latent_FHW
    patch, patch_t = config.patch_size, config.patch_size_t
    where = f"{FAMILY_NAME} denoiser"
    if height % patch or width % patch:
        raise ConfigError(
            f"{where}: a latent of {height}x{width} cells cannot be cut into patches of {patch}x{patch}; choose a "
            f"resolution whose latent sides are multiples of {patch}"
        )
    if frames % patch_t and frames != 1:
        stride = config.temporal_compression_ratio
        lengths = ", ".join(str(1 + stride * (patch_t * count - 1)) for count in (1, 2, 3))
        raise ConfigError(
            f"{where}: {frames} latent frames, but patch_size_t {patch_t} takes one or a multiple of {patch_t}; choose "
            f"a clip of 1, {lengths}, ... frames"
        )
    grid = -(-frames // patch_t), height // patch, width // patch
    _refuse_beyond_base(config, grid, frames, where)
    return grid


def _refuse_beyond_base(config: CogVideoXFunConfig, grid: Grid, frames: int, where: str) -> None:
    base = config.base_grid
    if config.adds_positions and grid[0] > base[0]:
        raise ConfigError(
            f"{where}: {frames} latent frames, but its table of positions ends at {base[0]}; use clips of at most "
            f"{config.sample_frames} frames, or raise sample_frames"
        )
    if config.patch_size_t > 1 and (grid[1] > base[1] or grid[2] > base[2]):
        raise ConfigError(
            f"{where}: {grid[1]}x{grid[2]} patches are more than the {base[1]}x{base[2]} of its base grid; use a "
            "smaller resolution, or raise sample_height and sample_width"
        )


def fit_region(base_HW: tuple[int, int], grid_HW: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(top, left), (bottom, right) of the largest centred part of the base grid with the aspect ratio of the clip."""
    base_h, base_w = base_HW
    rows, columns = grid_HW
    if rows / columns > base_h / base_w:
        height, width = base_h, round(base_h / rows * columns)
    else:
        height, width = round(base_w / columns * rows), base_w
    top, left = round((base_h - height) / 2), round((base_w - width) / 2)
    return (top, left), (top + height, left + width)


def rotary_positions(config: CogVideoXFunConfig, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of frames, rows and columns."""
    frames, rows, columns = grid
    along_frames = torch.arange(frames, dtype=torch.float32)
    if config.patch_size_t > 1:
        return along_frames, torch.arange(rows, dtype=torch.float32), torch.arange(columns, dtype=torch.float32)
    (top, left), (bottom, right) = fit_region(config.base_grid[1:], (rows, columns))
    return along_frames, _spread(top, bottom, rows), _spread(left, right, columns)


def _spread(start: int, stop: int, count: int) -> Tensor:
    """`count` even steps from `start`; the last one ends at `stop`."""
    return (start + torch.arange(count, dtype=torch.float64) * ((stop - start) / count)).float()


def rotary_table(positions: tuple[Tensor, Tensor, Tensor], axes_dim: tuple[int, int, int], num_text: int = 0) -> Tensor:
    """Unit complex numbers [K + N, P], text first; text is not turned.

    A pair of channels (2j, 2j + 1) of a head is one complex number. Complex tables pass mixed-precision wrappers
    unrounded on their way into a block.
    """
    angles = [
        torch.outer(position, 1.0 / THETA ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        for position, dim in zip(positions, axes_dim, strict=True)
    ]
    angles_NP = torch.cat(spread_axes(*angles), dim=-1)
    table_NP = torch.complex(angles_NP.cos(), angles_NP.sin())
    text_KP = torch.ones(num_text, table_NP.shape[1], dtype=table_NP.dtype)
    return torch.cat([text_KP, table_NP])


def spread_axes(frames_FD: Tensor, rows_HD: Tensor, columns_WD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features of frames, of rows and of columns as features of tokens, [N, ...] each."""
    size = len(frames_FD), len(rows_HD), len(columns_WD)
    return (
        frames_FD[:, None, None].expand(*size, -1).flatten(0, 2),
        rows_HD[None, :, None].expand(*size, -1).flatten(0, 2),
        columns_WD[None, None, :].expand(*size, -1).flatten(0, 2),
    )


def sinusoid_axes(config: CogVideoXFunConfig, grid: Grid) -> list[Tensor]:
    """Features of frames [F, D/4], rows [H, 3D/8] and columns [W, 3D/8] to be added to tokens.

    The published code stretches a whole table of the base grid; since each feature varies along one axis only,
    stretching the three short ones gives the same numbers from a thousandth of the memory.
    """
    frames, rows, columns = grid
    _, base_rows, base_columns = config.base_grid
    frame_dim, side_dim = config.width // 4, config.width // 8 * 3
    scale = config.spatial_interpolation_scale
    return [
        _sinusoids(torch.arange(frames) / config.temporal_interpolation_scale, frame_dim),
        _stretch(_sinusoids(torch.arange(base_rows) / scale, side_dim), rows),
        _stretch(_sinusoids(torch.arange(base_columns) / scale, side_dim), columns),
    ]


def join_sinusoids(axes: list[Tensor]) -> Tensor:
    """[N, D]: features of the frame, then of the column, then of the row."""
    along_frames, along_rows, along_columns = spread_axes(*axes)
    return torch.cat([along_frames, along_columns, along_rows], dim=-1)


def _sinusoids(position_N: Tensor, dim: int) -> Tensor:
    """[N, dim]: sines, then cosines; computed in float64."""
    exponent = torch.arange(dim // 2, dtype=torch.float64) / (dim / 2)
    angles = torch.outer(position_N.double(), THETA**-exponent)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


def _stretch(table_ND: Tensor, count: int) -> Tensor:
    return F.interpolate(table_ND.T[None], size=count, mode="linear", align_corners=False)[0].T


def stretch_table(table_ND: Tensor, base: Grid, grid: Grid) -> Tensor:
    """A stored table [N, D] of the base grid for another grid: stretched in height and width, cut in frames."""
    if base[1:] == grid[1:]:
        return table_ND[: grid[0] * grid[1] * grid[2]]
    cells_1DFHW = torch.unflatten(table_ND, 0, base).permute(3, 0, 1, 2)[None, :, : grid[0]]
    return F.interpolate(cells_1DFHW, size=grid, mode="trilinear", align_corners=False)[0].flatten(1).T


class PositionTables:
    """Tables of one model, computed once per shape on the host; the few latest are kept on their device."""

    KEPT = 8

    def __init__(self, compute: Callable[[Grid, int], list[Tensor]]) -> None:
        self._compute = compute
        self._tables: OrderedDict[tuple[Grid, int, torch.device], list[Tensor]] = OrderedDict()

    def get(self, grid: Grid, num_text: int, device: torch.device) -> list[Tensor]:
        key = (grid, num_text, device)
        if key not in self._tables:
            # A table made while sampling must also serve training, which refuses inference-mode tensors.
            with torch.inference_mode(False), torch.device("cpu"):
                self._tables[key] = [table.to(device) for table in self._compute(grid, num_text)]
            if len(self._tables) > self.KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]
