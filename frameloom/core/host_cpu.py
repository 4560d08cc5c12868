"""Instructions that libraries should not use on this processor, though it announces them."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from functools import cache
from pathlib import Path

from frameloom.core.log import get_logger

_log = get_logger(__name__)

# What oneDNN, torch's library for products in bf16, may use at most; it reads this once, before its first product.
ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_TILES = "AVX512_CORE_FP16"
_WITHOUT_AVX512 = "AVX2"

_TILE_PALETTES = 0x1D
_ASK = bytes.fromhex("53 89f8 31c9 0fa2 5b c3")  # push rbx; mov eax, edi; xor ecx, ecx; cpuid; pop rbx; ret


def avoid_undescribed_tiles() -> None:
    """Keep torch from the matrix tiles (AMX) of a processor that does not say how large they are.

    Some virtual machines announce tiles and hide their sizes. oneDNN then sets them up with no size at all, and the
    first product in bf16 ends the process with "Illegal instruction". To be called before torch computes anything.
    """
    if ISA_LIMIT in os.environ or not announces_tiles() or describes_tiles():
        return
    os.environ[ISA_LIMIT] = _WITHOUT_TILES
    _log.debug("this machine announces matrix tiles (AMX) without their sizes: products in bf16 do without them")


def avoid_avx512_in_half() -> None:
    """Keep training in half precision from oneDNN's code for AVX-512, before torch computes anything.

    Its gradients of small convolutions in bf16 read memory that nobody wrote: in torch 2.13, two of three passes of a
    tiny DC-AE came out with weights' gradients that were not numbers.
    """
    if has_avx512() and os.environ.get(ISA_LIMIT, _WITHOUT_TILES) == _WITHOUT_TILES:
        os.environ[ISA_LIMIT] = _WITHOUT_AVX512


def announces_tiles() -> bool:
    """Whether torch would use tiles here."""
    return "amx_bf16" in _read_line("flags")


def has_avx2() -> bool:
    return "avx2" in _read_line("flags")


def has_avx512() -> bool:
    return "avx512f" in _read_line("flags")


def mkl_misses_avx512() -> bool:
    """Whether MKL does without AVX-512, as on all processors but Intel's, where oneDNN uses it."""
    may_use = os.environ.get(ISA_LIMIT, _WITHOUT_TILES) == _WITHOUT_TILES
    return has_avx512() and may_use and mkl_is_foreign()


def mkl_is_foreign() -> bool:
    """Whether MKL, which is Intel's, runs on the x86 processor of another maker."""
    vendor = _read_line("vendor_id")
    return bool(vendor) and "GenuineIntel" not in vendor


def describe_cpu() -> str:
    """What code that was compiled for this processor depends on."""
    return " ".join((platform.machine(), platform.processor(), *sorted(_read_line("flags"))))


@cache
def _read_line(name: str) -> frozenset[str]:
    """What the processor announces, word by word; empty where nothing here depends on it."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((line for line in lines if line.startswith(name)), "").split())


def describes_tiles() -> bool:
    """Whether there is a palette of tile sizes."""
    return _ask_processor(0) >= _TILE_PALETTES and _ask_processor(_TILE_PALETTES) > 0


def _ask_processor(leaf: int) -> int:
    """The first register of the answer of the instruction `cpuid`."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_ASK)
    code = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return int(ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32)(code)(leaf))
