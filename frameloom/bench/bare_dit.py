"""A DiT with nothing but its blocks, as a measure of what a training step can reach on the machine at hand.

No captions, no positions, no patches: norms with scale and shift, attention over all tokens, an MLP, forward and
backward with torch's fused AdamW. It is as wide as the model beside which it stands, has as many tokens, and about 30
million parameters.

Shape letters: B batch, N tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.bench.harness import Work
from frameloom.core.random import stream
from frameloom.plan.costs import put_weights
from frameloom.plan.ghosts import GhostMode
from frameloom.plan.tracker import tally_passes

_PARAMETERS = 30e6


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.modulation = nn.Linear(width, 6 * width)
        self.attention_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x_BND: Tensor, condition_BD: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition_BD)[:, None].chunk(6, dim=-1)
        qkv = self.qkv(self.attention_norm(x_BND) * (1 + scale) + shift)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed_BND = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x_BND = x_BND + gate * self.out(mixed_BND)
        x_BND = x_BND + mlp_gate * self.mlp(self.mlp_norm(x_BND) * (1 + mlp_scale) + mlp_shift)
        return x_BND


@dataclass(frozen=True)
class BareDiT:
    width: int
    num_heads: int
    batch: int
    num_tokens: int
    """of one clip"""

    @property
    def depth(self) -> int:
        return max(1, round(_PARAMETERS / (18 * self.width**2)))

    @property
    def name(self) -> str:
        return f"a bare DiT, {self.depth} blocks of {self.width} channels"

    def build_step(self) -> Work:
        blocks, generator = self._build(), stream(0, "bench bare")
        optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-5, fused=True)
        shape = (self.batch, self.num_tokens, self.width)
        x, target = (torch.randn(shape, generator=generator) for _ in range(2))
        condition = torch.randn(self.batch, self.width, generator=generator)

        def step() -> None:
            torch.autograd.backward(_find_loss(blocks, x, condition, target))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def count_flops(self) -> float:
        """As those of our models are counted."""
        with torch.device("meta"):
            blocks = self._build()
        with GhostMode() as mode:
            put_weights(blocks)
            x, condition = torch.empty(1, self.num_tokens, self.width), torch.empty(1, self.width)
            with tally_passes(blocks, mode) as tally:
                torch.autograd.backward(_find_loss(blocks, x, condition, torch.empty_like(x)))
        return self.batch * float(tally.flops)

    def _build(self) -> nn.ModuleList:
        return nn.ModuleList(_Block(self.width, self.num_heads) for _ in range(self.depth))


def _find_loss(blocks: nn.ModuleList, x_BND: Tensor, condition_BD: Tensor, target_BND: Tensor) -> Tensor:
    for block in blocks:
        x_BND = block(x_BND, condition_BD)
    return F.mse_loss(x_BND, target_BND)
