"""Names of the samplers and the objectives that each supports, without torch; `samplers.py` runs them."""

from __future__ import annotations

from typing import Literal

SamplerName = Literal["default", "euler", "euler_ancestral", "ddim", "dpmpp_2m", "unipc", "ddpm", "heun"]

_DDPM: tuple[SamplerName, ...] = ("default", "ddim", "euler", "euler_ancestral", "dpmpp_2m", "unipc", "ddpm")
# By kind of objective.
SAMPLERS: dict[str, tuple[SamplerName, ...]] = {
    "flow": ("default", "euler", "heun", "dpmpp_2m", "unipc"),
    "v": _DDPM,
    "epsilon": _DDPM,
    "sample": _DDPM,
    "edm": ("default", "euler", "heun"),
}
