"""Freed blocks stay with the process; products in bf16 run on every processor, also where AMX is announced in vain."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from frameloom.core import device
from frameloom.core.device import (
    ISA_LIMIT,
    avoid_amx_in_virtual_machines,
    avoid_avx512_in_half_precision,
    onednn_may_use_avx512,
)

PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); print(int((x @ x).sum()))"
AVOID = "from frameloom.core.device import avoid_amx_in_virtual_machines as avoid; avoid(); "
COUNT = """
import sys
from pathlib import Path
import torch
from frameloom.core.device import keep_freed_memory

if "keep" in sys.argv:
    keep_freed_memory()

def left_behind():
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    before = resident()
    tensors = [torch.ones(1 << 20) for _ in range(10)]
    del tensors
    return resident() - before

# Where the first blocks lie is luck, so later rounds may need some more.
print(*[left_behind() for _ in range(5)])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_blocks_are_kept_and_used_again() -> None:
    # Blocks of 4 MiB each; by itself glibc's threshold grows with them, so the control pins it.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    found = {}
    for word in ("keep", "not"):
        command = [sys.executable, "-c", COUNT, word]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
        found[word] = [int(count) / 2**20 for count in done.stdout.split()]
    assert found["keep"][0] > 30 and found["keep"][-1] < 5  # of 40 MiB
    assert max(found["not"]) < 5


def test_a_product_in_bf16_runs_on_this_machine() -> None:
    env = {name: value for name, value in os.environ.items() if name != ISA_LIMIT}
    done = subprocess.run([sys.executable, "-c", AVOID + PRODUCT], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == str(64**3)


def be_on(monkeypatch: pytest.MonkeyPatch, flags: set[str], limit: str | None) -> None:
    monkeypatch.setattr(device, "read_cpuinfo", lambda name: frozenset(flags if name == "flags" else ()))
    monkeypatch.setenv(ISA_LIMIT, limit or "")
    if limit is None:
        monkeypatch.delenv(ISA_LIMIT)


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({"amx_bf16", "hypervisor"}, None, "AVX512_CORE_FP16"),
        ({"amx_bf16"}, None, None),
        ({"hypervisor"}, None, None),
        ({"amx_bf16", "hypervisor"}, "AVX2", "AVX2"),  # a limit that is set stays
    ],
)
def test_only_virtual_machines_that_announce_amx_do_without_it(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], before: str | None, after: str | None
) -> None:
    be_on(monkeypatch, flags, before)
    avoid_amx_in_virtual_machines()
    assert os.environ.get(ISA_LIMIT) == after


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({"avx512f"}, None, "AVX2"),
        ({"avx512f"}, "AVX512_CORE_FP16", "AVX2"),
        ({"avx512f"}, "SSE41", "SSE41"),
        ({"avx2"}, None, None),
    ],
)
def test_half_precision_trains_without_avx512(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], before: str | None, after: str | None
) -> None:
    be_on(monkeypatch, flags, before)
    assert onednn_may_use_avx512() == (after == "AVX2")
    avoid_avx512_in_half_precision()
    assert os.environ.get(ISA_LIMIT) == after
    assert not onednn_may_use_avx512()
