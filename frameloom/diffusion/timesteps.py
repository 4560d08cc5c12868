"""Drawing noise levels in strata: each process, or each sample of a step, draws from its own part of all levels.

Over the processes of a step the levels are then spread evenly, which makes the loss of a step less noisy.
"""

from __future__ import annotations

from frameloom.core.errors import ConfigError


def level_range(rank: int, world_size: int, num_levels: int) -> range:
    """The levels that a process draws from in CogVideoX-Fun's `uniform_sampling`.

    Neighbouring processes share a part until the number of parts divides `num_levels`: 3 processes and 1000 levels are
    one part.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"noise levels: rank {rank} of {world_size} processes; ranks are 0 to {world_size - 1}")
    sharing = next(
        count
        for count in range(1, world_size + 1)
        if world_size % count == 0 and num_levels % (world_size // count) == 0
    )
    width = num_levels // (world_size // sharing)
    return range(rank // sharing * width, (rank // sharing + 1) * width)


def level_in_stratum(draw: float, stratum: int, num_strata: int, num_levels: int) -> int:
    """The level of a uniform draw in [0, 1) within one of equal strata, rounded to the nearest level.

    This is Open-Sora-Plan 1.3.1's rule, where the stratum is the rank.
    """
    low = stratum * num_levels / num_strata - 0.5
    high = (stratum + 1) * num_levels / num_strata - 0.5
    return round(low + (high - low) * draw)
