"""Products in bf16 run on every processor, also where matrix tiles are announced and not described."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest
from frameloom.core.host_cpu import (
    announces_tiles,
    avoid_avx512_in_half,
    avoid_undescribed_tiles,
    describes_tiles,
    mkl_misses_avx512,
)

from frameloom.core import host_cpu
from frameloom.core.process_settings import ISA_LIMIT

PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); print(int((x @ x).sum()))"
AVOID = "from frameloom.core.host_cpu import avoid_undescribed_tiles; avoid_undescribed_tiles(); "
IS_X86_LINUX = platform.system() == "Linux" and platform.machine() == "x86_64"


def multiply(code: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != ISA_LIMIT}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_a_product_in_bf16_runs_on_this_machine() -> None:
    done = multiply(AVOID + PRODUCT)
    assert done.returncode == 0 and done.stdout.strip() == str(64**3)


@pytest.mark.skipif(not IS_X86_LINUX, reason="asks an x86 processor on Linux")
def test_without_care_it_dies_where_tiles_are_not_described() -> None:
    """The control; a machine that is in order needs no care."""
    is_broken = announces_tiles() and not describes_tiles()
    assert multiply(PRODUCT).returncode == (-signal.SIGILL if is_broken else 0)


@pytest.mark.skipif(not IS_X86_LINUX, reason="asks an x86 processor on Linux")
def test_the_processor_answers() -> None:
    assert 0 < host_cpu._ask_processor(0) < 0x100


@pytest.mark.parametrize(
    ("announced", "described", "before", "after"),
    [
        (True, False, None, "AVX512_CORE_FP16"),
        (True, True, None, None),
        (False, False, None, None),
        (True, False, "AVX2", "AVX2"),  # a person's own choice stays
    ],
)
def test_only_undescribed_tiles_are_avoided(
    monkeypatch: pytest.MonkeyPatch, announced: bool, described: bool, before: str | None, after: str | None
) -> None:
    monkeypatch.setattr(host_cpu, "announces_tiles", lambda: announced)
    monkeypatch.setattr(host_cpu, "describes_tiles", lambda: described)
    monkeypatch.setenv(ISA_LIMIT, before or "")
    if before is None:
        monkeypatch.delenv(ISA_LIMIT)
    avoid_undescribed_tiles()
    assert os.environ.get(ISA_LIMIT) == after


@pytest.mark.parametrize(
    ("has_avx512", "before", "after"),
    [(True, None, "AVX2"), (True, "AVX512_CORE_FP16", "AVX2"), (True, "SSE41", "SSE41"), (False, None, None)],
)
def test_half_precision_trains_without_avx512(
    monkeypatch: pytest.MonkeyPatch, has_avx512: bool, before: str | None, after: str | None
) -> None:
    monkeypatch.setattr(host_cpu, "has_avx512", lambda: has_avx512)
    monkeypatch.setenv(ISA_LIMIT, before or "")
    if before is None:
        monkeypatch.delenv(ISA_LIMIT)
    avoid_avx512_in_half()
    assert os.environ.get(ISA_LIMIT) == after


@pytest.mark.parametrize(
    ("vendor", "flags", "limit", "expected"),
    [
        ("AuthenticAMD", {"avx2", "avx512f"}, None, True),
        ("AuthenticAMD", {"avx2", "avx512f"}, "AVX2", False),  # oneDNN may not use it either
        ("AuthenticAMD", {"avx2"}, None, False),
        ("GenuineIntel", {"avx2", "avx512f"}, None, False),
        (None, {"avx512f"}, None, False),  # no x86: nothing is known of its maker
    ],
)
def test_mkl_misses_avx512_on_processors_of_others(
    monkeypatch: pytest.MonkeyPatch, vendor: str | None, flags: set[str], limit: str | None, expected: bool
) -> None:
    lines = {"vendor_id": frozenset({"vendor_id", ":", vendor} if vendor else ()), "flags": frozenset(flags)}
    monkeypatch.setattr(host_cpu, "_read_line", lines.__getitem__)
    monkeypatch.setenv(ISA_LIMIT, limit or "")
    if limit is None:
        monkeypatch.delenv(ISA_LIMIT)
    assert mkl_misses_avx512() is expected
