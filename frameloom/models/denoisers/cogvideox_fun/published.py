"""The published `config.json` of a transformer folder, to our config and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.models.denoisers.cogvideox_fun.config import FAMILY_NAME, CogVideoXFunConfig

CLASS_NAME = "CogVideoXTransformer3DModel"

# Settings that every published model has alike, so the code has no switch for them.
_FIXED: dict[str, Any] = {
    "activation_fn": "gelu-approximate",
    "ofs_embed_dim": None,
}
_OURS = ("condition", "mask_scale")
# ours -> published
_RENAMED = {"in_channels": "out_channels", "context_in_dim": "text_embed_dim"}
# What an absent key means in the published code.
_DEFAULTS: dict[str, Any] = {"num_attention_heads": 30, "num_layers": 30, "in_channels": 16, "out_channels": 16}


def read_published(published: Mapping[str, Any], *, mask_scale: float = 1.0) -> CogVideoXFunConfig:
    """The architecture that a published config describes; `mask_scale` is the `scaling_factor` of its autoencoder."""
    values = _DEFAULTS | {key: value for key, value in published.items() if not key.startswith("_")}
    ours = [field.name for field in dataclasses.fields(CogVideoXFunConfig) if field.name not in _OURS]
    names = {_RENAMED.get(name, name): name for name in ours}
    for key in values:
        refuse_unknown(key, {*names, *_FIXED, "in_channels"}, what=f"{FAMILY_NAME} config.json")
    for key, only in _FIXED.items():
        if values.pop(key, only) != only:
            raise ConfigError(f"{FAMILY_NAME} config.json: {key} is {published[key]!r}; only {only!r} is supported")
    condition = _find_condition(values.pop("in_channels"), values["out_channels"])
    values["patch_size_t"] = values.get("patch_size_t") or 1
    if values.get("timestep_activation_fn") == "swish":  # two names of one function
        values["timestep_activation_fn"] = "silu"
    fields = {names[key]: value for key, value in values.items()}
    return CogVideoXFunConfig(**fields, condition=condition, mask_scale=mask_scale)


def write_published(config: CogVideoXFunConfig) -> dict[str, Any]:
    """The content of `config.json` for diffusers and for the original code."""
    ours = {name: value for name, value in dataclasses.asdict(config).items() if name not in _OURS}
    values = {_RENAMED.get(name, name): value for name, value in ours.items()}
    values["patch_size_t"] = None if config.patch_size_t == 1 else config.patch_size_t
    fixed = {key: value for key, value in _FIXED.items() if key != "ofs_embed_dim"}
    return {"_class_name": CLASS_NAME, **values, **fixed, "in_channels": config.input_channels}


def _find_condition(in_channels: int, out_channels: int) -> Literal["none", "inpaint", "control"]:
    beside = in_channels - out_channels
    if beside == 0:
        return "none"
    if beside == out_channels + 1:
        return "inpaint"
    if beside == out_channels:
        return "control"
    raise ConfigError(
        f"{FAMILY_NAME} config.json: in_channels is {in_channels} for {out_channels} latent channels; known are "
        f"{out_channels} (text to video), {2 * out_channels + 1} (inpaint) and {2 * out_channels} (control)"
    )
