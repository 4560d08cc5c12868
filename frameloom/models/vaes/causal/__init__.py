"""CausalVAE, the autoencoder of Open-Sora-Plan 1.0 to 1.2. See README.md in this folder."""

from __future__ import annotations

from frameloom.models.vaes.base import VAEFamily
from frameloom.models.vaes.causal.config import SIZES, CausalVAEConfig
from frameloom.models.vaes.causal.inflation import is_image_vae
from frameloom.models.vaes.causal.model import CausalVAE
from frameloom.models.vaes.causal.start import start_as_lowpass
from frameloom.models.vaes.causal.weights import load_original

CAUSAL_FAMILY = VAEFamily(
    name="causal",
    config_class=CausalVAEConfig,
    sizes=SIZES,
    build=CausalVAE,
    load_original=load_original,
    start=start_as_lowpass,
    inflates=is_image_vae,
)

__all__ = ["CAUSAL_FAMILY", "CausalVAE", "CausalVAEConfig"]
