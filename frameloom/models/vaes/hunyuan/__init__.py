"""The Hunyuan autoencoder, as HunyuanVideo and Open-Sora 2.0 use it."""

from __future__ import annotations

from frameloom.models.vaes.base import VAEFamily, VideoVAE
from frameloom.models.vaes.hunyuan.config import SIZES, HunyuanConfig
from frameloom.models.vaes.hunyuan.weights import load_original


def build(config: HunyuanConfig) -> VideoVAE:
    # diffusers takes seconds to import; only those who build this autoencoder wait for it.
    from frameloom.models.vaes.hunyuan.model import HunyuanVAE

    return HunyuanVAE(config)


HUNYUAN_FAMILY = VAEFamily(
    name="hunyuan", config_class=HunyuanConfig, sizes=SIZES, build=build, load_original=load_original
)

__all__ = ["HUNYUAN_FAMILY", "HunyuanConfig"]
