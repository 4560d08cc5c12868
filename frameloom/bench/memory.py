"""The memory that a piece of work takes at its peak, beyond what was there before it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

from frameloom.core.host_memory import return_freed_memory

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MAPPED_BYTES = 1 << 16


def can_measure() -> bool:
    """Linux with glibc tells the peak of a process, and lets it be set back."""
    return sys.platform == "linux" and _RESET.exists() and hasattr(ctypes.CDLL(None), "malloc_trim")


def measure_peak_bytes(work: Callable[[], object]) -> int:
    """Growth of resident memory at its peak, kernels' scratch space included. Measure times before, not after:
    from here on large blocks go back to the system when they are freed, which makes peaks exact and allocation slow."""
    return_freed_memory(_MAPPED_BYTES)
    work()  # what a first call sets up for good does not count
    return_freed_memory(_MAPPED_BYTES)
    _RESET.write_text("5")  # sets the peak back to what is resident now
    before = _read("VmRSS:")
    work()
    return max(0, _read("VmHWM:") - before)


def _read(name: str) -> int:
    words = _STATUS.read_text().split()
    return int(words[words.index(name) + 1]) * 1024
