"""Python's garbage collector, on a schedule instead of when it likes.

Left alone, it stops a process for a moment whenever enough objects have been made, each process at another time, and
all others wait for it at the next collective. On a schedule all stop together, after the same step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def scheduled_garbage(every: int | None) -> Iterator[Callable[[int], bool]]:
    """Inside, cycles are collected only by the function that it gives, which is told each step that is done and says
    whether it collected. What is there at the start (modules, the model) is never looked at again until the end.

    None leaves the collector alone.
    """
    if every is None:
        yield lambda step: False
        return
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()

    def collect(step: int) -> bool:
        if step % every:
            return False
        gc.collect()
        return True

    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
