"""Stable Diffusion's image autoencoder on clips: diffusers' encoder and decoder, frame by frame.

Shape letters: B batch, C channels, F frames, H height, W width, N = B * F pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from frameloom.core.errors import ConfigError, DataError
from frameloom.models.layers.attention.diffusers_processor import AttendProcessor
from frameloom.models.layers.patches import fold_frames, unfold_frames
from frameloom.models.vaes.base import Moments, VideoVAE
from frameloom.models.vaes.kl.config import KLConfig

Step = Callable[[Tensor], Tensor]
OVERLAP = 0.25


class KLVAE(VideoVAE):
    """Keys of the state dict are those of diffusers' `AutoencoderKL`."""

    def __init__(self, config: KLConfig) -> None:
        super().__init__(
            strides=config.strides,
            latent_channels=config.latent_channels,
            causal=config.causal,
            scale=config.scale,
            shift=config.shift,
        )
        self.config = config
        self._encode_frames: int | None = None
        self._decode_frames: int | None = None
        self._tile_cells: int | None = None
        parts = AutoencoderKL(**diffusers_arguments(config))
        parts.set_attn_processor(AttendProcessor())
        self.encoder, self.decoder = parts.encoder, parts.decoder
        self.quant_conv, self.post_quant_conv = parts.quant_conv, parts.post_quant_conv

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        self.check_pixels(pixels_BCFHW)
        cells = (self.strides[1], 1)
        return Moments.from_raw(self._run(self._encode_pictures, pixels_BCFHW, frames=self._encode_frames, cells=cells))

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        if latent_BCFHW.ndim != 5 or latent_BCFHW.shape[1] != self.latent_channels:
            raise DataError(
                f"latent of shape {tuple(latent_BCFHW.shape)}: expected (batch, {self.latent_channels}, frames, "
                "height, width)"
            )
        cells = (1, self.strides[1])
        return self._run(self._decode_pictures, latent_BCFHW, frames=self._decode_frames, cells=cells)

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, ResnetBlock2D)]

    def enable_chunking(self, *, encode_frames: int = 1, decode_frames: int = 1) -> None:
        """Encode and decode so many pictures at a time; frames do not see each other, so the result is the same."""
        for name, frames in (("encode_frames", encode_frames), ("decode_frames", decode_frames)):
            if frames < 1:
                raise ConfigError(f"{name} {frames}: choose 1 or more")
        self._encode_frames, self._decode_frames = encode_frames, decode_frames

    def disable_chunking(self) -> None:
        self._encode_frames = self._decode_frames = None

    def enable_tiling(self, *, tile_cells: int = 64) -> None:
        """Cut pictures of more than `tile_cells` latent rows or columns into overlapping tiles and blend them.

        Memory no longer grows with the picture, but the result differs a little: norms and the attention in the middle
        see one tile instead of the whole picture.
        """
        if tile_cells < 4:
            raise ConfigError(f"tile_cells {tile_cells}: choose 4 or more, a quarter of a tile overlaps the next")
        self._tile_cells = tile_cells

    def disable_tiling(self) -> None:
        self._tile_cells = None

    def _encode_pictures(self, pixels_NCHW: Tensor) -> Tensor:
        raw: Tensor = self.quant_conv(self.encoder(pixels_NCHW))
        return raw

    def _decode_pictures(self, latent_NCHW: Tensor) -> Tensor:
        pixels: Tensor = self.decoder(self.post_quant_conv(latent_NCHW))
        return pixels

    def _run(self, step: Step, x_BCFHW: Tensor, *, frames: int | None, cells: tuple[int, int]) -> Tensor:
        """`step` on the frames as pictures; `cells` are the rows of a latent cell before and after it."""
        dtype, num_frames = self.quant_conv.weight.dtype, x_BCFHW.shape[2]
        if self.config.force_upcast and dtype == torch.float16:
            raise ConfigError(
                "kl autoencoder: its activations overflow in float16; keep it in float32 or bfloat16, or set "
                "force_upcast to false for weights that were made for float16 (sdxl-vae-fp16-fix)"
            )
        # Channels last in memory: the convolutions keep it, and are faster in it.
        x_NCHW = fold_frames(x_BCFHW).contiguous(memory_format=torch.channels_last)
        pieces = torch.split(x_NCHW, frames or max(len(x_NCHW), 1))
        with torch.autocast(x_NCHW.device.type, enabled=False) if self.config.force_upcast else nullcontext():
            done = [
                run_in_tiles(step, piece.to(dtype), tile_cells=self._tile_cells, cell_in=cells[0], cell_out=cells[1])
                for piece in pieces
            ]
        y_NCHW = torch.cat(done) if len(done) > 1 else done[0]
        return unfold_frames(y_NCHW.to(x_BCFHW.dtype), num_frames)


def diffusers_arguments(config: KLConfig) -> dict[str, Any]:
    """The same architecture in the words of `AutoencoderKL`."""
    num_levels = len(config.widths)
    return {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * num_levels,
        "up_block_types": ("UpDecoderBlock2D",) * num_levels,
        "block_out_channels": config.widths,
        "layers_per_block": config.num_res_blocks,
        "latent_channels": config.latent_channels,
        "norm_num_groups": config.norm_groups,
    }


def run_in_tiles(
    step: Callable[[Tensor], Tensor], x_NCHW: Tensor, *, tile_cells: int | None, cell_in: int, cell_out: int
) -> Tensor:
    """`step` on tiles; a latent cell is `cell_in` rows and columns of its input and `cell_out` of its result.

    Where a picture fits into one tile, or `tile_cells` is None, `step` sees it whole.
    """
    rows, columns = (side // cell_in for side in x_NCHW.shape[2:])
    if tile_cells is None or max(rows, columns) <= tile_cells:
        return step(x_NCHW)
    places = [(top, left) for top in _cut(rows, tile_cells) for left in _cut(columns, tile_cells)]
    tiles = [step(x_NCHW[:, :, _scale(top, cell_in), _scale(left, cell_in)]) for top, left in places]
    shape = (rows * cell_out, columns * cell_out)
    total = torch.zeros(*tiles[0].shape[:2], *shape, device=x_NCHW.device)
    weight = torch.zeros(shape, device=x_NCHW.device)
    for (top, left), tile in zip(places, tiles, strict=True):
        ramp = _rise(tile.shape[-2], x_NCHW.device)[:, None] * _rise(tile.shape[-1], x_NCHW.device)
        total[:, :, _scale(top, cell_out), _scale(left, cell_out)] += tile * ramp
        weight[_scale(top, cell_out), _scale(left, cell_out)] += ramp
    return (total / weight).to(tiles[0].dtype)


def _cut(length: int, tile: int) -> list[slice]:
    """Tiles that cover `length`; the last one is moved back, so that all are of one size."""
    if length <= tile:
        return [slice(0, length)]
    step = tile - max(1, int(tile * OVERLAP))
    starts = [*range(0, length - tile, step), length - tile]
    return [slice(start, start + tile) for start in starts]


def _scale(cells: slice, factor: int) -> slice:
    return slice(cells.start * factor, cells.stop * factor)


def _rise(length: int, device: torch.device) -> Tensor:
    """Weights that rise from the edges; nowhere zero, because the picture's own edge is in one tile only."""
    index = torch.arange(length, device=device, dtype=torch.float32)
    return ((torch.minimum(index, length - 1 - index) + 0.5) / (length * OVERLAP)).clamp(max=1.0)
