"""LatteT2V leaves under its published keys, or as diffusers' Latte where that computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frameloom.core.errors import ConfigError
from frameloom.models.denoisers.export_forms import ExportForms, as_json, refuse_differences
from frameloom.models.denoisers.latte.config import LatteConfig

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
