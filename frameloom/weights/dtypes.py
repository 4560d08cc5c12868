"""The table of dtypes: names in torch, in safetensors and in recipes, and sizes. Importing it loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class DType(NamedTuple):
    torch_name: str
    num_bytes: int


# By safetensors' names and in its library's order, which puts the last ones first into a file.
SAFETENSORS_DTYPES: dict[str, DType] = {
    "BOOL": DType("bool", 1),
    "U8": DType("uint8", 1),
    "I8": DType("int8", 1),
    "F8_E5M2": DType("float8_e5m2", 1),
    "F8_E4M3": DType("float8_e4m3fn", 1),
    "F8_E8M0": DType("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": DType("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": DType("float8_e5m2fnuz", 1),
    "I16": DType("int16", 2),
    "U16": DType("uint16", 2),
    "F16": DType("float16", 2),
    "BF16": DType("bfloat16", 2),
    "I32": DType("int32", 4),
    "U32": DType("uint32", 4),
    "F32": DType("float32", 4),
    "C64": DType("complex64", 8),
    "F64": DType("float64", 8),
    "I64": DType("int64", 8),
    "U64": DType("uint64", 8),
}
# By the names of recipes and commands.
DTYPES = {
    "fp32": SAFETENSORS_DTYPES["F32"],
    "bf16": SAFETENSORS_DTYPES["BF16"],
    "fp16": SAFETENSORS_DTYPES["F16"],
}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a recipe's name (fp32) or of safetensors' (F32)."""
    import torch

    dtype: torch.dtype = getattr(torch, (DTYPES.get(name) or SAFETENSORS_DTYPES[name]).torch_name)
    return dtype
