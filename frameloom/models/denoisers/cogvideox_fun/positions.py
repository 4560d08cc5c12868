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

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.models.denoisers.cogvideox_fun.config import WHERE, CogVideoXFunConfig
from frameloom.models.layers.patches import Grid, token_grid
from frameloom.models.layers.rope import grid_positions, rotary_table
from frameloom.models.layers.sinusoids import embed_position


def find_grid(config: CogVideoXFunConfig, latent_FHW: tuple[int, int, int]) -> Grid:
    """Tokens along (frames, rows, columns) of a latent; ConfigError for one that the model cannot take."""
    frames, rows, columns = token_grid(latent_FHW, config.patch_size, where=WHERE)
    patch_t = config.patch_size_t
    if frames % patch_t and frames != 1:
        stride = config.temporal_compression_ratio
        lengths = ", ".join(str(1 + stride * (patch_t * count - 1)) for count in (1, 2, 3))
        raise ConfigError(
            f"{WHERE}: {frames} latent frames, but patch_size_t {patch_t} takes one or a multiple of {patch_t}; choose "
            f"a clip of 1, {lengths}, ... frames"
        )
    grid = -(-frames // patch_t), rows, columns
    _refuse_beyond_base(config, grid, frames)
    return grid


def _refuse_beyond_base(config: CogVideoXFunConfig, grid: Grid, frames: int) -> None:
    base = config.base_grid
    if config.adds_positions and grid[0] > base[0]:
        raise ConfigError(
            f"{WHERE}: {frames} latent frames, but its table of positions ends at {base[0]}; use clips of at most "
            f"{config.sample_frames} frames, or raise sample_frames"
        )
    if config.patch_size_t > 1 and (grid[1] > base[1] or grid[2] > base[2]):
        raise ConfigError(
            f"{WHERE}: {grid[1]}x{grid[2]} patches are more than the {base[1]}x{base[2]} of its base grid; use a "
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


def turn_table(config: CogVideoXFunConfig, grid: Grid, num_text: int = 0) -> Tensor:
    """The rotary table [K + N, 1, P], text first; at position 0, text is not turned."""
    position_N3 = grid_positions(rotary_positions(config, grid))
    return rotary_table(F.pad(position_N3, (0, 0, num_text, 0)), config.axes_dim)


def spread_axes(frames_FD: Tensor, rows_HD: Tensor, columns_WD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features of frames, of rows and of columns as features of tokens, [N, ...] each."""
    size = len(frames_FD), len(rows_HD), len(columns_WD)
    return (
        frames_FD[:, None, None].expand(*size, -1).flatten(0, 2),
        rows_HD[None, :, None].expand(*size, -1).flatten(0, 2),
        columns_WD[None, None, :].expand(*size, -1).flatten(0, 2),
    )


def axis_sinusoids(config: CogVideoXFunConfig, axis: int, count: int) -> Tensor:
    """Features to be added to tokens: [F, D/4] of frames (axis 0), [H, 3D/8] of rows, [W, 3D/8] of columns.

    The published code stretches a whole table of the base grid; since each feature varies along one axis only,
    stretching the three short ones gives the same numbers from a thousandth of the memory.
    """
    if axis == 0:
        return embed_position(torch.arange(count) / config.temporal_interpolation_scale, config.width // 4)
    position = torch.arange(config.base_grid[axis]) / config.spatial_interpolation_scale
    return _stretch(embed_position(position, config.width // 8 * 3), count)


def join_sinusoids(axes: Sequence[Tensor]) -> Tensor:
    """[N, D]: features of the frame, then of the column, then of the row."""
    along_frames, along_rows, along_columns = spread_axes(*axes)
    return torch.cat([along_frames, along_columns, along_rows], dim=-1)


def _stretch(table_ND: Tensor, count: int) -> Tensor:
    return F.interpolate(table_ND.T[None], size=count, mode="linear", align_corners=False)[0].T


def stretch_table(table_ND: Tensor, base: Grid, grid: Grid) -> Tensor:
    """A stored table [N, D] of the base grid for another grid: stretched in height and width, cut in frames."""
    if base[1:] == grid[1:]:
        return table_ND[: grid[0] * grid[1] * grid[2]]
    cells_1DFHW = torch.unflatten(table_ND, 0, base).permute(3, 0, 1, 2)[None, :, : grid[0]]
    return F.interpolate(cells_1DFHW, size=grid, mode="trilinear", align_corners=False)[0].flatten(1).T
