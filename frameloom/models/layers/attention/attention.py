"""Scaled dot-product attention behind one function, the only caller of the kernels.

Shape letters: B batch, H heads, N queries, M keys, S tokens of a rank, D head width, W = H * D width, P rotary pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.distributed.sequence_parallel import ALONE, SequenceGroup
from frameloom.models.layers.linear import Linear
from frameloom.models.layers.positions import rotate

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def attend(
    q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, mask: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    """Softmax attention; `mask` broadcasts to [B, H, N, M], either bool (True is attended to) or added to the scores.

    Where nothing is masked, the package flash-attn takes over on CUDA in half precision, if it is installed; PyTorch's
    own choice of kernels serves everything else.
    """
    if mask is None and _can_flash(q_BHND):
        return _flash(q_BHND, k_BHMD, v_BHMD, scale)
    return F.scaled_dot_product_attention(q_BHND, k_BHMD, v_BHMD, attn_mask=mask, scale=scale)


def attend_tokens(q_BNHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same for heads as projections give them; the heads of the result are joined again, [B, N, W]."""
    q, k, v = (heads.transpose(1, 2) for heads in (q_BNHD, k_BMHD, v_BMHD))
    return attend(q, k, v, mask).transpose(1, 2).flatten(2)


class RotaryAttention(nn.Module):
    """Attention of heads that are turned by their position; `parts` says which channels are a pair (see `rotate`).

    It has no parameters. In a sequence group a rank gives the heads of its own tokens and gets these back; the rotary
    table and the mask are those of the whole sequence. With `whole` all tokens that see each other are on each rank.
    """

    def __init__(self, *, parts: int = 0, whole: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.whole = whole
        self.sequence: SequenceGroup = ALONE

    def forward(
        self,
        q_BNHD: Tensor,
        k_BMHD: Tensor,
        v_BMHD: Tensor,
        rope_N1P: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        if self.sequence.degree > 1 and not self.whole:
            assert rope_N1P is not None, "in a sequence group the table says how many tokens there are"
            return self._attend_parts(q_BNHD, k_BMHD, v_BMHD, rope_N1P, mask)
        if rope_N1P is not None:
            # Norms give float32 under autocast, and rotation always does; attention wants one precision for all three.
            q_BNHD, k_BMHD = (rotate(x, rope_N1P, parts=self.parts).type_as(v_BMHD) for x in (q_BNHD, k_BMHD))
        return attend_tokens(q_BNHD, k_BMHD, v_BMHD, mask)

    def _attend_parts(
        self, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, rope: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The same in a sequence group. A table without pairs (`count_table`) turns nothing."""
        if rope.shape[-1]:
            own_rope = self.sequence.split(rope, dim=-3)
            q_BSHD, k_BSHD = (rotate(x, own_rope, parts=self.parts).type_as(v_BSHD) for x in (q_BSHD, k_BSHD))
        q, k, v = self.sequence.exchange_heads(q_BSHD, k_BSHD, v_BSHD)
        num_keys = rope.shape[-3]  # behind them are those that only fill up the last parts
        return self.sequence.exchange_tokens(attend_tokens(q, k[:, :num_keys], v[:, :num_keys], mask))


class Attention(nn.Module):
    """Linear layers into the heads of queries, keys and values, `attend` between these, and a layer back."""

    def __init__(
        self, width: int, num_heads: int, *, bias: bool = True, attend: Callable[..., Tensor] = attend_tokens
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q = Linear(width, width, bias=bias)
        self.to_k = Linear(width, width, bias=bias)
        self.to_v = Linear(width, width, bias=bias)
        self.to_out = nn.Sequential(Linear(width, width))
        self.attend = attend

    def forward(self, x_BNW: Tensor, context_BMW: Tensor, *inputs: Tensor | None) -> Tensor:
        """`inputs` of `attend`: a mask, a rotary table."""
        attended: Tensor = self.to_out(self.attend(*self.project(x_BNW, context_BMW), *inputs))
        return attended

    def project(self, x_BNW: Tensor, context_BMW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads [B, tokens, H, D] of queries from `x` and of keys and values from `context`."""
        q, k, v = self.to_q(x_BNW), self.to_k(context_BMW), self.to_v(context_BMW)
        q, k, v = (torch.unflatten(part, -1, (self.num_heads, -1)) for part in (q, k, v))
        return q, k, v


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
