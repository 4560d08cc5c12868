"""Wrappers around a frozen autoencoder: half precision, a few clips at a time, overlapping tiles.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.models.layers.tiles import Tiles
from frameloom.models.layers.tiling import Layers, run_in_tiles
from frameloom.models.precision import Precision
from frameloom.models.vaes.base import Moments, VideoVAE


class HalfVAE(VideoVAE):
    """Rounds the weights of `vae` and runs it in their dtype; what goes in and comes out is float32."""

    def __init__(self, vae: VideoVAE, precision: Precision) -> None:
        super().__init__(
            strides=vae.strides,
            latent_channels=vae.latent_channels,
            causal=vae.causal,
            scale=vae.scale.tolist(),
            shift=vae.shift.tolist(),
        )
        self.vae, self.dtype = vae, precision.weights_dtype
        precision.cast_frozen(vae)

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        moments = self.vae.encode(pixels_BCFHW.to(self.dtype))
        return Moments(moments.mean_BCFHW.float(), moments.logvar_BCFHW.float())

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        return self.vae.decode(latent_BCFHW.to(self.dtype)).float()

    def latent_frames(self, pixel_frames: int) -> int:
        return self.vae.latent_frames(pixel_frames)


class SlicedVAE(VideoVAE):
    """Encodes and decodes `mini_batch` clips at once. No layer of an autoencoder looks at another clip of its batch, so
    the result is that of the whole batch up to the order of sums."""

    def __init__(self, vae: VideoVAE, mini_batch: int) -> None:
        super().__init__(
            strides=vae.strides,
            latent_channels=vae.latent_channels,
            causal=vae.causal,
            scale=vae.scale.tolist(),
            shift=vae.shift.tolist(),
        )
        self.vae, self.mini_batch = vae, mini_batch

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        parts = [self.vae.encode(clips) for clips in torch.split(pixels_BCFHW, self.mini_batch)]
        mean_BCFHW, logvar_BCFHW = (torch.cat(same) for same in zip(*parts, strict=True))
        return Moments(mean_BCFHW, logvar_BCFHW)

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        return torch.cat([self.vae.decode(latents) for latents in torch.split(latent_BCFHW, self.mini_batch)])

    def latent_frames(self, pixel_frames: int) -> int:
        return self.vae.latent_frames(pixel_frames)


class TiledVAE(VideoVAE):
    """Cuts pictures with a side above `tile_px` and runs `vae` on each tile; frames are left to `vae`.

    The result is near that of the whole picture, not equal: a layer near the edge of a tile sees less, and norms and
    attention over a picture see one tile. The fading hides the seams.
    """

    def __init__(self, vae: VideoVAE, *, tile_px: int = 256, overlap: float = 0.25) -> None:
        super().__init__(
            strides=vae.strides,
            latent_channels=vae.latent_channels,
            causal=vae.causal,
            scale=vae.scale.tolist(),
            shift=vae.shift.tolist(),
        )
        self.vae = vae
        self.tile_px, self.overlap = tile_px, overlap
        stride = max(vae.strides[1:])
        step = tile_px * (1 - overlap) if 0 <= overlap < 1 else 0.0
        if tile_px < 1 or tile_px % stride or step < stride or abs(step / stride - round(step / stride)) > 1e-6:
            raise ConfigError(
                f"tiles of {tile_px} pixels with an overlap of {overlap:g}: a tile and its distance to the next, "
                f"{step:g} pixels, must be multiples of {stride}; for instance {32 * stride} pixels with 0.25"
            )

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        self.check_pixels(pixels_BCFHW)
        if max(pixels_BCFHW.shape[3:]) <= self.tile_px:
            return self.vae.encode(pixels_BCFHW)
        joined = self._run(lambda tile: torch.cat(self.vae.encode(tile), dim=1), pixels_BCFHW, decoding=False)
        mean_BCFHW, logvar_BCFHW = joined.chunk(2, dim=1)
        return Moments(mean_BCFHW, logvar_BCFHW)

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        sides = [cells * stride for cells, stride in zip(latent_BCFHW.shape[3:], self.strides[1:], strict=True)]
        if max(sides) <= self.tile_px:
            return self.vae.decode(latent_BCFHW)
        return self._run(self.vae.decode, latent_BCFHW, decoding=True)

    def latent_frames(self, pixel_frames: int) -> int:
        return self.vae.latent_frames(pixel_frames)

    def blocks(self) -> list[nn.Module]:
        return self.vae.blocks()

    def _run(self, layers: Layers, x_BCFHW: Tensor, *, decoding: bool) -> Tensor:
        height, width = (self._tiles(stride, decoding=decoding) for stride in self.strides[1:])
        return run_in_tiles(layers, x_BCFHW, height, width)

    def _tiles(self, stride: int, *, decoding: bool) -> Tiles:
        step_px = round(self.tile_px * (1 - self.overlap))
        return Tiles.of_pixels(self.tile_px, step_px, compression=stride, decoding=decoding)
