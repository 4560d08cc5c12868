"""Attention in float32 on the processor by a kernel of our own (`native/attention.cpp`), where that is faster.

torch's kernel multiplies with MKL, which on processors that are not Intel's does without AVX-512 and takes long for
the first number of each product. On an AMD EPYC ours takes a tenth to a quarter less time for forward and backward.
Its numbers are those of torch's kernel within rounding, and so is its memory.

Shape letters: B batch, H heads, N queries, M keys, D head width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from frameloom.models.layers.linear import is_plain
from frameloom.models.layers.native import Heads, Sizes, find_kernels, get_kernels

# Queries and keys from which the packing of a head pays.
_LEAST_QUERIES = _LEAST_KEYS = 96


def has_kernel_for(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor) -> bool:
    """Whether `attend_on_host` is for these: plain numbers, not few of them, and nobody has forbidden fused kernels."""
    if not (q_BHND.shape[2] >= _LEAST_QUERIES and k_BHMD.shape[2] >= _LEAST_KEYS and q_BHND.numel()):
        return False
    is_usual = k_BHMD.shape == v_BHMD.shape and k_BHMD.shape[:2] == q_BHND.shape[:2]
    may_fuse: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]  # of the host, too
    return may_fuse and is_usual and all(map(is_plain, (q_BHND, k_BHMD, v_BHMD))) and find_kernels() is not None


def attend_on_host(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, scale: float | None = None) -> Tensor:
    """Attention without a mask; the tokens of the result lie in one piece."""
    scale = q_BHND.shape[3] ** -0.5 if scale is None else scale
    return cast(Tensor, _HostAttention.apply(q_BHND, k_BHMD, v_BHMD, scale))  # type: ignore[no-untyped-call]


class _HostAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, scale: float) -> Tensor:
        heads = [_with_rows(part) for part in (q_BHND, k_BHMD, v_BHMD)]
        made_BHND, levels_BHN = torch.ops.frameloom.attend(*heads, scale)
        ctx.save_for_backward(*heads, made_BHND, levels_BHN)
        ctx.scale = scale
        return cast(Tensor, made_BHND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHND: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.frameloom.attend_backward(_with_rows(grad_BHND), *ctx.saved_tensors, ctx.scale)
        return (*grads, None)


def _attend(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What is made of the values, and for each query the logarithm of its weights' sum, for the way back."""
    kernels, sizes = get_kernels(), _tell_sizes(q_BHND, k_BHMD)
    made_BHND, levels_BHN = _make_like(q_BHND), q_BHND.new_empty(q_BHND.shape[:3])
    room, threads = _find_room(kernels.count_forward_room(sizes))
    heads = map(_point_to, (q_BHND, k_BHMD, v_BHMD, made_BHND))
    kernels.attend(sizes, *heads, levels_BHN.data_ptr(), scale, room.data_ptr(), threads)
    return made_BHND, levels_BHN


def _attend_backward(
    grad_BHND: Tensor,
    q_BHND: Tensor,
    k_BHMD: Tensor,
    v_BHMD: Tensor,
    made_BHND: Tensor,
    levels_BHN: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    kernels, sizes = get_kernels(), _tell_sizes(q_BHND, k_BHMD)
    grads = tuple(_make_like(part) for part in (q_BHND, k_BHMD, v_BHMD))
    room, threads = _find_room(kernels.count_backward_room(sizes))
    heads = map(_point_to, (q_BHND, k_BHMD, v_BHMD, made_BHND, grad_BHND))
    outcome = map(_point_to, grads)
    kernels.attend_backward(sizes, *heads, levels_BHN.data_ptr(), scale, *outcome, room.data_ptr(), threads)
    return grads


# As operations of torch, so that whoever watches torch's operations sees and counts them.
torch.library.define("frameloom::attend", "(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)")
torch.library.impl("frameloom::attend", "CPU", _attend)
torch.library.define(
    "frameloom::attend_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor made, Tensor levels, float scale) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("frameloom::attend_backward", "CPU", _attend_backward)


def _tell_sizes(q_BHND: Tensor, k_BHMD: Tensor) -> Sizes:
    batch, heads, queries, width = q_BHND.shape
    return Sizes(batch, heads, queries, k_BHMD.shape[2], width)


def _point_to(heads_BHND: Tensor) -> Heads:
    return Heads(heads_BHND.data_ptr(), *heads_BHND.stride()[:3])


def _with_rows(heads_BHND: Tensor) -> Tensor:
    """With the numbers of each row side by side."""
    return heads_BHND if heads_BHND.stride(3) == 1 else heads_BHND.contiguous()


def _make_like(heads_BHND: Tensor) -> Tensor:
    """As large, with all heads of a token in one piece."""
    batch, heads, tokens, width = heads_BHND.shape
    return heads_BHND.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _find_room(count: int) -> tuple[Tensor, int]:
    """Memory for `count` numbers on each thread, and how many threads there are."""
    threads = torch.get_num_threads()
    return torch.empty(threads * count), threads
