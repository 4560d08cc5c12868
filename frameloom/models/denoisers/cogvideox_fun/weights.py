"""Published CogVideoX-Fun checkpoints and `config.json`, read and written; keys are those of diffusers' class.

Only the patch projection may have another number of input channels than the model, as in the published code: a text to
video checkpoint becomes an inpaint or control model whose new inputs start from zeros.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.core.logging import get_logger
from frameloom.core.spelling import refuse_unknown
from frameloom.models.denoisers.cogvideox_fun.config import FAMILY_NAME, CogVideoXFunConfig
from frameloom.models.denoisers.export_forms import ExportForms, as_json
from frameloom.models.lora.keys import LoraNames
from frameloom.models.state_dict import load_fitting

PROJECTION = "patch_embed.proj.weight"
# Tables that some repacked files carry although the model computes them.
_TABLES = ("pos_embedding", "patch_embed.pos_embedding")
LORA_NAMES = LoraNames(root="lora_unet__")
_log = get_logger(__name__)


def fit_input_channels(weight: Tensor, num_inputs: int) -> Tensor:
    """The projection [D, inputs, ...] for another number of inputs: zeros behind the last one, or a cut tail.

    In the linear form of V1.5 inputs are patch features, which run over channels first, so it holds there as well.
    """
    if weight.shape[1] >= num_inputs:
        return weight[:, :num_inputs]
    missing = weight.new_zeros(len(weight), num_inputs - weight.shape[1], *weight.shape[2:])
    return torch.cat([weight, missing], dim=1)


def load_original(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill a model from a published checkpoint or one of its own; what does not fit is refused with a list."""
    own = model.state_dict()
    state = {key: tensor for key, tensor in tensors.items() if key in own or key not in _TABLES}
    if PROJECTION in state:
        weight = state[PROJECTION]
        given, wanted = weight.shape, own[PROJECTION].shape
        if given != wanted and len(given) == len(wanted) and (given[0], given[2:]) == (wanted[0], wanted[2:]):
            if given[1] < wanted[1]:
                words, level = "%s checkpoint: %d inputs for %d; the new ones start from zeros", logging.INFO
            else:
                words, level = "%s checkpoint: %d inputs for %d; the last ones are cut off", logging.WARNING
            _log.log(level, words, FAMILY_NAME, given[1], wanted[1])
            state[PROJECTION] = fit_input_channels(weight, wanted[1])
    load_fitting(model, state, where=f"{FAMILY_NAME} checkpoint")


def export_original(model: nn.Module) -> dict[str, Tensor]:
    """The weights as a published folder holds them; `write_published` gives its `config.json`."""
    state = model.state_dict()
    return {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in state.items()}


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


def read_config(published: Mapping[str, Any], *, mask_scale: float = 1.0) -> CogVideoXFunConfig:
    """The architecture that a published config describes; `mask_scale` is the `scaling_factor` of its autoencoder."""
    values = _DEFAULTS | {key: value for key, value in published.items() if not key.startswith("_")}
    ours = [field.name for field in dataclasses.fields(CogVideoXFunConfig) if field.name not in _OURS]
    names = {_RENAMED.get(name, name): name for name in ours}
    for key in values:
        refuse_unknown(key, {*names, *_FIXED, "in_channels"}, what=f"{FAMILY_NAME} config.json")
    for key, only in _FIXED.items():
        if values.pop(key, only) != only:
            raise ConfigError(f"{FAMILY_NAME} config.json: {key} is {published[key]!r}; only {only!r} is supported")
    in_channels, channels = values.pop("in_channels"), values["out_channels"]
    conditions: dict[int, Literal["none", "inpaint", "control"]]
    conditions = {channels: "none", 2 * channels + 1: "inpaint", 2 * channels: "control"}
    if in_channels not in conditions:
        raise ConfigError(
            f"{FAMILY_NAME} config.json: in_channels is {in_channels} for {channels} latent channels; known are "
            f"{channels} (text to video), {2 * channels + 1} (inpaint) and {2 * channels} (control)"
        )
    values["patch_size_t"] = values.get("patch_size_t") or 1
    if values.get("timestep_activation_fn") == "swish":  # two names of one function
        values["timestep_activation_fn"] = "silu"
    fields = {names[key]: value for key, value in values.items()}
    return CogVideoXFunConfig(**fields, condition=conditions[in_channels], mask_scale=mask_scale)


def write_published(config: CogVideoXFunConfig) -> dict[str, Any]:
    """The content of `config.json` for diffusers and for the original code."""
    ours = {name: value for name, value in dataclasses.asdict(config).items() if name not in _OURS}
    values = {_RENAMED.get(name, name): value for name, value in ours.items()}
    values["patch_size_t"] = None if config.patch_size_t == 1 else config.patch_size_t
    fixed = {key: value for key, value in _FIXED.items() if key != "ofs_embed_dim"}
    return {"_class_name": CLASS_NAME, **values, **fixed, "in_channels": config.input_channels}


# diffusers has no pipeline for inpaint models, whose mask has a channel of its own.
_PIPELINES = {"none": "CogVideoXPipeline", "control": "CogVideoXFunControlPipeline"}


def describe_diffusers(config: CogVideoXFunConfig) -> Mapping[str, Any]:
    # A setting of the published trainer that no model computes with.
    return as_json({name: one for name, one in write_published(config).items() if name != "add_noise_in_inpaint_model"})


EXPORT = ExportForms(
    describe_original=lambda config: as_json(write_published(config)),
    describe_diffusers=describe_diffusers,
    pipeline=lambda config: _PIPELINES.get(config.condition, ""),
)
