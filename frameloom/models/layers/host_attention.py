"""Attention in float32 on the processor by a kernel of our own (`native/attention.cpp`), where that is faster.

torch's kernel multiplies with MKL, which on processors that are not Intel's does without AVX-512 and takes long for
the first number of each product. On an AMD EPYC, forward and backward over 200 to 1,000 tokens take 0.75 to 0.87 of its
time with ours, and along 3 or 4 frames half to two thirds. Its numbers are those of torch's within rounding.

Shape letters: B batch, H heads, N queries, M keys, D head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from frameloom.models.layers.linear import is_on_host, is_plain
from frameloom.models.layers.native import Bias, Heads, Sizes, find_products, get_kernels, wants_products

# Between them the packing of a head takes longer than torch's kernel.
_FEW, _MANY = 8, 64
# Our logarithms are those of two.
_LOG2_E = 1 / math.log(2)


def has_kernel_for(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend_on_host` is for these: plain numbers, and nobody has forbidden fused kernels.

    A mask may be numbers that are added to the scores of each key, the same for all queries and heads.
    """
    if k_BHMD.shape != v_BHMD.shape or k_BHMD.shape[:2] != q_BHND.shape[:2]:
        return False
    if torch.compiler.is_compiling():  # for any lengths: whether the kernel pays is found when they are known
        is_single = q_BHND.dtype == k_BHMD.dtype == v_BHMD.dtype == torch.float32
        return mask is None and is_single and is_on_host(q_BHND) and wants_products()
    if not all(map(is_plain, (q_BHND, k_BHMD, v_BHMD))) or not _pays(q_BHND, k_BHMD):
        return False
    may_fuse: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]  # of the host, too
    return may_fuse and (mask is None or _is_bias(mask, k_BHMD))


def _pays(q_BHND: Tensor, k_BHMD: Tensor) -> bool:
    """Whether there are many queries and keys, or few; and heads for all threads, each of which takes whole ones."""
    if find_products() is None:
        return False
    lengths = q_BHND.shape[2], k_BHMD.shape[2]
    is_good_length = min(lengths) >= _MANY or 0 < min(lengths) <= max(lengths) <= _FEW
    return is_good_length and q_BHND.shape[0] > 0 and q_BHND.shape[1] >= torch.get_num_threads()


def _is_bias(mask: Tensor, k_BHMD: Tensor) -> bool:
    batch, _, keys, _ = k_BHMD.shape
    is_along_keys = mask.shape in ((batch, 1, 1, keys), (1, 1, 1, keys))
    return is_along_keys and is_plain(mask) and not mask.requires_grad


def attend_on_host(
    q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The tokens of the result lie in one piece."""
    scale = q_BHND.shape[3] ** -0.5 if scale is None else scale
    bias_BM = None if mask is None else mask[:, 0, 0].contiguous()
    made_BHND: Tensor = torch.ops.frameloom.attend(q_BHND, k_BHMD, v_BHMD, bias_BM, scale)[0]
    return made_BHND


def _attend(
    q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, bias_BM: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """What is made of the values, and for each query the logarithm of its weights' sum, for the way back.

    Compiled code asks for whatever lengths it meets, and the way back may have other threads.
    """
    if not _pays(q_BHND, k_BHMD):
        made_BHND, levels_BHN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHND, k_BHMD, v_BHMD, attn_mask=_make_mask(bias_BM), scale=scale
        )
        return _make_like(q_BHND).copy_(made_BHND), levels_BHN.contiguous() * _LOG2_E
    q_BHND, k_BHMD, v_BHMD = map(_with_rows, (q_BHND, k_BHMD, v_BHMD))
    kernels, sizes = get_kernels(), _tell_sizes(q_BHND, k_BHMD)
    made_BHND, levels_BHN = _make_like(q_BHND), q_BHND.new_empty(q_BHND.shape[:3])
    room, threads = _find_room(kernels.count_forward_room(sizes))
    heads, made = map(_point_to, (q_BHND, k_BHMD, v_BHMD)), _point_to(made_BHND)
    places = *heads, _point_to_bias(bias_BM), made, levels_BHN.data_ptr()
    kernels.attend(sizes, *places, scale, room.data_ptr(), threads)
    return made_BHND, levels_BHN


def _attend_backward(
    grad_BHND: Tensor,
    q_BHND: Tensor,
    k_BHMD: Tensor,
    v_BHMD: Tensor,
    bias_BM: Tensor | None,
    made_BHND: Tensor,
    levels_BHN: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    if not _pays(q_BHND, k_BHMD):
        inputs, mask = (grad_BHND, q_BHND, k_BHMD, v_BHMD, made_BHND, levels_BHN / _LOG2_E), _make_mask(bias_BM)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, 0.0, False, attn_mask=mask, scale=scale
        )
        return tuple(_make_like(grad).copy_(grad) for grad in grads)
    grad_BHND, q_BHND, k_BHMD, v_BHMD = map(_with_rows, (grad_BHND, q_BHND, k_BHMD, v_BHMD))
    kernels, sizes = get_kernels(), _tell_sizes(q_BHND, k_BHMD)
    grads = tuple(_make_like(part) for part in (q_BHND, k_BHMD, v_BHMD))
    room, threads = _find_room(kernels.count_backward_room(sizes))
    heads, outcome = map(_point_to, (q_BHND, k_BHMD, v_BHMD)), map(_point_to, (made_BHND, grad_BHND))
    places = *heads, _point_to_bias(bias_BM), *outcome, levels_BHN.data_ptr()
    kernels.attend_backward(sizes, *places, scale, *map(_point_to, grads), room.data_ptr(), threads)
    return grads


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _find_gradients(ctx: Any, grad_BHND: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.frameloom.attend_backward(grad_BHND, *ctx.saved_tensors, ctx.scale)
    return (*grads, None, None)


# As operations of torch, so that whoever watches torch's operations sees them, and a compiler does not look inside.
torch.library.define(
    "frameloom::attend", "(Tensor q, Tensor k, Tensor v, Tensor? bias, float scale) -> (Tensor, Tensor)"
)
torch.library.impl("frameloom::attend", "CPU", _attend)
torch.library.register_fake("frameloom::attend", lambda q, k, v, bias, scale: (_make_like(q), q.new_empty(q.shape[:3])))
torch.library.register_autograd("frameloom::attend", _find_gradients, setup_context=_keep)
torch.library.define(
    "frameloom::attend_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor made, Tensor levels, float scale)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("frameloom::attend_backward", "CPU", _attend_backward)
torch.library.register_fake(
    "frameloom::attend_backward", lambda grad, q, k, v, *_: tuple(_make_like(part) for part in (q, k, v))
)


def _tell_sizes(q_BHND: Tensor, k_BHMD: Tensor) -> Sizes:
    batch, heads, queries, width = q_BHND.shape
    return Sizes(batch, heads, queries, k_BHMD.shape[2], width)


def _point_to(heads_BHND: Tensor) -> Heads:
    return Heads(heads_BHND.data_ptr(), *heads_BHND.stride()[:3])


def _point_to_bias(bias_BM: Tensor | None) -> Bias:
    if bias_BM is None:
        return Bias(None, 0)
    return Bias(bias_BM.data_ptr(), bias_BM.stride(0) if len(bias_BM) > 1 else 0)


def _make_mask(bias_BM: Tensor | None) -> Tensor | None:
    return None if bias_BM is None else bias_BM[:, None, None]


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
