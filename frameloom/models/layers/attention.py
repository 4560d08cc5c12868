"""Scaled dot-product attention through one door, so that a faster kernel, a trace or a parallel scheme has one place.

Shape letters: B batch, H heads, N queries, M keys, D head width.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def attend(
    q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, mask: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    """Softmax attention; `mask` broadcasts to [B, H, N, M], either bool (True may be looked at) or added to the scores.

    The package flash-attn takes over on CUDA in half precision where it is installed and nothing is masked; PyTorch's
    own choice of kernels serves everything else.
    """
    if mask is None and _can_flash(q_BHND):
        return _flash(q_BHND, k_BHMD, v_BHMD, scale)
    return F.scaled_dot_product_attention(q_BHND, k_BHMD, v_BHMD, attn_mask=mask, scale=scale)


def _can_flash(q_BHND: Tensor) -> bool:
    return q_BHND.is_cuda and q_BHND.dtype in _FLASH_DTYPES and q_BHND.shape[-1] <= 256 and _has_flash()


@lru_cache(maxsize=1)
def _has_flash() -> bool:
    return find_spec("flash_attn") is not None


def _flash(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, scale: float | None) -> Tensor:
    from flash_attn import flash_attn_func

    parts: list[Any] = [part.transpose(1, 2) for part in (q_BHND, k_BHMD, v_BHMD)]
    attended: Tensor = flash_attn_func(*parts, softmax_scale=scale)
    return attended.transpose(1, 2)
