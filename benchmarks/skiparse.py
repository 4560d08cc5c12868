"""Skiparse attention against full attention, and against its plain form with a mask of all pairs of tokens.

Forward and backward of one attention, without its projections, on the same tokens; the three take turns within one
run. The formula promises 1 / sparse_n of the full attention's operations; a mask of all
pairs saves nothing, because the kernel still computes every score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.harness import BenchSettings, Row, Work, compare_times, measure_or_skip, median_ratio, take_turns
from frameloom.core.random import stream
from frameloom.models.denoisers.opensora_plan.config import SIZES
from frameloom.models.denoisers.opensora_plan.skiparse import NUM_AXES, SkiparseAttention, turn_table
from frameloom.models.layers.attention.attention import RotaryAttention

GRIDS = ((4, 16, 16), (8, 16, 24), (8, 24, 32))
NUM_HEADS = 4
_MOST_PAIRS = 4096 * 4096
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def measure(bench: BenchSettings) -> Iterator[Row]:
    """Both patterns against full attention at growing numbers of tokens, heads of the released width."""
    for grid in bench.pick(GRIDS, GRIDS[:1]):
        name = f"{grid[0] * grid[1] * grid[2]:,} tokens"
        yield from measure_or_skip("skiparse", name, _measure, grid, name, bench)


def _measure(grid: tuple[int, int, int], name: str, bench: BenchSettings) -> Iterator[Row]:
    config, num_tokens = SIZES["2b"], grid[0] * grid[1] * grid[2]
    table = turn_table(grid, config.attention_head_dim, config.interpolation_scales)
    heads = [_draw_heads(num_tokens, config.attention_head_dim, seed) for seed in range(3)]
    ways: dict[str, Way] = {
        "full": SkiparseAttention("full", config.sparse_n),
        "single": SkiparseAttention("single", config.sparse_n),
        "group": SkiparseAttention("group", config.sparse_n),
    }
    if num_tokens**2 <= _MOST_PAIRS:
        ways["pairs"] = AllPairs(num_tokens, config.sparse_n)
        gap = find_gap(ways, heads, table)
        if gap > 1e-4:
            raise ValueError(f"single skip and its mask of all pairs should agree, but they differ by {gap:.1e}")
    times = take_turns({key: _passes(way, heads, table) for key, way in ways.items()}, bench.rounds)
    share = median_ratio(times["single"].walls, times["full"].walls) / 2
    share += median_ratio(times["group"].walls, times["full"].walls) / 2
    yield compare_times(
        "skiparse",
        name,
        times["single"],
        times["full"],
        against="full attention",
        note=f"both patterns take {share:.0%} of its time; {1 / config.sparse_n:.0%} of its operations",
        at=("tokens", num_tokens),
    )
    if "pairs" in times:
        yield compare_times(
            "skiparse", f"{name}, as a mask", times["single"], times["pairs"], against="a mask of all pairs"
        )


@torch.no_grad()
def find_gap(ways: dict[str, Way], heads: list[Tensor], table: Tensor) -> float:
    made, wanted = (ways[key](heads[0], heads[1], heads[2], table) for key in ("single", "pairs"))
    return float((made - wanted).abs().max())


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


def _passes(way: Way, heads: list[Tensor], table: Tensor) -> Work:
    def run() -> None:
        torch.autograd.grad(way(heads[0], heads[1], heads[2], table).sum(), heads)

    return run
