"""Attention over few keys as products of batches of small matrices, for processors on which that is faster.

torch's fused kernel for CPUs multiplies one small matrix after the other with MKL, which takes a microsecond for each
on processors that are not Intel's, however small it is. On an AMD EPYC, forward and backward of attention along 4
frames take a third of its time this way, over 64 tokens five to nine tenths. On an Intel Xeon, where they took
0.8 to 1.4 times as long, and with more keys, whose scores would take more memory than the tokens, the kernel stays.

Shape letters: B batch, H heads, G = B * H, N queries, M keys, D head width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from frameloom.core.host_cpu import mkl_is_foreign
from frameloom.models.layers.linear import is_plain

_IS_FASTER = mkl_is_foreign()
# Queries and keys at most, and how many keys for each channel of a head: scores are kept for the backward pass.
_MOST_QUERIES, _MOST_KEYS, _MOST_PER_CHANNEL = 256, 64, 2


def is_short(q_BHND: Tensor, k_BHMD: Tensor) -> bool:
    """Whether `attend_shortly` is for these: plain numbers, few keys, and not very many queries."""
    num_queries, num_keys, width = q_BHND.shape[2], *k_BHMD.shape[2:]
    is_small = num_queries <= _MOST_QUERIES and num_keys <= min(_MOST_KEYS, _MOST_PER_CHANNEL * width)
    return _IS_FASTER and is_small and is_plain(q_BHND)


def attend_shortly(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, scale: float | None = None) -> Tensor:
    """Attention without a mask, within rounding of torch's; the tokens of the result lie in one piece."""
    scale = q_BHND.shape[3] ** -0.5 if scale is None else scale
    return cast(Tensor, _ShortAttention.apply(q_BHND, k_BHMD, v_BHMD, scale))  # type: ignore[no-untyped-call]


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, scale: float) -> Tensor:
        q_GND, k_GMD, v_GMD = (heads.flatten(0, 1) for heads in (q_BHND, k_BHMD, v_BHMD))
        share_GNM = torch.softmax(_scaled_product(q_GND, k_GMD.mT, scale), dim=-1)
        ctx.save_for_backward(q_GND, k_GMD, v_GMD, share_GNM)
        ctx.num_heads, ctx.scale = q_BHND.shape[1], scale
        made_BHND = torch.unflatten(torch.bmm(share_GNM, v_GMD), 0, (-1, ctx.num_heads))
        return made_BHND.transpose(1, 2).contiguous().transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHND: Tensor) -> tuple[Tensor | None, ...]:
        q_GND, k_GMD, v_GMD, share_GNM = ctx.saved_tensors
        grad_GND = grad_BHND.flatten(0, 1)
        needs_q, needs_k, needs_v, _ = ctx.needs_input_grad
        grad_q = grad_k = grad_v = None
        if needs_v:
            grad_v = torch.bmm(share_GNM.mT, grad_GND)
        if needs_q or needs_k:
            grad_GNM = torch.bmm(grad_GND, v_GMD.mT)
            # What a score gains is what its share gains beyond the mean of the row.
            grad_GNM = torch._softmax_backward_data(grad_GNM, share_GNM, -1, grad_GNM.dtype)
            grad_q = _scaled_product(grad_GNM, k_GMD, ctx.scale) if needs_q else None
            grad_k = _scaled_product(grad_GNM.mT, q_GND, ctx.scale) if needs_k else None
        found = (
            None if each is None else torch.unflatten(each, 0, (-1, ctx.num_heads)) for each in (grad_q, grad_k, grad_v)
        )
        return (*found, None)


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Products of a batch of matrices, multiplied by `scale` on the way."""
    nothing = left.new_empty(()).expand(len(left), left.shape[1], right.shape[2])
    return torch.baddbmm(nothing, left, right, beta=0, alpha=scale)
