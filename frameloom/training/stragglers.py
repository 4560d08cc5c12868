"""Straggler detection: each rank measures its own work, and every few steps all compare.

Work is what a rank does before it waits for others. With sharded weights (zero 2 and 3) the passes themselves wait, so
only what comes before them is compared: reading and waiting for data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from frameloom.core.logging import get_logger
from frameloom.distributed.context import Collective

_log = get_logger(__name__)

EVERY = 8
"""steps between two comparisons"""
_TIMES_SLOWER = 2.0
_LEAST_S = 0.02
"""a step; below this, noise of the machine decides"""


class StragglerMonitor:
    """Seconds of work in each step of this process since the last comparison."""

    def __init__(self, context: Collective, device: torch.device) -> None:
        self._context, self._device = context, device
        self._steps_s: list[float] = []
        self._since: float | None = None
        self._named: set[int] = set()

    def begin(self) -> None:
        """The step is over; what comes now is work of this process."""
        self._since = time.perf_counter()

    def wait(self) -> None:
        """From here on this process waits for others. A second call in a step counts for nothing."""
        if self._since is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the host runs ahead of its device; it would wait for it anyway
        self._steps_s.append(time.perf_counter() - self._since)
        self._since = None

    def compare(self, step: int) -> None:
        """All processes call this in every step; after each `EVERY` of them the first names who is slow."""
        if step % EVERY:
            return
        # The median: a step after which files were written or samples drawn does not count.
        own_s = median(self._steps_s) if self._steps_s else 0.0
        times_s = self._context.all_gather(own_s)
        self._steps_s.clear()
        slow = find_slow(times_s) if self._context.is_first else {}
        for rank in sorted(slow.keys() - self._named):
            _log.warning(
                "step %d: rank %d works %.2f s a step, the others %.2f s, and all wait for it; look at its device, its "
                "disk and what else runs there",
                step,
                rank,
                times_s[rank],
                slow[rank],
            )
        self._named = set(slow)


def find_slow(times_s: Sequence[float]) -> dict[int, float]:
    """Ranks that take at least twice as long as the others, with the median of the others."""
    found = {}
    for rank, own_s in enumerate(times_s):
        others_s = median([*times_s[:rank], *times_s[rank + 1 :]])
        if own_s > _LEAST_S and own_s > _TIMES_SLOWER * others_s:
            found[rank] = others_s
    return found
