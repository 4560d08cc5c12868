"""The share of a process, and what torchrun tells it."""

from __future__ import annotations

import pytest

from frameloom.core.errors import ConfigError
from frameloom.distributed.ranks import Ranks, read_ranks


def test_shares_hold_every_item_once() -> None:
    items = list(range(11))
    shares = [Ranks(rank, 3).share(items) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert Ranks(0, 1).share(items) == items


def test_a_process_alone_is_the_first_of_one() -> None:
    assert read_ranks({}) == Ranks(0, 1, 0) and read_ranks({}).is_first
    told = read_ranks({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert told == Ranks(5, 8, 1) and not told.is_first


@pytest.mark.parametrize("wrong", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x"}, {"RANK": "-1"}])
def test_contradictions_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        read_ranks(wrong)
