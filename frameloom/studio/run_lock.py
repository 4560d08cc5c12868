"""Who holds a run's folder, told without touching its lock: a look must never be in the way of a run that starts."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

_HOLDER = re.compile(r"process (\d{1,9}) on (\S{1,255})")
_LOCKS = Path("/proc/locks")
# A run on another machine cannot be asked; one that wrote something this lately counts as running.
_FRESH_S = 300.0


@dataclass(frozen=True)
class Holder:
    pid: int
    host: str
    is_here: bool
    """on this machine"""


def find_holder(run: Path) -> Holder | None:
    """The process that trains in a folder now; the words of a dead process in the lock count for nothing."""
    lock = run / "lock"
    try:
        text = lock.read_text(encoding="utf-8", errors="replace")
        inode = lock.stat().st_ino
    except OSError:
        return None
    match = _HOLDER.match(text)
    if match is None:
        return None
    pid, host = int(match[1]), match[2]
    if host != socket.gethostname():
        return Holder(pid, host, is_here=False) if _is_fresh(run) else None
    return Holder(pid, host, is_here=True) if is_alive(pid) and _is_locked(inode, pid) else None


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # a system without /proc
    return status.rpartition(")")[2].split()[:1] != ["Z"]


def _is_locked(inode: int, pid: int) -> bool:
    """Whether the system knows of such a lock; where it does not tell, the living process is believed."""
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return True
    words = [line.split() for line in lines if " FLOCK " in line]
    return any(len(word) > 5 and word[4] == str(pid) and word[5].endswith(f":{inode}") for word in words)


def _is_fresh(run: Path) -> bool:
    try:
        return time.time() - (run / "metrics.jsonl").stat().st_mtime < _FRESH_S
    except OSError:
        return False
