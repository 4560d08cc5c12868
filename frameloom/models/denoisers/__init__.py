"""Denoiser families by name. A family's folder is imported only when it is asked for."""

from __future__ import annotations

from importlib import import_module

from frameloom.models.denoisers.base import DenoiserFamily
from frameloom.models.names import refuse_unknown

__all__ = ["FAMILIES", "DenoiserFamily", "get_family"]

# name -> package with a FAMILY record
FAMILIES: dict[str, str] = {
    "cogvideox_fun": "frameloom.models.denoisers.cogvideox_fun",
    "latte": "frameloom.models.denoisers.latte",
    "opensora2": "frameloom.models.denoisers.opensora2",
    "opensora_plan": "frameloom.models.denoisers.opensora_plan",
    "sdxl": "frameloom.models.denoisers.sdxl",
}


def get_family(name: str) -> DenoiserFamily:
    refuse_unknown(name, FAMILIES, what="denoiser family")
    family: DenoiserFamily = import_module(FAMILIES[name]).FAMILY
    return family
