"""The MMDiT leaves as Open_Sora_v2.safetensors is, or as diffusers' Flux where that computes the same.

Flux works on packed tokens and is told their (frame, row, column), so a clip is only a longer list of tokens to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frameloom.models.denoisers.export_forms import ExportForms, as_json, refuse_differences
from frameloom.models.denoisers.opensora2.config import MMDiTConfig

CLASS_NAME = "FluxTransformer2DModel"
_NEEDED = {
    "mlp_ratio": 4.0,
    "theta": 10_000,
    "qkv_bias": True,
    "normalize_vec": False,
    "absolute_positions": False,
}


def describe_diffusers(config: MMDiTConfig) -> Mapping[str, Any]:
    """A condition input is looked for in the weights: one that is still zero does nothing and may be left out."""
    refuse_differences("opensora2", CLASS_NAME, config, _NEEDED)
    return as_json(
        {
            "_class_name": CLASS_NAME,
            "patch_size": 1,
            "in_channels": config.in_channels,
            "num_layers": config.depth,
            "num_single_layers": config.depth_single_blocks,
            "attention_head_dim": config.head_dim,
            "num_attention_heads": config.num_heads,
            "joint_attention_dim": config.context_in_dim,
            "pooled_projection_dim": config.vec_in_dim,
            "guidance_embeds": config.guidance_embed,
            "axes_dims_rope": config.axes_dim,
        }
    )


EXPORT = ExportForms(original_layout="split", diffusers_layout="diffusers", describe_diffusers=describe_diffusers)
