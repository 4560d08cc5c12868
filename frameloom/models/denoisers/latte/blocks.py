"""The blocks of LatteT2V. Module and parameter names are those of the published checkpoints.

A spatial block looks inside each frame and at the caption, a temporal block along the frames of each place. Blocks take
and return tensors only. LayerNorms have no parameters. Masks are added to the scores, with -10000 where nothing may be
looked at: a row without any key then still gets finite numbers, those of the published code.

Shape letters: B batch, F frames, H rows and W columns of patches, N tokens, M keys, D width, S captions of a sample
(the clip's, then one of each image that follows the clip along F), K text tokens, G heads, C channels of a head, P
rotary pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from frameloom.models.denoisers.latte.config import LatteConfig
from frameloom.models.layers.attention import Projections, RotaryAttention, attend_tokens
from frameloom.models.layers.dropout import KeyedDropout
from frameloom.models.layers.mlp import FeedForward
from frameloom.models.layers.modulation import ModulationTable, modulate

# What the grid of a GPU has room for.
_MOST_HEADS = 65_535


def _spread_bias(bias_BM: Tensor | None, q: Tensor) -> Tensor | None:
    return None if bias_BM is None else bias_BM[:, None, None].to(q.dtype)


class SelfAttention(Projections):
    """Attention of the N tokens of each picture [B, N, D], or of the frames of each place [B, F, N, D].

    With `factor` > 1, keys and values come from neighbours that a depthwise convolution has joined.
    """

    def __init__(self, config: LatteConfig, *, num_axes: int, factor: int) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads, bias=config.attention_bias)
        self.num_axes = num_axes
        self.factor = factor
        # In a sequence group each rank has some places of all frames: only pictures are divided.
        self.attend = RotaryAttention(parts=num_axes, whole=num_axes == 1)
        if factor > 1:
            width = config.hidden_size
            convolution = {1: nn.Conv1d, 2: nn.Conv2d}[num_axes]
            self.sr = convolution(width, width, factor, stride=factor, groups=width)
            self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, bias_BM: Tensor | None, rope_N1P: Tensor | None) -> Tensor:
        """`source` is what keys and values are made of."""
        q, k, v = self.project(x, source)
        if self.num_axes == 1:
            attended = self._attend_places(q, k, v, rope_N1P)
        else:
            attended = self.attend(q, k, v, rope_N1P, _spread_bias(bias_BM, q))
        mixed: Tensor = self.to_out(attended)
        return mixed

    def _attend_places(self, q_BFNGC: Tensor, k_BMNGC: Tensor, v_BMNGC: Tensor, rope_F1P: Tensor | None) -> Tensor:
        """The heads of all places stand side by side, so that no token is moved; several times where they are many."""
        heads = q_BFNGC, k_BMNGC, v_BMNGC
        most, num_places = max(1, _MOST_HEADS // self.num_heads), q_BFNGC.shape[2]
        if num_places <= most:
            attended = self.attend(*(part.flatten(2, 3) for part in heads), rope_F1P)
            return torch.unflatten(attended, -1, (num_places, -1))
        groups = zip(*(torch.split(part, most, dim=2) for part in heads), strict=True)
        return torch.cat([self._attend_places(q, k, v, rope_F1P) for q, k, v in groups], dim=2)

    def join_picture(self, x_BHWD: Tensor) -> Tensor:
        """Keys of a picture [B, M, D]; an odd last row or column is left out."""
        if self.factor == 1:
            return x_BHWD.flatten(1, 2)
        joined_BDHW = self.sr(x_BHWD.movedim(-1, 1))
        normal: Tensor = self.norm(joined_BDHW.flatten(2).mT)
        return normal

    def join_frames(self, x_BFND: Tensor) -> Tensor:
        """Keys along the frames [B, M, N, D]; before an odd number of frames stand copies of the first."""
        if self.factor == 1:
            return x_BFND
        if x_BFND.shape[1] % 2:
            x_BFND = torch.cat([x_BFND[:, :1].expand(-1, self.factor - 1, -1, -1), x_BFND], dim=1)
        joined_BNDM = torch.unflatten(self.sr(x_BFND.movedim(1, 3).flatten(0, 1)), 0, (len(x_BFND), -1))
        normal: Tensor = self.norm(joined_BNDM.movedim(3, 1))
        return normal

    @torch.no_grad()
    def reset_joining(self) -> None:
        """Start as the plain mean of the neighbours."""
        self.sr.weight.fill_(1 / self.factor**self.num_axes)
        for parameter, value in ((self.sr.bias, 0.0), (self.norm.weight, 1.0), (self.norm.bias, 0.0)):
            assert parameter is not None
            parameter.fill_(value)


class CrossAttention(Projections):
    """The frames of the clip look at its caption, and each image at its own."""

    def forward(self, x_BFND: Tensor, text_BSKD: Tensor, bias_BSK: Tensor) -> Tensor:
        q, k, v = self.project(x_BFND, text_BSKD)
        batch, num_frames, num_tokens, _ = x_BFND.shape
        num_images = text_BSKD.shape[1] - 1
        of_clip, *of_images = torch.split(q, [num_frames - num_images, num_images], dim=1) if num_images else (q,)
        mixed = attend_tokens(of_clip.flatten(1, 2), k[:, 0], v[:, 0], _spread_bias(bias_BSK[:, 0], q))
        mixed_BFND = torch.unflatten(mixed, 1, (-1, num_tokens))
        if num_images:
            k, v, bias_BM = (part[:, 1:].flatten(0, 1) for part in (k, v, bias_BSK))
            mixed = attend_tokens(of_images[0].flatten(0, 1), k, v, _spread_bias(bias_BM, q))
            mixed_BFND = torch.cat([mixed_BFND, torch.unflatten(mixed, 0, (batch, num_images))], dim=1)
        result: Tensor = self.to_out(mixed_BFND)
        return result


class Block(ModulationTable):
    """What both kinds share: a table that is added to the modulation vectors, self-attention and an MLP."""

    def __init__(self, config: LatteConfig, *, num_axes: int, factor: int) -> None:
        super().__init__(6, config.hidden_size)
        self.attn1 = SelfAttention(config, num_axes=num_axes, factor=factor)
        self.ff = FeedForward(config.hidden_size, config.dropout)
        self.drop_mixed = KeyedDropout(config.dropout, site=2)
        self.eps = config.norm_eps

    def split_modulation(self, modulation_B6D: Tensor) -> tuple[Tensor, ...]:
        """Shift, scale and gate of the attention, then of the MLP, each [B, 1, 1, 1, D]."""
        return (self.scale_shift_table + modulation_B6D)[:, None, None, None].unbind(-2)


class SpatialBlock(Block):
    def __init__(self, config: LatteConfig, *, factor: int) -> None:
        super().__init__(config, num_axes=2, factor=factor)
        self.attn2 = CrossAttention(config.hidden_size, config.num_attention_heads, bias=config.attention_bias)
        self.drop_told = KeyedDropout(config.dropout, site=3)

    def forward(
        self,
        x_BFHWD: Tensor,
        modulation_B6D: Tensor,
        text_BSKD: Tensor,
        text_bias_BSK: Tensor,
        cell_bias_BFM: Tensor | None,
        rope_N1P: Tensor | None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        """`cell_bias_BFM` is that of the keys: joined cells in a block that compresses."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.split_modulation(modulation_B6D)
        normal_BHWD = modulate(x_BFHWD, shift1, scale1, self.eps).flatten(0, 1)
        bias_BM = None if cell_bias_BFM is None else cell_bias_BFM.flatten(0, 1)
        mixed = self.attn1(normal_BHWD.flatten(1, 2), self.attn1.join_picture(normal_BHWD), bias_BM, rope_N1P)
        x_BFHWD = torch.addcmul(x_BFHWD, gate1, self.drop_mixed(mixed.view_as(x_BFHWD), dropout_keys))
        # Without norm and gate, as published.
        told_BFHWD = self.attn2(x_BFHWD.flatten(2, 3), text_BSKD, text_bias_BSK).view_as(x_BFHWD)
        x_BFHWD = x_BFHWD + self.drop_told(told_BFHWD, dropout_keys)
        return torch.addcmul(x_BFHWD, gate2, self.ff(modulate(x_BFHWD, shift2, scale2, self.eps), dropout_keys))


class TemporalBlock(Block):
    def __init__(self, config: LatteConfig, *, factor: int) -> None:
        super().__init__(config, num_axes=1, factor=factor)

    def forward(
        self,
        x_BFHWD: Tensor,
        modulation_B6D: Tensor,
        rope_N1P: Tensor | None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        """Frames of the clip alone; no mask, as published."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.split_modulation(modulation_B6D)
        normal_BFND = modulate(x_BFHWD, shift1, scale1, self.eps).flatten(2, 3)
        mixed = self.attn1(normal_BFND, self.attn1.join_frames(normal_BFND), None, rope_N1P)
        x_BFHWD = torch.addcmul(x_BFHWD, gate1, self.drop_mixed(mixed.view_as(x_BFHWD), dropout_keys))
        return torch.addcmul(x_BFHWD, gate2, self.ff(modulate(x_BFHWD, shift2, scale2, self.eps), dropout_keys))
