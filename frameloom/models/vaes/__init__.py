"""Autoencoders between pixels and latents, one folder each."""

from __future__ import annotations

from frameloom.models.names import refuse_unknown
from frameloom.models.vaes.base import Moments, VAEFamily, VideoVAE
from frameloom.models.vaes.causal import CAUSAL_FAMILY
from frameloom.models.vaes.cogvideox import COGVIDEOX_FAMILY
from frameloom.models.vaes.dc_ae import DC_AE_FAMILY
from frameloom.models.vaes.hunyuan import HUNYUAN_FAMILY
from frameloom.models.vaes.kl import KL_FAMILY
from frameloom.models.vaes.wfvae import WFVAE_FAMILY

_FAMILIES = (WFVAE_FAMILY, CAUSAL_FAMILY, KL_FAMILY, COGVIDEOX_FAMILY, HUNYUAN_FAMILY, DC_AE_FAMILY)
VAES: dict[str, VAEFamily] = {family.name: family for family in _FAMILIES}


def get_vae(name: str) -> VAEFamily:
    """The family called `name`; ConfigError with the nearest name when there is none."""
    refuse_unknown(name, VAES, what="autoencoder")
    return VAES[name]


__all__ = ["VAES", "Moments", "VAEFamily", "VideoVAE", "get_vae"]
