"""Names of the same weights in diffusers' FluxTransformer2DModel, both ways.

Besides names, two things differ: diffusers keeps the value and MLP rows of a single block in two layers, and its
last modulation has the scale before the shift. It has no condition input, and its rotary pairs are (2j, 2j + 1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from frameloom.core.errors import CheckpointError

_TOP = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
}
_DOUBLE = {
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "img_attn.q_proj": "attn.to_q",
    "img_attn.k_proj": "attn.to_k",
    "img_attn.v_proj": "attn.to_v",
    "img_attn.proj": "attn.to_out.0",
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.q_proj": "attn.add_q_proj",
    "txt_attn.k_proj": "attn.add_k_proj",
    "txt_attn.v_proj": "attn.add_v_proj",
    "txt_attn.proj": "attn.to_add_out",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
}
# v_mlp is cut in two before its parts are renamed
_SINGLE = {
    "modulation.lin": "norm.linear",
    "q_proj": "attn.to_q",
    "k_proj": "attn.to_k",
    "v_part": "attn.to_v",
    "mlp_part": "proj_mlp",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
    "linear2": "proj_out",
}
_BLOCKS = {"double_blocks": ("transformer_blocks", _DOUBLE), "single_blocks": ("single_transformer_blocks", _SINGLE)}
_BLOCK_KEY = re.compile(r"(\w+_blocks)\.(\d+)\.(.+)")
_LAST_MODULATION = ("final_layer.adaLN_modulation.1.", "norm_out.linear.")


def _rename(key: str, *, backward: bool) -> str:
    """The other side's name; an unknown key keeps its own, to be reported by whoever loads it."""
    layer, _, leaf = key.rpartition(".")
    prefix, table = "", _TOP
    if block := _BLOCK_KEY.fullmatch(layer):
        for ours, (theirs, layers) in _BLOCKS.items():
            if block[1] == (theirs if backward else ours):
                prefix, table, layer = f"{ours if backward else theirs}.{block[2]}.", layers, block[3]
    names = {theirs: ours for ours, theirs in table.items()} if backward else table
    if layer not in names:
        return key
    name = names[layer]
    # Norms of heads call their parameter `scale` here and `weight` there.
    is_head_norm = (name if backward else layer).endswith(("query_norm", "key_norm"))
    if is_head_norm:
        leaf = "scale" if backward else "weight"
    return f"{prefix}{name}.{leaf}"


def _swap_halves(key: str, tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1]) if key.startswith(_LAST_MODULATION) else tensor


def to_diffusers(split: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From the split layout with pairwise rotary."""
    result: dict[str, Tensor] = {}
    for key, tensor in split.items():
        if key.startswith("cond_in."):
            if tensor.any():
                raise CheckpointError(
                    f"{key}: diffusers' Flux has no condition input, so a model that uses one cannot be written so; "
                    "choose the split or fused layout"
                )
        elif ".v_mlp." in key:
            width = split[key.replace("v_mlp", "q_proj")].shape[0]
            result[_rename(key.replace("v_mlp", "v_part"), backward=False)] = tensor[:width]
            result[_rename(key.replace("v_mlp", "mlp_part"), backward=False)] = tensor[width:]
        else:
            result[_rename(key, backward=False)] = _swap_halves(key, tensor)
    return result


def from_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """To the split layout with pairwise rotary."""
    renamed = {_rename(key, backward=True): _swap_halves(key, tensor) for key, tensor in tensors.items()}
    for key in [key for key in renamed if ".v_part." in key]:
        mlp = renamed.pop(key.replace("v_part", "mlp_part"), None)
        if mlp is not None:
            renamed[key.replace("v_part", "v_mlp")] = torch.cat([renamed.pop(key), mlp])
    return renamed
