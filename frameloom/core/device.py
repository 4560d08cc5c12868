"""The device of a run, and settings of the whole process: CPU instructions, host memory, garbage collection."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from frameloom.core.errors import ConfigError
from frameloom.core.logging import get_logger

if TYPE_CHECKING:
    import torch

_log = get_logger(__name__)

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MAX_ARENAS = -1, -3, -8
# The largest threshold that glibc accepts; larger blocks are always mapped by themselves.
_MAX_HEAP_BLOCK = 32 << 20
_MAX_FREE_HEAP = 1 << 30

ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
"""The newest instructions that oneDNN may use; it reads this variable once, before its first operation."""
_UP_TO_AVX512 = "AVX512_CORE_FP16"
_UP_TO_AVX2 = "AVX2"


def pick_device(name: str) -> torch.device:
    """`auto`: the first accelerator, else the CPU. A process computing on the CPU keeps the memory that it frees."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"train.device: '{name}' is not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"train.device: '{name}' asked for, but PyTorch sees no CUDA device; use auto or cpu")
    if device.type == "cpu":
        keep_freed_memory()
        avoid_amx_in_virtual_machines()
    return device


def keep_freed_memory() -> None:
    """Keep up to a gigabyte of freed blocks in the process instead of returning them to the system (glibc only).

    A training or sampling step frees and allocates the same blocks again and again. Blocks that are returned in between
    are mapped and zeroed anew: a training step of the demo on two busy cores then spends 5 to 10 ms in the system
    instead of 1 to 2, and tiny models sample up to 1.8 times slower. All threads share one arena, because arenas of
    single threads are returned whenever they are empty.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MAX_ARENAS, 1)
        libc.mallopt(_MMAP_THRESHOLD, _MAX_HEAP_BLOCK)
        libc.mallopt(_TRIM_THRESHOLD, _MAX_FREE_HEAP)


def avoid_amx_in_virtual_machines() -> None:
    """Keep oneDNN from matrix tiles (AMX) on a virtual machine; call it before torch computes anything.

    Some virtual machines announce AMX and hide the sizes of its tiles. oneDNN then configures tiles of no size, and the
    first product in bf16 ends the process with "Illegal instruction". The system does not say which machines these
    are, so all virtual machines do without AMX. A limit that is set already stays.
    """
    if ISA_LIMIT not in os.environ and {"amx_bf16", "hypervisor"} <= read_cpuinfo("flags"):
        os.environ[ISA_LIMIT] = _UP_TO_AVX512
        _log.debug("this virtual machine announces AMX: products in bf16 do without it, set %s to change it", ISA_LIMIT)


def avoid_avx512_in_half_precision() -> None:
    """Keep oneDNN from AVX-512 while a run trains in half precision; call it before torch computes anything.

    Its gradients of small convolutions in bf16 read uninitialised memory: with torch 2.13, two of three passes of a
    tiny DC-AE have weight gradients that are not finite. A lower limit that is set already stays.
    """
    if onednn_may_use_avx512():
        os.environ[ISA_LIMIT] = _UP_TO_AVX2


def onednn_may_use_avx512() -> bool:
    return has_avx512() and os.environ.get(ISA_LIMIT, _UP_TO_AVX512) == _UP_TO_AVX512


def has_avx512() -> bool:
    return "avx512f" in read_cpuinfo("flags")


@cache
def read_cpuinfo(name: str) -> frozenset[str]:
    """The words of a line of /proc/cpuinfo, such as `flags`; empty on anything but x86 Linux."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((line for line in lines if line.startswith(name)), "").split())


@contextmanager
def without_collector() -> Iterator[None]:
    """No garbage collection inside the block: work that makes many objects and no cycles saves a fifth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
