"""Noise levels in strata."""

from __future__ import annotations

import pytest

from frameloom.core.errors import ConfigError
from frameloom.diffusion.timesteps import level_in_stratum, level_range


@pytest.mark.parametrize(("world_size", "width"), [(1, 1000), (2, 500), (3, 1000), (8, 125), (16, 125), (6, 500)])
def test_parts_are_equal_and_cover_all_levels(world_size: int, width: int) -> None:
    ranges = [level_range(rank, world_size, 1000) for rank in range(world_size)]
    assert {len(part) for part in ranges} == {width}
    assert set().union(*ranges) == set(range(1000))


def test_ranks_outside_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        level_range(2, 2, 1000)


def test_strata_are_equally_likely_everywhere() -> None:
    levels = [level_in_stratum(draw / 500, stratum, 4, 1000) for stratum in range(4) for draw in range(500)]
    assert min(levels) == 0 and max(levels) == 999
    assert max(abs(level - 250 * (place // 500) - (place % 500) / 2) for place, level in enumerate(levels)) <= 1
