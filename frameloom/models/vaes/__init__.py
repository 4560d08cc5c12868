"""Autoencoders between pixels and latents, one folder each."""

from __future__ import annotations

from frameloom.models.names import refuse_unknown
from frameloom.models.vaes.base import Moments, VAEFamily, VideoVAE
from frameloom.models.vaes.wfvae import WFVAE_FAMILY

VAES: dict[str, VAEFamily] = {family.name: family for family in (WFVAE_FAMILY,)}


def get_vae(name: str) -> VAEFamily:
    """The family called `name`; ConfigError with the nearest name when there is none."""
    refuse_unknown(name, VAES, what="autoencoder")
    return VAES[name]


__all__ = ["VAES", "Moments", "VAEFamily", "VideoVAE", "get_vae"]
