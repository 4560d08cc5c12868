"""Patch embedding: latents to tokens and back, frames into the batch and back.

Shape letters: B batch, C channels, F frames, H height, W width, N tokens, D width.

Tokens run over (frame, row, column), column fastest. A packed token's features run over (channel, frame in patch, row
in patch, column in patch).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

Grid = tuple[int, int, int]
"""tokens along (frames, rows, columns)"""


def pack(latent_BCFHW: Tensor, patch_size: int, patch_frames: int = 1) -> Tensor:
    """[B, C, F, H, W] to tokens [B, N, features]; patches must tile the latent."""
    batch, channels, frames, height, width = latent_BCFHW.shape
    grid = frames // patch_frames, height // patch_size, width // patch_size
    cells = latent_BCFHW.reshape(batch, channels, grid[0], patch_frames, grid[1], patch_size, grid[2], patch_size)
    # [B, C, F, f, H, h, W, w] -> [B, F, H, W, C, f, h, w]
    return cells.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def unpack(
    tokens_BNC: Tensor, grid: Grid, patch_size: int, patch_frames: int = 1, *, channels_last: bool = False
) -> Tensor:
    """The inverse of `pack`; with `channels_last`, of tokens whose features run over the channels fastest."""
    inside = (patch_frames, patch_size, patch_size)
    if channels_last:
        cells = torch.unflatten(tokens_BNC, -1, (*inside, -1)).movedim(-1, 2)
    else:
        cells = torch.unflatten(tokens_BNC, -1, (-1, *inside))
    # [B, F, H, W, C, f, h, w] -> [B, C, F, f, H, h, W, w]
    cells = torch.unflatten(cells, 1, grid).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return cells.flatten(6).flatten(4, 5).flatten(2, 3)


def embed_frames(projection: nn.Module, latent_BCFHW: Tensor) -> Tensor:
    """Tokens [B, F, H, W, D] from a convolution over the patches of every frame.

    A token lies in one piece: all blocks add to what they are given, and would keep the layout of the convolution.
    """
    patches: Tensor = projection(fold_frames(latent_BCFHW))
    return torch.unflatten(patches, 0, (len(latent_BCFHW), -1)).movedim(2, -1).contiguous()


class PatchEmbed(nn.Module):
    """Frame by frame; no position is added."""

    def __init__(self, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)

    def forward(self, latent_BCFHW: Tensor) -> Tensor:
        """[B, F, H, W, D]"""
        return embed_frames(self.proj, latent_BCFHW)


def fold_frames(x_BCFHW: Tensor) -> Tensor:
    """Frames into the batch, for layers that treat every frame as an image; one in channels-last order stays so."""
    return x_BCFHW.transpose(1, 2).flatten(0, 1)


def unfold_frames(x: Tensor, num_frames: int) -> Tensor:
    return torch.unflatten(x, 0, (-1, num_frames)).transpose(1, 2)
