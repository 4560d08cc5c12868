"""Kernels in C++ for float32 on the processor: attention, the gradient of a weight, GELU, the norm of gradients.

The first two are products. torch's library for these, MKL, does without AVX-512 on processors that are not Intel's, and
its attention calls that library for many small ones; on Intel's nobody has measured ours yet, so they keep torch's. The
other two are single passes over numbers, for which torch takes several: they are for any processor with AVX2.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch  # noqa: F401 - brings the library for threads, which the kernels share with it

from frameloom.core.errors import ConfigError
from frameloom.core.host_cpu import has_avx2, mkl_is_foreign
from frameloom.core.native import load_native

CHOICE = "FRAMELOOM_KERNELS"
"""Of the environment: `all` takes every kernel, `torch` none; a run then has other last bits."""


def choose_kernels() -> tuple[bool, bool]:
    """Whether products are ours, and whether single passes are."""
    asked = os.environ.get(CHOICE) or "auto"
    if asked not in ("auto", "all", "torch"):
        raise ConfigError(f"{CHOICE} is {asked!r} in the environment; it must be auto, all or torch, or not be set")
    if asked != "auto":
        return asked == "all", asked == "all"
    return mkl_is_foreign() and has_avx2(), has_avx2()


_HAS_PRODUCTS, _HAS_PASSES = choose_kernels()


class Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "heads", "queries", "keys", "width")]


class Heads(ctypes.Structure):
    """Where the first number lies, and how far it is to the next one of each kind."""

    _fields_ = [("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row"))]


class Bias(ctypes.Structure):
    """What is added to the scores of the keys of each sample; nowhere if nothing is."""

    _fields_ = [("at", ctypes.c_void_p), ("batch", ctypes.c_int64)]


def wants_products() -> bool:
    """Whether attention and gradients of weights are ours, where there is a compiler."""
    return _HAS_PRODUCTS


def find_products() -> ctypes.CDLL | None:
    """The kernels, if attention and gradients of weights are theirs."""
    return load_kernels() if _HAS_PRODUCTS else None


def find_passes() -> ctypes.CDLL | None:
    """The kernels, if GELU and the norm of gradients are theirs."""
    return load_kernels() if _HAS_PASSES else None


@cache
def load_kernels() -> ctypes.CDLL | None:
    """None where there is no compiler."""
    kernels = load_native(Path(__file__).parent)
    if kernels is None:
        return None
    size, numbers, scale, threads = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_int
    for count in (kernels.count_forward_room, kernels.count_backward_room):
        count.argtypes, count.restype = (Sizes,), size
    kernels.attend.argtypes = (Sizes, *(Heads,) * 3, Bias, Heads, numbers, scale, numbers, threads)
    kernels.attend_backward.argtypes = (
        *(Sizes, *(Heads,) * 3, Bias, *(Heads,) * 2, numbers, scale),
        *(*(Heads,) * 3, numbers, threads),
    )
    kernels.count_product_room.argtypes, kernels.count_product_room.restype = (size, threads), size
    kernels.multiply_rows.argtypes = (numbers, size, numbers, size, numbers, size, size, size, numbers, threads)
    kernels.activate.argtypes = (numbers, numbers, numbers, size, size, threads)
    kernels.count_pieces.argtypes, kernels.count_pieces.restype = (numbers, size), size
    kernels.sum_squares.argtypes = (numbers, numbers, size, numbers, threads)
    for name in ("attend", "attend_backward", "multiply_rows", "activate", "sum_squares"):
        getattr(kernels, name).restype = None
    return kernels


def get_kernels() -> ctypes.CDLL:
    kernels = load_kernels()
    assert kernels is not None, "whoever calls this has asked whether there are any"
    return kernels
