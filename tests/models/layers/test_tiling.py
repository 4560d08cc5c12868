"""B batch, C channels, F frames, H height, W width."""

from __future__ import annotations

import weakref

import pytest
import torch

from frameloom.core.random import stream
from frameloom.models.layers.tiles import Cuts, Tiles
from frameloom.models.layers.tiling import fade, run_in_cuts, run_in_spans, run_in_tiles

SAME = Tiles(size=8, stride=6, keep=6, blend=2)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=stream(0, "tiling", *shape), dtype=torch.float64)


def published_blend(rows: list[list[torch.Tensor]], height: Tiles, width: Tiles) -> torch.Tensor:
    """The published loops: every tile in memory, mixed in place, cell by cell."""
    for i, row in enumerate(rows):
        for j, tile in enumerate(row):
            if i:
                above = rows[i - 1][j]
                extent = min(above.shape[3], tile.shape[3], height.blend)
                for y in range(extent):
                    share = y / extent
                    tile[..., y, :] = above[..., y - extent, :] * (1 - share) + tile[..., y, :] * share
            if j:
                before = row[j - 1]
                extent = min(before.shape[4], tile.shape[4], width.blend)
                for x in range(extent):
                    share = x / extent
                    tile[..., x] = before[..., x - extent] * (1 - share) + tile[..., x] * share
    kept = [torch.cat([tile[..., : height.keep, : width.keep] for tile in row], dim=4) for row in rows]
    return torch.cat(kept, dim=3)


@pytest.mark.parametrize("size", [(20, 15), (8, 9), (13, 30), (6, 25)])
def test_tiles_equal_the_published_loops(size):
    x = draw(1, 2, 2, *size)
    height, width = SAME, Tiles(size=9, stride=5, keep=5, blend=4)

    def wobble(tile):
        return tile * tile.mean() + torch.linspace(0, 1, tile.shape[4], dtype=tile.dtype)

    rows = [
        [wobble(x[..., top : top + 8, left : left + 9]).clone() for left in range(0, size[1], 5)]
        for top in range(0, size[0], 6)
    ]
    ours = run_in_tiles(wobble, x, height, width)
    assert (ours - published_blend(rows, height, width)).abs().max() < 1e-6
    assert (ours - wobble(x)).abs().max() > 1e-3


def test_layers_that_do_not_care_about_tiles_give_the_whole():
    # The last tile is as long as what fades, so it lies where its neighbour ends.
    x = draw(1, 1, 14, 14, 14)
    tiled = run_in_tiles(lambda tile: 2 * tile, x, SAME, SAME)
    assert torch.allclose(tiled, 2 * x, atol=1e-6)
    assert torch.allclose(run_in_spans(lambda span: 2 * span, x, SAME), 2 * x, atol=1e-6)


def test_spans_of_a_causal_model_start_from_a_frame_that_only_the_first_keeps():
    x = draw(1, 1, 15, 1, 1)
    seen = []

    def keep(span):
        seen.append(span.shape[2])
        return span

    assert torch.allclose(run_in_spans(keep, x, SAME, lead=1), x, atol=1e-6)
    assert seen == [9, 9, 3]
    seen.clear()
    assert torch.allclose(run_in_spans(keep, x[:, :, :13], SAME, lead=1), x[:, :, :13], atol=1e-6)
    assert seen == [9, 7]  # a third one would hold nothing but the frame that is dropped


def test_a_fade_starts_with_the_old_and_ends_before_the_new():
    old, new = torch.zeros(1, 1, 1, 1, 6), torch.ones(1, 1, 1, 1, 6)
    assert torch.equal(fade(old, new, 4, dim=4).flatten(), torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.0]))
    assert fade(old, new, 0, dim=4) is new
    half = fade(old.bfloat16(), new.bfloat16(), 3, dim=4)
    assert half.dtype == torch.bfloat16


def test_tiles_are_freed_as_soon_as_their_strips_are_copied():
    alive: list[weakref.ref] = []
    most = 0

    def watch(tile):
        nonlocal most
        out = tile.clone()
        most = max(most, sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(out))
        return out

    run_in_tiles(watch, draw(1, 1, 1, 50, 50), SAME, SAME)
    run_in_spans(watch, draw(1, 1, 50, 1, 1), SAME)
    assert len(alive) == 81 + 9
    assert most <= 1


def test_gradients_pass_through_the_seams():
    x = draw(1, 1, 1, 14, 14).requires_grad_()
    run_in_tiles(lambda tile: tile, x, SAME, SAME).sum().backward()
    assert torch.allclose(x.grad, torch.ones_like(x), atol=1e-6)


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("size", [(5, 20, 15), (8, 8, 8), (9, 8, 9), (20, 6, 25), (25, 7, 8)])
def test_pieces_are_listed_as_the_layers_see_them(size: tuple[int, int, int], lead: int) -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape[2:]))
        return x

    cuts = Cuts(space=(SAME, SAME), time=SAME, lead=lead)
    run_in_cuts(look, draw(2, 1, *size), cuts)
    assert sorted(cuts.list_pieces(size)) == sorted(seen)
    assert Cuts().list_pieces(size) == [size]


@pytest.mark.parametrize(("overlap", "cells"), [(0.0, 4), (0.25, 3), (0.5, 2), (0.75, 1), (0.1, 3), (0.3, 2), (0.7, 1)])
def test_tiles_overlap_by_any_share_in_whole_latent_cells(overlap: float, cells: int) -> None:
    """As the published roundings say where they fit each other; else tiles are so many whole `cells` apart."""
    encoded, decoded = (Tiles.overlapping(32, overlap, compression=8, decoding=flag) for flag in (False, True))
    assert encoded == Tiles(size=32, stride=8 * cells, keep=cells, blend=4 - cells)
    assert decoded == Tiles(size=4, stride=cells, keep=8 * cells, blend=8 * (4 - cells))
    if (4 * overlap).is_integer():
        assert (encoded.stride, decoded.blend) == (int(32 * (1 - overlap)), int(32 * overlap))
