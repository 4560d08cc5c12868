"""CogVideoX-Fun: positions at published sizes, and shapes that they rule out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.models.denoisers.base import build_fresh
from frameloom.models.denoisers.cogvideox_fun.config import SIZES, CogVideoXFunConfig
from frameloom.models.denoisers.cogvideox_fun.model import (
    CogVideoXFunTransformer,
    axis_sinusoids,
    fit_region,
    join_sinusoids,
    stretch_table,
    turn_table,
)
from frameloom.models.layers.patches import Grid

NARROW = replace(SIZES["2b"], num_attention_heads=1, attention_head_dim=32)


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def added_table(config: CogVideoXFunConfig, grid: Grid) -> Tensor:
    return join_sinusoids([axis_sinusoids(config, axis, count) for axis, count in enumerate(grid)])


def token_at(table: Tensor, grid: Grid) -> Tensor:
    """Frame 1, row 2, column 3."""
    return table[(1 * grid[1] + 2) * grid[2] + 3]


@pytest.mark.parametrize(
    ("rows_columns", "expected"),
    [
        ((30, 45), [0.841471, 0.540302, 0.999574, 0.875595, 1.0]),
        ((32, 32), [0.841471, 0.540302, 0.681951, 0.818222, 1.0]),
        ((24, 42), [0.841471, 0.540302, 0.961156, 0.953082, 1.0]),
        ((16, 16), [0.841471, 0.540302, -0.933315, 0.773036, 1.0]),
    ],
)
def test_added_positions_of_2b_are_the_published_ones(rows_columns: tuple[int, int], expected: list[float]) -> None:
    grid = (2, *rows_columns)
    row = token_at(added_table(SIZES["2b"], grid), grid)
    assert row.shape == (1920,)
    torch.testing.assert_close(row[[0, 240, 480, 1200, 1919]], torch.tensor(expected), atol=2e-6, rtol=0)


@pytest.mark.parametrize("grid", [(13, 30, 45), (13, 32, 32), (4, 24, 42), (1, 16, 16)])
def test_stretching_axes_is_stretching_the_whole_table(grid: Grid) -> None:
    base = NARROW.base_grid
    assert base == (13, 30, 45)
    whole = added_table(NARROW, base)
    ours = added_table(NARROW, grid)
    assert difference(ours, stretch_table(whole, base, grid)) <= 1e-6
    cells = whole.reshape(*base, -1).permute(3, 0, 1, 2)[None]
    published = F.interpolate(cells, size=(13, *grid[1:]), mode="trilinear", align_corners=False)
    published = published[0].flatten(1).T[: grid[0] * grid[1] * grid[2]]
    assert difference(ours, published) <= 1e-6
    wider = added_table(replace(NARROW, sample_height=2 * grid[1], sample_width=2 * grid[2]), grid)
    # Computing a table anew for the size instead of stretching is another function, except at the base grid.
    assert (difference(wider, ours) > 0.1) == (grid[1:] != base[1:])


@pytest.mark.parametrize(
    ("size", "rows_columns", "cos", "sin"),
    [
        (
            "5b",
            (32, 32),
            [0.540302, 1.0, -0.299534, 1.0, -0.182053, 0.999997],
            [0.841471, 0.000316, 0.954086, 0.000404, -0.983289, 0.002329],
        ),
        ("5b-1.5", (24, 42), [0.540302, 1.0, -0.416147, 1.0, -0.989992, 1.0], None),
    ],
)
def test_rotary_positions_are_the_published_ones(
    size: str, rows_columns: tuple[int, int], cos: list[float], sin: list[float] | None
) -> None:
    grid, config = (2, *rows_columns), SIZES[size]
    pairs = token_at(turn_table(config, grid), grid)[0]
    channels = pairs.repeat_interleave(2)[[0, 15, 16, 39, 40, 63]]
    torch.testing.assert_close(channels.real, torch.tensor(cos), atol=2e-6, rtol=0)
    if sin is not None:
        torch.testing.assert_close(channels.imag, torch.tensor(sin), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("grid", "region"),
    [
        ((30, 45), ((0, 0), (30, 45))),
        ((32, 32), ((0, 8), (30, 38))),
        ((24, 42), ((2, 0), (28, 45))),
        ((45, 30), ((0, 12), (30, 32))),
    ],
)
def test_a_clip_covers_the_largest_part_of_the_base_grid(
    grid: tuple[int, int], region: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    assert fit_region((30, 45), grid) == region


def test_text_is_not_turned() -> None:
    config = SIZES["5b"]
    table = turn_table(config, (2, 30, 45), num_text=226)
    assert table.shape == (226 + 2 * 30 * 45, 1, 32)
    assert (table[:226] == 1).all()
    assert not (table[226:] == 1).all()


@pytest.mark.parametrize(
    ("size", "latent", "message"),
    [
        ("2b", (14, 60, 90), "14 latent frames, but its table of positions ends at 13; use clips of at most 49"),
        ("5b", (13, 61, 90), "61x90 cells cannot be cut into patches of 2x2"),
        ("5b-1.5", (3, 48, 84), "takes one or a multiple of 2; choose a clip of 1, 5, 13, 21, ... frames"),
        ("5b-1.5", (2, 386, 84), "193x42 patches are more than the 192x340"),
    ],
)
def test_a_latent_that_a_model_cannot_take_is_refused(size: str, latent: Grid, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SIZES[size].token_grid(latent)


@pytest.mark.parametrize(
    ("size", "latent", "num_tokens"),
    [
        ("2b", (13, 64, 64), 13_312),
        ("5b", (25, 48, 84), 25 * 24 * 42),
        ("5b", (1, 128, 128), 4096),
        ("5b-1.5", (22, 48, 84), 11 * 24 * 42),
        ("5b-1.5", (1, 48, 84), 24 * 42),
    ],
)
def test_sizes_of_buckets_are_taken(size: str, latent: Grid, num_tokens: int) -> None:
    assert SIZES[size].num_tokens(latent) == num_tokens


def test_added_positions_need_the_whole_text() -> None:
    config = replace(NARROW, num_layers=1, time_embed_dim=8, context_in_dim=8, in_channels=4)
    latent, index = torch.zeros(1, 4, 1, 4, 4), torch.zeros(1)
    model = build_fresh(CogVideoXFunTransformer, config)
    assert model(latent, index, {"text": torch.zeros(1, 226, 8)}).shape == latent.shape
    with pytest.raises(ConfigError, match="set the text encoder's max_length to 226"):
        model(latent, index, {"text": torch.zeros(1, 77, 8)})


def test_a_learned_table_starts_from_sinusoids() -> None:
    config = replace(SIZES["tiny"], use_learned_positional_embeddings=True)
    table = build_fresh(CogVideoXFunTransformer, config).patch_embed.pos_embedding[0]
    assert not table[:226].any()
    assert torch.equal(table[226:], added_table(config, config.base_grid))
