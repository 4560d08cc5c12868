"""Our kernels in C++ against what torch has for the same: attention, gradients of weights, GELU, the norm of gradients.

They are measured wherever they compile; `models/layers/native` says where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.bench.harness import Effort, Row, attempt, compare_times, take_turns
from frameloom.core.errors import RunError
from frameloom.core.random import stream
from frameloom.models.layers.gelu_mlp import activate_in_pieces, activate_natively
from frameloom.models.layers.host_attention import attend_on_host
from frameloom.models.layers.native import find_passes, find_products, load_kernels
from frameloom.train.gradient_norm import measure_in_products, measure_natively

# Batch, heads, tokens and width of a head, as models of about 30 million parameters have them.
HEADS = {
    "attention over 1,056 tokens": (1, 10, 1056, 64),
    "attention over 256 tokens": (4, 8, 256, 72),
    "attention along 4 frames": (1, 2048, 4, 72),
}
# Rows, width of the results and of the inputs.
WEIGHTS = {"gradient of a weight, 640 x 640": (1056, 640, 640), "gradient of a weight, 2,560 x 640": (1056, 2560, 640)}
HIDDEN = {"GELU and its slope": (1024, 2304)}
# Matrices and vectors, as wide as they are.
GRADIENTS = {"norm of 2 million gradients": (8, 500), "norm of 30 million gradients": (20, 1224)}
_LARGEST_GAP = 1e-5
Way = Callable[[], tuple[Tensor, ...]]


def measure(effort: Effort) -> Iterator[Row]:
    """Forward and backward of attention, and each of the others, on all cores."""
    if load_kernels() is None:
        raise RunError("the kernels could not be compiled; install a C++ compiler (CXX names it)")
    smaller = effort.pick(1, 8)
    for name, (batch, heads, tokens, width) in HEADS.items():
        ways = _build_attention(batch, heads, max(tokens // smaller, 4), width)
        yield from attempt("kernels", name, _compare, name, *ways, "torch's kernel, MKL", effort)
    for name, (rows, height, width) in WEIGHTS.items():
        drawn = _draw(rows // smaller, height), _draw(rows // smaller, width)
        yield from attempt("kernels", name, _compare, name, *_build_product(*drawn), "torch.mm, MKL", effort)
    for name, (rows, width) in HIDDEN.items():
        ways = _build_gelu(_draw(rows // smaller, width), _draw(width))
        yield from attempt("kernels", name, _compare, name, *ways, "torch's operations, piece by piece", effort)
    for name, (count, width) in GRADIENTS.items():
        ways = _build_norm(count, width // smaller)
        yield from attempt("kernels", name, _compare, name, *ways, "torch.dot of each with itself", effort)


def _compare(name: str, ours: Way, other: Way, against: str, effort: Effort) -> Iterator[Row]:
    gap = max(float((one - two).abs().max() / two.abs().max()) for one, two in zip(ours(), other(), strict=True))
    if gap > _LARGEST_GAP:
        raise ValueError(f"{name}: both ways should agree, but they differ by {gap:.1e}")
    times = take_turns({"ours": ours, "other": other}, effort.rounds, warmup=2)
    is_pass = name in HIDDEN or name in GRADIENTS
    use = "" if (find_passes() if is_pass else find_products()) is not None else "; not used on this processor"
    note = f"within {gap:.0e} of each other{use}"
    yield compare_times("kernels", name, times["ours"], times["other"], against=against, note=note)


def _build_attention(batch: int, num_heads: int, tokens: int, width: int) -> tuple[Way, Way]:
    heads = [_draw(batch, tokens, num_heads, width, seed=seed).transpose(1, 2).requires_grad_() for seed in range(3)]
    push = _draw(batch, tokens, num_heads, width, seed=3).transpose(1, 2)

    def run(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        made = attend(*heads)
        return made.detach(), *torch.autograd.grad(made, heads, push)

    return partial(run, attend_on_host), partial(run, F.scaled_dot_product_attention)


def _build_product(grad_NM: Tensor, x_NK: Tensor) -> tuple[Way, Way]:
    return lambda: (torch.ops.frameloom.multiply_rows(grad_NM, x_NK),), lambda: (torch.mm(grad_NM.t(), x_NK),)


def _build_gelu(hidden_NH: Tensor, bias_H: Tensor) -> tuple[Way, Way]:
    def run(activate: Callable[..., None]) -> tuple[Tensor, ...]:
        slope_NH, value_NH = hidden_NH.clone(), torch.empty_like(hidden_NH)
        activate(slope_NH, bias_H, value_NH)
        return slope_NH, value_NH

    return partial(run, activate_natively), partial(run, activate_in_pieces)


def _build_norm(count: int, width: int) -> tuple[Way, Way]:
    grads = [*(_draw(width, width, seed=seed) for seed in range(count)), *(_draw(width) for _ in range(8 * count))]
    return lambda: (measure_natively(grads),), lambda: (measure_in_products(grads),)


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "bench kernels"))
