"""The middle of encoder and decoder: a resnet, attention that never looks into a later frame, a resnet.

Shape letters: B batch, C channels, F frames, H height, W width, N cells of one frame.

Frame by frame with the keys of the frames so far, attention needs no mask. The mask that diffusers makes for it has
(F * N)^2 numbers, 4.5 GB in float32 for a 256 px clip of 129 frames, and half of the products it is for are wasted.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from frameloom.models.layers.attention import attend

NORM_EPS = 1e-6


class FrameCausalAttention(nn.Module):
    """One head over all channels, with its norm and its residual; the names are those of published files."""

    def __init__(self, channels: int, norm_groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(norm_groups, channels, eps=NORM_EPS)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        num_frames, height, width = x_BCFHW.shape[2:]
        num_cells = height * width
        tokens_BNC = self.group_norm(x_BCFHW).flatten(2).transpose(1, 2)
        q, k, v = (layer(tokens_BNC).unsqueeze(1) for layer in (self.to_q, self.to_k, self.to_v))
        seen = []
        for frame in range(num_frames):
            stop = (frame + 1) * num_cells
            seen.append(attend(q[:, :, stop - num_cells : stop], k[:, :, :stop], v[:, :, :stop]))
        out_BNC: Tensor = self.to_out[0](torch.cat(seen, dim=2).squeeze(1))
        return x_BCFHW + torch.unflatten(out_BNC.transpose(1, 2), 2, (num_frames, height, width))


class MiddleBlock(nn.Module):
    """`resnets` are two; without attention the first simply goes before the second."""

    def __init__(self, resnets: Iterable[nn.Module], attention: FrameCausalAttention | None) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([attention] if attention is not None else [])
        self.resnets = nn.ModuleList(resnets)

    def forward(self, x_BCFHW: Tensor) -> Tensor:
        first, second = self.resnets
        x_BCFHW = first(x_BCFHW)
        for attention in self.attentions:
            x_BCFHW = attention(x_BCFHW)
        out: Tensor = second(x_BCFHW)
        return out
