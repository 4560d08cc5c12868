"""Latents to tokens and back, and the positions of the tokens.

Tokens run over (frame, row, column), column fastest; a token's features over (channel, row in patch, column in
patch). There is no patching in time.

Shape letters: B batch, C channels, F frames, H height, W width, N tokens, K text tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError

Grid = tuple[int, int, int]


def token_grid(latent_FHW: tuple[int, int, int], patch_size: int) -> Grid:
    """Tokens along (frames, rows, columns) for a latent of that size."""
    frames, height, width = latent_FHW
    if height % patch_size or width % patch_size:
        raise ConfigError(
            f"opensora2 denoiser: a latent of {height}x{width} cells cannot be cut into patches of "
            f"{patch_size}x{patch_size}; choose a resolution whose latent sides are multiples of {patch_size}"
        )
    return frames, height // patch_size, width // patch_size


def pack(latent_BCFHW: Tensor, patch_size: int) -> Tensor:
    """[B, C, F, H, W] to tokens [B, N, C * patch_size^2]."""
    B, C, *size = latent_BCFHW.shape
    F, rows, columns = token_grid((size[0], size[1], size[2]), patch_size)
    cells = latent_BCFHW.reshape(B, C, F, rows, patch_size, columns, patch_size)
    return cells.permute(0, 2, 3, 5, 1, 4, 6).reshape(B, F * rows * columns, C * patch_size**2)


def unpack(tokens_BNC: Tensor, grid: Grid, patch_size: int) -> Tensor:
    """The inverse of `pack`."""
    F, rows, columns = grid
    cells = tokens_BNC.reshape(len(tokens_BNC), F, rows, columns, -1, patch_size, patch_size)
    # [B, F, rows, columns, C, p, p] -> [B, C, F, rows, p, columns, p]
    return cells.permute(0, 4, 1, 2, 5, 3, 6).reshape(len(cells), -1, F, rows * patch_size, columns * patch_size)


def video_positions(grid: Grid, device: torch.device | str = "cpu") -> Tensor:
    """[N, 3]: latent frame, patch row and patch column of every token, as float32."""
    axes = [torch.arange(count, dtype=torch.float32, device=device) for count in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)


def joint_positions(grid: Grid, num_text: int, device: torch.device | str = "cpu") -> Tensor:
    """[K + N, 3]: text first, all at the origin."""
    return torch.nn.functional.pad(video_positions(grid, device), (0, 0, num_text, 0))


def pack_condition(mask_B1FHW: Tensor, masked_BCFHW: Tensor, patch_size: int) -> Tensor:
    """Tokens of an image or video condition: the mask comes before the latents that it leaves."""
    return pack(torch.cat([mask_B1FHW, masked_BCFHW], dim=1), patch_size)


def draw_start_noise(
    seed: int, shape_BCF: tuple[int, int, int], *, size_px: tuple[int, int], compression: int, patch_size: int
) -> Tensor:
    """The noise that the published sampler starts from, for comparisons with it: same seed, same numbers.

    `compression` is pixels per token (16 for the 8x autoencoder, 32 for the 32x one); sides are rounded up.
    """
    height, width = (patch_size * -(-side // compression) for side in size_px)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape_BCF, height, width, generator=generator)
