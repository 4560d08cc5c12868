"""The Hunyuan autoencoder: diffusers' layers, with our attention in the middle and our tiles around.

Shape letters: B batch, C channels, F frames, H height, W width. Strides are (4, 8, 8).
"""

from __future__ import annotations

from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import (
    AutoencoderKLHunyuanVideo,
    HunyuanVideoResnetBlockCausal3D,
)
from torch import Tensor, nn

from frameloom.models.layers.tiles import Cuts
from frameloom.models.layers.tiling import run_in_cuts
from frameloom.models.vaes.base import Moments, VideoVAE
from frameloom.models.vaes.hunyuan.attention import FrameCausalAttention, MiddleBlock
from frameloom.models.vaes.hunyuan.config import HunyuanConfig


class HunyuanVAE(VideoVAE):
    """Its keys are those of published files."""

    def __init__(self, config: HunyuanConfig) -> None:
        super().__init__(
            strides=config.strides,
            latent_channels=config.latent_channels,
            causal=config.causal,
            scale=config.scale,
            shift=config.shift,
        )
        self.config = config
        whole = AutoencoderKLHunyuanVideo(
            latent_channels=config.latent_channels,
            block_out_channels=config.block_channels,
            layers_per_block=config.layers_per_block,
            norm_num_groups=config.norm_groups,
            mid_block_add_attention=False,
        )
        self.encoder = whole.encoder
        self.decoder = whole.decoder
        self.quant_conv = whole.quant_conv
        self.post_quant_conv = whole.post_quant_conv
        for half in (self.encoder, self.decoder):
            width = config.block_channels[-1]
            attention = FrameCausalAttention(width, config.norm_groups) if config.attention else None
            half.mid_block = MiddleBlock(half.mid_block.resnets, attention)

    def encode(self, pixels_BCFHW: Tensor) -> Moments:
        return Moments.from_raw(self.encode_raw(pixels_BCFHW))

    def encode_raw(self, pixels_BCFHW: Tensor) -> Tensor:
        """Means and unclamped log-variances, one behind the other in the channels; tiles fade before any sampling."""
        self.check_pixels(pixels_BCFHW)
        return run_in_cuts(lambda x: self.quant_conv(self.encoder(x)), pixels_BCFHW, self.encode_cuts())

    def decode(self, latent_BCFHW: Tensor) -> Tensor:
        cuts = self._cuts(decoding=True)
        return run_in_cuts(lambda z: self.decoder(self.post_quant_conv(z)), latent_BCFHW, cuts)

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, HunyuanVideoResnetBlockCausal3D)]

    def encode_cuts(self) -> Cuts:
        return self._cuts(decoding=False)

    def _cuts(self, *, decoding: bool) -> Cuts:
        config = self.config
        side, time = (config.tiles(in_time=in_time, decoding=decoding) for in_time in (False, True))
        return Cuts(
            space=(side, side) if config.spatial_tiling else None,
            time=time if config.temporal_tiling else None,
            lead=1,
            one_by_one=config.one_by_one,
        )
