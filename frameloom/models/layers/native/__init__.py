"""Kernels in C++ for float32 on the processor: attention, the gradient of a weight, GELU, the norm of gradients.

torch's library for products, MKL, does without AVX-512 on processors that are not Intel's, and its attention calls that
library for many small products. These kernels use the whole width of vectors that a processor has.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch  # noqa: F401 - brings the library for threads, which the kernels share with it

from frameloom.core.host_cpu import mkl_is_foreign
from frameloom.core.native import load_native

_ARE_FASTER = mkl_is_foreign()


class Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "heads", "queries", "keys", "width")]


class Heads(ctypes.Structure):
    """Where the first number lies, and how far it is to the next one of each kind."""

    _fields_ = [("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row"))]


class Bias(ctypes.Structure):
    """What is added to the scores of the keys of each sample; nowhere if nothing is."""

    _fields_ = [("at", ctypes.c_void_p), ("batch", ctypes.c_int64)]


def are_faster() -> bool:
    """Than torch's own, as far as we know."""
    return _ARE_FASTER


def find_kernels() -> ctypes.CDLL | None:
    """None where torch's own are as fast, or where there is no compiler."""
    return load_kernels() if are_faster() else None


@cache
def load_kernels() -> ctypes.CDLL | None:
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
    assert kernels is not None, "whoever calls this has asked `find_kernels` before"
    return kernels
