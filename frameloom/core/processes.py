"""How processes that we start end."""

from __future__ import annotations

import ctypes
import signal
import sys

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in prctl.h


def end_with_parent() -> None:
    """Have the system kill this process when the one that started it ends, in whatever way (only on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
