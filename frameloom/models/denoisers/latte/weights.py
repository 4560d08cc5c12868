"""Published LatteT2V checkpoints, read and written; diffusers' Latte where it computes the same.

    layout     keys                                                                  published with
    original   transformer_blocks.*, temporal_transformer_blocks.*                   Open-Sora-Plan 1.1, and our own
    mindspore  blocks.*.spatial_block.*, blocks.*.temp_block.*; norms gamma, beta    the MindSpore port
    diffusers  the original without the unused table y_embedding                     LatteTransformer3DModel

Position tables are in no file: a model for other sizes or lengths (`sample_size`, `video_length`) takes the same
weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from torch import Tensor, nn

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.logging import get_logger
from frameloom.models.denoisers.export_forms import ExportForms, as_json, refuse_differences
from frameloom.models.denoisers.latte.config import LatteConfig
from frameloom.models.denoisers.latte.model import SelfAttention
from frameloom.models.state_dict import load_fitting, strip_wrappers

Layout = Literal["original", "mindspore", "diffusers"]
UNUSED = "caption_projection.y_embedding"
_JOINING = re.compile(r".+\.attn1\.(sr|norm)\.(weight|bias)")
_FROM_MINDSPORE = {
    r"^blocks\.(\d+)\.spatial_block\.": r"transformer_blocks.\1.",
    r"^blocks\.(\d+)\.temp_block\.": r"temporal_transformer_blocks.\1.",
    r"\.norm\.gamma$": ".norm.weight",
    r"\.norm\.beta$": ".norm.bias",
}
_TO_MINDSPORE = {
    r"^transformer_blocks\.(\d+)\.": r"blocks.\1.spatial_block.",
    r"^temporal_transformer_blocks\.(\d+)\.": r"blocks.\1.temp_block.",
    r"\.norm\.weight$": ".norm.gamma",
    r"\.norm\.bias$": ".norm.beta",
}
_log = get_logger(__name__)


def detect_layout(keys: Iterable[str]) -> Layout:
    names = list(keys)
    if any(re.match(r"blocks\.\d+\.(spatial|temp)_block\.", name) for name in names):
        return "mindspore"
    if any(name.startswith("temporal_transformer_blocks.") for name in names):
        return "original" if UNUSED in names else "diffusers"
    raise CheckpointError(
        f"latte checkpoint: none of its {len(names)} tensors is a temporal block of LatteT2V "
        f"(first: {', '.join(sorted(names)[:3])}); choose a file of this family"
    )


def _rename(tensors: Mapping[str, Tensor], rules: Mapping[str, str]) -> dict[str, Tensor]:
    result = {}
    for key, tensor in tensors.items():
        for pattern, name in rules.items():
            key = re.sub(pattern, name, key)
        result[key] = tensor
    return result


def load_original(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill a LatteT2V from any layout.

    A file without key and value compression starts it as the mean of neighbours, and the table that no computation
    uses may be absent; anything else that does not fit is an error.
    """
    given = strip_wrappers(tensors)
    state = _rename(given, _FROM_MINDSPORE) if detect_layout(given) == "mindspore" else given
    load_fitting(model, _fill_gaps(state, model), where="latte checkpoint")


def export_original(model: nn.Module, layout: Layout = "original") -> dict[str, Tensor]:
    """The model's weights under the keys of a layout."""
    if layout not in get_args(Layout):
        raise CheckpointError(f"latte checkpoint: layout '{layout}' is not known; choose {', '.join(get_args(Layout))}")
    state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    if layout == "mindspore":
        return _rename(state, _TO_MINDSPORE)
    if layout == "original":
        return state
    if any(_JOINING.fullmatch(key) for key in state) or model.config.use_rope:  # type: ignore[union-attr]
        raise CheckpointError(
            "latte checkpoint: diffusers has neither key and value compression nor rotary positions; "
            "write the original layout"
        )
    return {key: tensor for key, tensor in state.items() if key != UNUSED}


def _fill_gaps(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    own, state = model.state_dict(), dict(tensors)
    like = next(iter(state.values()))
    if UNUSED not in state:
        state[UNUSED] = like.new_zeros(own[UNUSED].shape)
    if not any(_JOINING.fullmatch(key) for key in state):
        fresh = {
            f"{name}.{key}": like.new_full(layer.get_parameter(key).shape, value)
            for name, layer in model.named_modules()
            if isinstance(layer, SelfAttention) and layer.factor > 1
            for key, value in layer.joining_start().items()
        }
        if fresh:
            _log.info("latte checkpoint: no key and value compression; it starts as the mean of neighbours")
        state |= fresh
    return state


CLASS_NAME = "LatteTransformer3DModel"
# Fields of the published json that diffusers' class does not take.
_FOREIGN = ("patch_size_t", "rope_scaling_type", "attention_type", "use_rope", "compress_kv_factor", "_class_name")


def describe_diffusers(config: LatteConfig) -> Mapping[str, Any]:
    """Its temporal positions are not compressed, and it is made for squares."""
    refuse_differences("latte", CLASS_NAME, config, {"use_rope": False, "compress_kv_factor": 1})
    if config.scale_1d != 1 or len(set(config.sample_size)) > 1:
        raise ConfigError(
            f"latte: diffusers' {CLASS_NAME} has temporal positions of scale 1 and a square sample_size, this model "
            f"{config.scale_1d:g} and {list(config.sample_size)}; export it with --to original"
        )
    values = {name: one for name, one in config.to_original().items() if name not in _FOREIGN}
    values.pop("interpolation_scale_1d")
    return as_json(
        {"_class_name": CLASS_NAME, **values, "sample_size": config.sample_size[0], "num_embeds_ada_norm": 1000}
    )


EXPORT = ExportForms(
    original_layout="original",
    describe_original=lambda config: as_json(config.to_original()),
    diffusers_layout="diffusers",
    describe_diffusers=describe_diffusers,
)
