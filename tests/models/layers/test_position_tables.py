"""Tables are computed once per shape and device, on the host, and bounded in number."""

from __future__ import annotations

import torch
from torch import Tensor

from frameloom.models.layers.positions import PositionTables

CPU = torch.device("cpu")


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
