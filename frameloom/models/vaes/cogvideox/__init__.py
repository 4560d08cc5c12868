"""The autoencoder of CogVideoX and CogVideoX-Fun."""

from __future__ import annotations

from frameloom.models.vaes.base import VAEFamily
from frameloom.models.vaes.cogvideox.config import SIZES, CogVideoXConfig
from frameloom.models.vaes.cogvideox.model import CogVideoXVAE
from frameloom.models.vaes.cogvideox.weights import load_original

COGVIDEOX_FAMILY = VAEFamily(
    name="cogvideox", config_class=CogVideoXConfig, sizes=SIZES, build=CogVideoXVAE, load_original=load_original
)

__all__ = ["COGVIDEOX_FAMILY", "CogVideoXConfig", "CogVideoXVAE"]
