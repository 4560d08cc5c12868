"""WFVAE, the wavelet-driven autoencoder of Open-Sora-Plan 1.3."""

from __future__ import annotations

from frameloom.models.vaes.base import VAEFamily
from frameloom.models.vaes.wfvae.config import SIZES, WFVAEConfig
from frameloom.models.vaes.wfvae.fresh import start_as_lowpass
from frameloom.models.vaes.wfvae.model import WFVAE
from frameloom.models.vaes.wfvae.weights import load_original

WFVAE_FAMILY = VAEFamily(
    name="wfvae",
    config_class=WFVAEConfig,
    sizes=SIZES,
    build=WFVAE,
    load_original=load_original,
    start=start_as_lowpass,
)

__all__ = ["WFVAE", "WFVAE_FAMILY", "WFVAEConfig"]
