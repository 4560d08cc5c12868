"""Two models in plain PyTorch: OpenSoraT2V, for which diffusers has no class, and a bare DiT as a yardstick.

OpenSoraT2V is written out line by line, as its formulas read. Parameter names are those of the published checkpoints,
so that both models take the same weights. Nothing is fused, kept or rearranged for speed: rotary positions by halves of
a third of a head, skiparse by a padded rearrangement, norms and modulation one operation after the other.

The bare DiT tells what rate a training step can reach on this machine: no captions, no positions, no patches, only
norms with scale and shift, attention over all tokens and an MLP, forward and backward with torch's fused AdamW. It is
as wide as the model beside which it stands, has as many tokens, and about 30 million parameters.

Shape letters: B batch, C channels, F frames, H height, W width, N tokens, K text tokens, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Work
from frameloom.core.random import stream
from frameloom.models.denoisers.opensora_plan.config import OpenSoraPlanConfig
from frameloom.planner.shape_tensors import ShapeMode, put_weights, tally_passes

_FILLED = -9_980.0
_BARE_PARAMETERS = 30e6


def sinusoids(index_B: Tensor, width: int) -> Tensor:
    frequencies = torch.exp(-math.log(10_000.0) * torch.arange(width // 2) / (width // 2))
    angles = index_B.float()[:, None] * frequencies
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class TwoLayers(nn.Module):
    def __init__(self, in_width: int, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_width, width)
        self.act = activation
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear_2(self.act(self.linear_1(x)))
        return result


class TimeEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({"timestep_embedder": TwoLayers(256, width, nn.SiLU())})
        self.linear = nn.Linear(width, 6 * width)

    def forward(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.emb["timestep_embedder"](sinusoids(index_B, 256))
        return self.linear(F.silu(embedded)), embedded


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def split_heads(self, x_BND: Tensor) -> Tensor:
        batch, tokens, width = x_BND.shape
        return x_BND.view(batch, tokens, self.num_heads, width // self.num_heads).transpose(1, 2)

    def finish(self, heads: Tensor) -> Tensor:
        batch, _, tokens, _ = heads.shape
        result: Tensor = self.to_out[0](heads.transpose(1, 2).reshape(batch, tokens, -1))
        return result


class CrossAttention(Attention):
    def forward(self, x_BND: Tensor, text_BKD: Tensor, bias_B11K: Tensor) -> Tensor:
        q, k, v = (self.split_heads(part) for part in (self.to_q(x_BND), self.to_k(text_BKD), self.to_v(text_BKD)))
        return self.finish(F.scaled_dot_product_attention(q, k, v, attn_mask=bias_B11K))


class SelfAttention(Attention):
    def __init__(self, config: OpenSoraPlanConfig, layer: int) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.pattern = config.pattern(layer)
        self.step = config.sparse_n
        self.scales = config.interpolation_scales

    def forward(self, x_BND: Tensor, grid: tuple[int, int, int]) -> Tensor:
        q, k, v = (self.split_heads(part) for part in (self.to_q(x_BND), self.to_k(x_BND), self.to_v(x_BND)))
        q, k = self.turn(q, grid), self.turn(k, grid)
        if self.pattern == "full":
            return self.finish(F.scaled_dot_product_attention(q, k, v))
        batch, _, tokens, _ = q.shape
        filling = -tokens % self.step**2
        bias = F.pad(q.new_zeros(batch, 1, tokens, 1), (0, 0, 0, filling), value=_FILLED)
        q, k, v = (self.deal(F.pad(part, (0, 0, 0, filling))) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.deal(bias).transpose(2, 3))
        return self.finish(self.gather(attended)[:, :, :tokens])

    def turn(self, heads: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Rotary positions: a third of the channels for each axis."""
        places = torch.meshgrid(*(torch.arange(count) for count in grid), indexing="ij")
        turned = []
        for part, place, scale in zip(heads.chunk(3, dim=-1), places, self.scales, strict=True):
            width = part.shape[-1]
            frequencies = 10_000.0 ** (-torch.arange(0, width, 2) / width)
            angles = (place.flatten() / scale)[:, None] * frequencies
            angles = torch.cat([angles, angles], dim=-1)
            first, second = part.chunk(2, dim=-1)
            turned.append(part * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin())
        return torch.cat(turned, dim=-1)

    def deal(self, heads: Tensor) -> Tensor:
        batch, num_heads, tokens, width = heads.shape
        step = self.step
        if self.pattern == "single":
            parts = heads.view(batch, num_heads, tokens // step, step, width).permute(3, 0, 1, 2, 4)
        else:
            parts = heads.view(batch, num_heads, tokens // step**2, step, step, width).permute(3, 0, 1, 2, 4, 5)
        return parts.reshape(step * batch, num_heads, tokens // step, width)

    def gather(self, parts: Tensor) -> Tensor:
        step = self.step
        rows, num_heads, tokens, width = parts.shape
        if self.pattern == "single":
            heads = parts.view(step, rows // step, num_heads, tokens, width).permute(1, 2, 3, 0, 4)
        else:
            heads = parts.view(step, rows // step, num_heads, tokens // step, step, width).permute(1, 2, 3, 0, 4, 5)
        return heads.reshape(rows // step, num_heads, tokens * step, width)


class Projection(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([Projection(width), nn.Dropout(0.0), nn.Linear(4 * width, width)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self, config: OpenSoraPlanConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.scale_shift_table = nn.Parameter(torch.zeros(6, width))
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, elementwise_affine=False)
        self.attn1 = SelfAttention(config, layer)
        self.attn2 = CrossAttention(width, config.num_attention_heads)
        self.ff = FeedForward(width)

    def forward(
        self, x_BND: Tensor, text_BKD: Tensor, bias_B11K: Tensor, time_BD: Tensor, grid: tuple[int, int, int]
    ) -> Tensor:
        vectors = self.scale_shift_table[None] + time_BD.reshape(len(x_BND), 6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = vectors.chunk(6, dim=1)
        x_BND = x_BND + gate1 * self.attn1(self.norm(x_BND) * (1 + scale1) + shift1, grid)
        x_BND = x_BND + self.attn2(x_BND, text_BKD, bias_B11K)
        x_BND = x_BND + gate2 * self.ff(self.norm(x_BND) * (1 + scale2) + shift2)
        return x_BND


class PlainOpenSoraT2V(nn.Module):
    def __init__(self, config: OpenSoraPlanConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.patch, self.out_channels = patch, config.in_channels
        self.scale_shift_table = nn.Parameter(torch.zeros(2, width))
        self.pos_embed = nn.ModuleDict({"proj": nn.Conv2d(config.in_channels, width, patch, stride=patch)})
        self.adaln_single = TimeEmbedding(width)
        self.caption_projection = TwoLayers(config.context_in_dim, width, nn.GELU(approximate="tanh"))
        self.transformer_blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm_out = nn.LayerNorm(width, eps=config.norm_eps, elementwise_affine=False)
        self.proj_out = nn.Linear(width, patch * patch * config.in_channels)

    def forward(self, noisy_BCFHW: Tensor, index_B: Tensor, text_BKD: Tensor, text_mask_BK: Tensor) -> Tensor:
        batch, _, frames, height, width = noisy_BCFHW.shape
        grid = frames, height // self.patch, width // self.patch
        patches = self.pos_embed["proj"](noisy_BCFHW.transpose(1, 2).flatten(0, 1))
        x_BND = patches.flatten(2).transpose(1, 2).reshape(batch, math.prod(grid), -1)
        time_BD, embedded_BD = self.adaln_single(index_B)
        text_BKD = self.caption_projection(text_BKD)
        bias_B11K = ((1 - text_mask_BK.float()) * -10_000.0)[:, None, None]
        for block in self.transformer_blocks:
            x_BND = block(x_BND, text_BKD, bias_B11K, time_BD, grid)
        shift, scale = (self.scale_shift_table[None] + embedded_BD[:, None]).chunk(2, dim=1)
        x_BND = self.proj_out(self.norm_out(x_BND) * (1 + scale) + shift)
        cells = x_BND.reshape(batch, *grid, self.patch, self.patch, self.out_channels)
        prediction: Tensor = cells.permute(0, 6, 1, 2, 4, 3, 5).reshape(batch, self.out_channels, frames, height, width)
        return prediction


class _BareBlock(nn.Module):
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
        return max(1, round(_BARE_PARAMETERS / (18 * self.width**2)))

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
            torch.autograd.backward(_find_bare_loss(blocks, x, condition, target))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def count_flops(self) -> float:
        """As those of our models are counted."""
        with torch.device("meta"):
            blocks = self._build()
        with ShapeMode() as mode:
            put_weights(blocks)
            x, condition = torch.empty(1, self.num_tokens, self.width), torch.empty(1, self.width)
            with tally_passes(blocks, mode) as tally:
                torch.autograd.backward(_find_bare_loss(blocks, x, condition, torch.empty_like(x)))
        return self.batch * float(tally.flops)

    def _build(self) -> nn.ModuleList:
        return nn.ModuleList(_BareBlock(self.width, self.num_heads) for _ in range(self.depth))


def _find_bare_loss(blocks: nn.ModuleList, x_BND: Tensor, condition_BD: Tensor, target_BND: Tensor) -> Tensor:
    for block in blocks:
        x_BND = block(x_BND, condition_BD)
    return F.mse_loss(x_BND, target_BND)
