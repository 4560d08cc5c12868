"""Published OpenSoraT2V checkpoints and `config.json`, read and written.

A text-to-video checkpoint starts an inpaint model: the patch embedding of the masked latent begins as a copy of that of
the noisy latent, the one of the mask stays fresh, and the zero layers behind both keep the model's output as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError
from frameloom.core.logging import get_logger
from frameloom.core.random import stream
from frameloom.models.denoisers.base import initialize
from frameloom.models.denoisers.export_forms import ExportForms, as_json
from frameloom.models.denoisers.opensora_plan.config import OpenSoraPlanConfig
from frameloom.models.layers.patches import PatchEmbed
from frameloom.models.state_dict import load_fitting, strip_wrappers

_MASKED, _MASK = "pos_embed_masked_hidden_states.", "pos_embed_mask."
_log = get_logger(__name__)


def load_original(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill the model from a published checkpoint or one of its own; what does not fit is an error with a list."""
    config, state = cast(OpenSoraPlanConfig, model.config), strip_wrappers(tensors)
    if config.inpaint and not any(key.startswith((_MASKED, _MASK)) for key in state):
        _log.info("opensora_plan checkpoint: text to video only; the inputs of mask and masked latent start afresh")
        state |= start_inpaint(model, state)
    load_fitting(model, state, where="opensora_plan checkpoint")


def start_inpaint(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that an inpaint model has on top of a text-to-video checkpoint."""
    own = model.state_dict()
    try:
        weight, bias = tensors["pos_embed.proj.weight"], tensors["pos_embed.proj.bias"]
    except KeyError as error:
        raise CheckpointError(
            f"opensora_plan checkpoint: {error} is missing, which an inpaint model starts from; choose a checkpoint of "
            "OpenSoraT2V or OpenSoraInpaint 1.3"
        ) from error
    fresh = {key: tensor for key, tensor in own.items() if key.startswith(f"{_MASK}0.")}
    if any(tensor.is_meta for tensor in fresh.values()):
        config = cast(OpenSoraPlanConfig, model.config)
        with torch.device("meta"):
            embed = PatchEmbed(config.vae_scale_factor_t, config.hidden_size, config.patch_size)
        embed.to_empty(device="cpu")
        initialize(embed, stream(0, "opensora_plan mask input"))
        fresh = {f"{_MASK}0.{key}": tensor for key, tensor in embed.state_dict().items()}
    return {
        f"{_MASKED}0.proj.weight": weight.clone(),
        f"{_MASKED}0.proj.bias": bias.clone(),
        **{key: tensor.to(weight.dtype) for key, tensor in fresh.items()},
        **{f"{branch}1.weight": weight.new_zeros(own[f"{branch}1.weight"].shape) for branch in (_MASKED, _MASK)},
    }


def export_original(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights under the published keys."""
    return {key: tensor.detach().contiguous() for key, tensor in model.state_dict().items()}


# Options of the published code that no released model uses; the blocks here do not have them.
_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_fn": ("gelu-approximate",),
    "norm_elementwise_affine": (False,),
    "only_cross_attention": (False,),
    "double_self_attention": (False,),
    "upcast_attention": (True, False),  # the published attention does not read it
    "patch_size_t": (1,),
}
_CLASSES = {False: "OpenSoraT2V_v1_3", True: "OpenSoraInpaint_v1_3"}
_NEEDED = ("in_channels", "num_layers", "num_attention_heads", "attention_head_dim", "patch_size")
_SHARED = (
    *_NEEDED,
    *("sparse1d", "sparse_n", "interpolation_scale_t", "interpolation_scale_h", "interpolation_scale_w", "norm_eps"),
    *("attention_bias", "dropout"),
)
_TEXT = "caption_channels"


def read_config(published: Mapping[str, Any], *, where: str = "config.json") -> OpenSoraPlanConfig:
    """Our config from the `config.json` of a published folder; sizes it was trained on say nothing of the model."""
    inpaint = published.get("_class_name", _CLASSES["vae_scale_factor_t" in published]) == _CLASSES[True]
    for name, allowed in _FIXED.items():
        if name in published and published[name] not in allowed:
            raise CheckpointError(f"{where}: {name} is {published[name]!r}; this family has only {allowed[0]!r}")
    missing = [name for name in (*_NEEDED, _TEXT) if published.get(name) is None]
    if missing:
        raise CheckpointError(f"{where}: {', '.join(missing)} missing; it should describe an OpenSoraT2V_v1_3 model")
    for name, expected in _published_widths(published).items():
        if published.get(name) not in (None, expected):
            raise CheckpointError(f"{where}: {name} is {published[name]!r}; this family has only {expected}")
    known = {name: published[name] for name in _SHARED if name in published}
    if inpaint:
        known["vae_scale_factor_t"] = published.get("vae_scale_factor_t", 4)
    return OpenSoraPlanConfig(**known, context_in_dim=published[_TEXT], inpaint=inpaint)


def _published_widths(published: Mapping[str, Any]) -> dict[str, int]:
    width = published["num_attention_heads"] * published["attention_head_dim"]
    return {"out_channels": published["in_channels"], "cross_attention_dim": width}


def export_config(config: OpenSoraPlanConfig) -> dict[str, Any]:
    """The `config.json` that the published code reads; without skiparse, its masks need a `sparse_n` of 1."""
    content: dict[str, Any] = {"_class_name": _CLASSES[config.inpaint], _TEXT: config.context_in_dim}
    content |= {name: getattr(config, name) for name in _SHARED}
    content |= _published_widths(content)
    content |= {name: allowed[-1] for name, allowed in _FIXED.items()}
    if not config.sparse1d:
        content["sparse_n"] = 1
    if config.inpaint:
        content["vae_scale_factor_t"] = config.vae_scale_factor_t
    return content


EXPORT = ExportForms(describe_original=lambda config: as_json(export_config(config)))
