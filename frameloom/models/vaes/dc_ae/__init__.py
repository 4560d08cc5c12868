"""The deep-compression video autoencoder of Open-Sora 2.0."""

from __future__ import annotations

from frameloom.models.vaes.base import VAEFamily
from frameloom.models.vaes.dc_ae.config import SIZES, DCAEConfig
from frameloom.models.vaes.dc_ae.model import DCAE
from frameloom.models.vaes.dc_ae.weights import load_original

DC_AE_FAMILY = VAEFamily(name="dc_ae", config_class=DCAEConfig, sizes=SIZES, build=DCAE, load_original=load_original)

__all__ = ["DCAE", "DC_AE_FAMILY", "DCAEConfig"]
