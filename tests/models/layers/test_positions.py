"""Rotary positions (angles, pairings, what a rotation preserves) and position tables, computed once per shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from frameloom.core.random import stream
from frameloom.models.layers.positions import PositionTables, axis_angles, grid_positions, rotary_table, rotate

CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "test rope"))


def products(q_BNHD: Tensor, k_BNHD: Tensor) -> Tensor:
    return torch.einsum("bnhd,bmhd->bhnm", q_BNHD, k_BNHD)


def test_the_last_axis_of_a_grid_runs_fastest() -> None:
    position = grid_positions([torch.tensor([0.0, 5.0]), torch.tensor([1.0, 2.0, 3.0])])
    assert position.tolist() == [[0, 1], [0, 2], [0, 3], [5, 1], [5, 2], [5, 3]]
    assert grid_positions([torch.arange(3)]).tolist() == [[0], [1], [2]]


def test_angles_fall_from_the_position_itself() -> None:
    angles = axis_angles(torch.tensor([3.0]), 8, 10_000.0)[0]
    torch.testing.assert_close(angles, 3.0 * torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert axis_angles(torch.tensor([3.0]), 8, precision=torch.float64).dtype == torch.float64


def test_a_table_has_the_pairs_of_each_axis_in_turn() -> None:
    table = rotary_table(torch.tensor([[2.0, 5.0]]), (2, 4))
    assert table.shape == (1, 1, 3) and table.dtype == torch.complex64
    torch.testing.assert_close(table[0, 0].angle(), torch.tensor([2.0, 5.0 - 2 * torch.pi, 0.05]))


@pytest.mark.parametrize("parts", [0, 1, 2, 3])
def test_products_depend_on_the_distance_alone(parts: int) -> None:
    q, k = draw(1, 1, 2, 12, seed=1).expand(-1, 6, -1, -1), draw(1, 1, 2, 12, seed=2).expand(-1, 6, -1, -1)
    table = rotary_table(torch.arange(6.0)[:, None], (12,), 100.0)
    scores = products(rotate(q, table, parts=parts), rotate(k, table, parts=parts))
    for distance in range(5):
        diagonal = scores.diagonal(distance, dim1=-2, dim2=-1)
        torch.testing.assert_close(diagonal, diagonal[..., :1].expand_as(diagonal))
    assert (scores[..., 0, 0] - scores[..., 0, 1]).abs().max() > 1e-2


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_pairings_are_one_function_of_reordered_channels(parts: int) -> None:
    q, k = draw(2, 5, 2, 12, seed=1), draw(2, 5, 2, 12, seed=2)
    table = rotary_table(draw(5, 1, seed=3), (12,), 100.0)
    # Where the channels of pair j of the pairwise form stand in the halved one.
    order = torch.arange(12).unflatten(0, (parts, 2, -1)).transpose(1, 2).flatten()
    halved = products(rotate(q, table, parts=parts), rotate(k, table, parts=parts))
    pairwise = products(rotate(q[..., order], table), rotate(k[..., order], table))
    torch.testing.assert_close(halved, pairwise)
    other = products(rotate(q, table), rotate(k, table))
    assert (halved - other).abs().max() > 1e-2


def test_rotation_is_done_in_float32() -> None:
    heads, table = draw(1, 5, 2, 12), rotary_table(torch.arange(5.0)[:, None], (12,))
    rounded = rotate(heads.bfloat16(), table)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, rotate(heads.bfloat16().float(), table))
    assert not torch.equal(rounded, rotate(heads, table))


class Counted:
    def __init__(self) -> None:
        self.made: list[tuple[tuple[int, int], int]] = []

    def __call__(self, grid: tuple[int, int], num_text: int) -> Tensor:
        self.made.append((grid, num_text))
        return torch.zeros(grid[0] * grid[1] + num_text)


def test_a_shape_is_computed_once() -> None:
    compute = Counted()
    tables = PositionTables(compute)
    first = tables.get((2, 2), 3, device=CPU)
    assert tables.get((2, 2), 3, device=CPU) is first
    assert tables.get((2, 2), 4, device=CPU) is not first
    assert compute.made == [((2, 2), 3), ((2, 2), 4)]


def test_only_the_latest_few_are_kept() -> None:
    compute = Counted()
    tables = PositionTables(compute)
    first = tables.get((1, 1), 0, device=CPU)
    for side in range(2, 1 + PositionTables.KEPT):
        tables.get((side, 1), 0, device=CPU)
    assert tables.get((1, 1), 0, device=CPU) is first
    for side in range(2, 2 + PositionTables.KEPT):
        tables.get((1, side), 0, device=CPU)
    assert tables.get((1, 1), 0, device=CPU) is not first


def test_a_table_made_while_sampling_is_no_inference_tensor() -> None:
    tables = PositionTables(Counted())
    with torch.inference_mode():
        table = tables.get((2, 2), 3, device=CPU)
        assert torch.zeros(1).is_inference()
    assert not table.is_inference()


def test_a_default_device_does_not_reach_the_computation() -> None:
    tables = PositionTables(Counted())
    with torch.device("meta"):
        assert tables.get((2, 2), 3, device=CPU).device == CPU
        assert torch.zeros(1).is_meta
    assert tables.get((2, 2), 3, device=torch.device("meta")).is_meta
