"""Blocks that a step frees stay with the process and are used again."""

from __future__ import annotations

import subprocess
import sys

import pytest

_COUNT = """
from pathlib import Path
import torch
from frameloom.core.host_memory import keep_freed_memory, return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def left_behind():
    before = resident()
    tensors = [torch.ones(1 << 20) for _ in range(10)]
    del tensors
    return resident() - before

return_freed_memory(1 << 16)
given_back = left_behind()
keep_freed_memory()
kept = left_behind()
# Where the first blocks lie is luck, so the second round may need some more.
print(given_back, kept, [left_behind() for _ in range(4)][-1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_blocks_are_kept_and_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=True, timeout=120)
    given_back, kept, kept_more = (int(word) / 2**20 for word in done.stdout.split())
    assert given_back < 5  # of 40 MiB
    assert kept > 30
    assert kept_more < 5
