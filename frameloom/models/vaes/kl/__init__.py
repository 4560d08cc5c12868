"""The picture autoencoder of Stable Diffusion XL, frame by frame. See README.md in this folder."""

from __future__ import annotations

from frameloom.models.vaes.base import VAEFamily, VideoVAE
from frameloom.models.vaes.kl.config import SIZES, KLConfig
from frameloom.models.vaes.kl.weights import load_original


def build(config: KLConfig) -> VideoVAE:
    # diffusers is slow to import, and this record is read whenever any autoencoder is asked for.
    from frameloom.models.vaes.kl.model import KLVAE

    return KLVAE(config)


KL_FAMILY = VAEFamily(name="kl", config_class=KLConfig, sizes=SIZES, build=build, load_original=load_original)

__all__ = ["KL_FAMILY", "KLConfig", "build"]
