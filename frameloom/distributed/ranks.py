"""Rank and world size of this process, as torchrun sets them; one process alone is rank 0 of 1."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from frameloom.core.errors import ConfigError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def by_groups(self, size: int) -> Ranks:
        """The place of this rank's group, where `size` neighbours make one."""
        return Ranks(self.rank // size, self.num_ranks // size, self.local_rank)

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Every `num_ranks`-th item; the shares of all ranks hold each item once."""
        return list(items[self.rank :: self.num_ranks])


def read_ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """From RANK, WORLD_SIZE and LOCAL_RANK; ConfigError when they contradict each other."""
    values = os.environ if environment is None else environment
    texts = [values.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))]
    if not all(text.isdecimal() for text in texts) or not int(texts[0]) < int(texts[1]):
        raise ConfigError(
            f"RANK is '{texts[0]}', WORLD_SIZE '{texts[1]}' and LOCAL_RANK '{texts[2]}' in the environment; a rank is "
            "a number below the world size: start several processes with torchrun, or unset these variables"
        )
    return Ranks(*map(int, texts))
