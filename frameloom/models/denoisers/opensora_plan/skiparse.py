"""Skiparse attention: tokens are dealt into k sub-sequences that attend within themselves; rotary tables.

Shape letters: B batch, N tokens, S tokens with filling, k sub-sequences, H heads, D width of a head, C width of any
tensor of tokens, P rotary pairs.

    single   sub-sequence r holds every k-th token: r, r + k, r + 2k ...
    group    sub-sequence m holds every k-th run of k neighbours: m*k ... m*k + k - 1, then the same plus k^2 ...

Layers alternate between the two, so every token reaches every other in two layers. Nothing of the size of all pairs is
ever made: a sub-sequence is a row of the batch, and a mask is one number per token. Sub-sequences are rows b * k + r.

Tokens are filled up with zeros to a multiple of k^2, behind the rotation; `FILLED` is added to their scores.

A third of a head's channels turns with each axis, in this order; within a third, channels (j, j + half) are a pair.
Positions are divided by the interpolation scales.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.distributed.sequence_parallel import ALONE, SequenceGroup
from frameloom.models.denoisers.opensora_plan.config import Pattern
from frameloom.models.layers.attention.attention import attend
from frameloom.models.layers.patches import Grid
from frameloom.models.layers.positions import grid_positions, rotary_table, rotate

PADDED = -10_000.0
FILLED = -9_980.0
NUM_AXES = 3
Scales = tuple[float, float, float]


class SkiparseAttention(nn.Module):
    """Attention of rotated heads, full or skiparse. It has no parameters. The mask comes from `mask_filling` for the
    same pattern. In a sequence group heads are those of a rank's own tokens, table and mask those of all tokens."""

    def __init__(self, pattern: Pattern, sparse_n: int) -> None:
        super().__init__()
        self.pattern: Pattern = pattern
        self.sparse_n = sparse_n
        self.sequence: SequenceGroup = ALONE

    def forward(
        self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, rope_N1P: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        own_rope = self.sequence.split(rope_N1P, dim=0)
        q, k = (rotate(heads, own_rope, parts=NUM_AXES).type_as(v_BNHD) for heads in (q_BNHD, k_BNHD))
        if self.sequence.degree == 1:
            return self._attend(q, k, v_BNHD, mask)
        # What fills up the last parts is cut off before tokens are dealt: it would shift them.
        num_tokens, own_tokens = len(rope_N1P), q.shape[1]
        q, k, v = (heads[:, :num_tokens] for heads in self.sequence.exchange_heads(q, k, v_BNHD))
        filling = self.sequence.degree * own_tokens - num_tokens
        return self.sequence.exchange_tokens(F.pad(self._attend(q, k, v, mask), (0, 0, 0, filling)))

    def _attend(self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, mask: Tensor | None) -> Tensor:
        filled = 0 if self.pattern == "full" else num_filled(q_BNHD.shape[1], self.sparse_n)
        heads = (F.pad(part, (0, 0, 0, 0, 0, filled)) if filled else part for part in (q_BNHD, k_BNHD, v_BNHD))
        q, k, v = (deal(part, self.pattern, self.sparse_n).transpose(1, 2) for part in heads)
        attended = attend(q, k, v, mask).transpose(1, 2)
        return gather(attended, self.pattern, self.sparse_n)[:, : q_BNHD.shape[1]].flatten(2)


def deal(tokens_BS: Tensor, pattern: Pattern, sparse_n: int) -> Tensor:
    """[B, S, ...] to sub-sequences [B * k, S / k, ...]; S is a multiple of k^2."""
    if pattern == "full":
        return tokens_BS
    if pattern == "single":
        return torch.unflatten(tokens_BS, 1, (-1, sparse_n)).transpose(1, 2).flatten(0, 1)
    runs = torch.unflatten(tokens_BS, 1, (-1, sparse_n, sparse_n)).transpose(1, 2)  # [B, m, S / k^2, k, ...]
    return runs.flatten(2, 3).flatten(0, 1)


def gather(parts: Tensor, pattern: Pattern, sparse_n: int) -> Tensor:
    """The inverse of `deal`."""
    if pattern == "full":
        return parts
    parts = torch.unflatten(parts, 0, (-1, sparse_n))
    if pattern == "single":
        return parts.transpose(1, 2).flatten(1, 2)
    return torch.unflatten(parts, 2, (-1, sparse_n)).transpose(1, 2).flatten(1, 3)


def num_filled(num_tokens: int, sparse_n: int) -> int:
    """Zeros that bring the tokens to a multiple of k^2."""
    return -num_tokens % sparse_n**2


def mask_filling(pattern: Pattern, sparse_n: int, *, like_BNC: Tensor) -> Tensor | None:
    """What is added to the scores, [rows, 1, 1, keys], or None where the tokens need no filling.

    `like_BNC` is any tensor of the tokens: it says their number, device and precision.
    """
    batch, num_tokens = like_BNC.shape[:2]
    filled = 0 if pattern == "full" else num_filled(num_tokens, sparse_n)
    if not filled:
        return None
    added_BN = F.pad(like_BNC.new_zeros(batch, num_tokens), (0, filled), value=FILLED)
    return deal(added_BN, pattern, sparse_n)[:, None, None]


def turn_table(grid: Grid, head_dim: int, scales: Scales) -> Tensor:
    """The rotary table [N, 1, P] of a grid of tokens."""
    axes = [torch.arange(count, dtype=torch.float32) / scale for count, scale in zip(grid, scales, strict=True)]
    return rotary_table(grid_positions(axes), (head_dim // NUM_AXES,) * NUM_AXES)
