"""Skiparse attention against full attention, and against its plain form with a mask of all pairs of tokens.

Forward and backward of one attention, without its projections, on the same tokens; the three take turns within one
run, and medians are compared. The formula promises 1 / sparse_n of the full attention's operations; a mask of all
pairs saves nothing, because the kernel still computes every score.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from frameloom.core.random import stream
from frameloom.models.denoisers.opensora_plan.config import SIZES
from frameloom.models.denoisers.opensora_plan.positions import NUM_AXES, turn_table
from frameloom.models.denoisers.opensora_plan.skiparse import SkiparseAttention
from frameloom.models.layers.attention import RotaryAttention

GRID = (8, 16, 24)
NUM_HEADS = 4


@dataclass(frozen=True)
class Comparison:
    """Median seconds of forward and backward; shares are of the full attention."""

    num_tokens: int
    sparse_n: int
    full_s: float
    single_s: float
    group_s: float
    all_pairs_s: float
    largest_difference: float
    rounds: int

    @property
    def share(self) -> float:
        """Mean of both patterns."""
        return (self.single_s + self.group_s) / 2 / self.full_s

    @property
    def promised_share(self) -> float:
        return 1 / self.sparse_n

    def to_json(self) -> dict[str, float]:
        return {**asdict(self), "share": self.share, "promised_share": self.promised_share}

    def describe(self) -> list[str]:
        rows = (
            ("full", self.full_s),
            ("single skip", self.single_s),
            ("group skip", self.group_s),
            ("mask of all pairs", self.all_pairs_s),
        )
        return [
            f"attention of {self.num_tokens} tokens, forward and backward, {self.rounds} rounds in turn, medians",
            *(f"  {name:18} {seconds * 1e3:8.1f} ms  {seconds / self.full_s:6.1%}" for name, seconds in rows),
            f"  skiparse takes {self.share:.1%} of full attention; its operations are {self.promised_share:.1%}",
            f"  largest difference to the mask of all pairs: {self.largest_difference:.1e}",
        ]


def compare_skiparse(rounds: int = 9, warmup: int = 2) -> Comparison:
    """All ways in turn on a clip of 3072 tokens and heads of the released width."""
    config = SIZES["2b"]
    num_tokens = GRID[0] * GRID[1] * GRID[2]
    table = turn_table(GRID, config.attention_head_dim, config.interpolation_scales)
    heads = [_draw_heads(num_tokens, config.attention_head_dim, seed) for seed in range(3)]
    ways: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
        "full": SkiparseAttention("full", config.sparse_n),
        "single": SkiparseAttention("single", config.sparse_n),
        "group": SkiparseAttention("group", config.sparse_n),
        "all_pairs": AllPairs(num_tokens, config.sparse_n),
    }
    for _ in range(warmup):
        outputs = {name: _run(way, heads, table)[0] for name, way in ways.items()}
    times = [{name: _run(way, heads, table)[1] for name, way in ways.items()} for _ in range(rounds)]
    medians = {f"{name}_s": statistics.median(each[name] for each in times) for name in ways}
    gap = float((outputs["single"] - outputs["all_pairs"]).abs().max())
    return Comparison(num_tokens, config.sparse_n, **medians, largest_difference=gap, rounds=rounds)


class AllPairs:
    """Single skip as a mask: token i may look at token j when both leave the same remainder."""

    def __init__(self, num_tokens: int, sparse_n: int) -> None:
        part_N = torch.arange(num_tokens) % sparse_n
        self.mask_NN = part_N[:, None] == part_N
        self.attend = RotaryAttention(parts=NUM_AXES)

    def __call__(self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, rope_N1P: Tensor) -> Tensor:
        attended: Tensor = self.attend(q_BNHD, k_BNHD, v_BNHD, rope_N1P, self.mask_NN)
        return attended


def _draw_heads(num_tokens: int, head_dim: int, seed: int) -> Tensor:
    shape = (1, num_tokens, NUM_HEADS, head_dim)
    return torch.randn(shape, generator=stream(seed, "skiparse bench")).requires_grad_()


def _run(
    way: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], heads: list[Tensor], table: Tensor
) -> tuple[Tensor, float]:
    start = time.perf_counter()
    output = way(heads[0], heads[1], heads[2], table)
    torch.autograd.grad(output.sum(), heads)
    return output.detach(), time.perf_counter() - start
