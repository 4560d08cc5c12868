"""Published Open-Sora 2.0 and Flux checkpoints, read and written: key layouts, rotary pairings, diffusers' Flux keys.

    layout     keys                                                  published with
    fused      img_attn.qkv, single_blocks.*.linear1                 Flux: rotary pairs (2j, 2j + 1)
    split      img_attn.q_proj ..., single_blocks.*.q_proj, v_mlp    Open-Sora 2.0: rotary pairs (j, j + half)
    diffusers  transformer_blocks.*.attn.to_q ...                    FluxTransformer2DModel: pairs (2j, 2j + 1)

Layouts hold the same numbers in other places. Rotary pairings are one function of re-ordered weights: within each
head, the rows of q and k, their biases and the scales of their norms. Tensors do not show which pairing they have.

Besides names, two things differ: diffusers keeps the value and MLP rows of a single block in two layers, and its
last modulation has the scale before the shift. It has no condition input, and its rotary pairs are (2j, 2j + 1).

Flux takes packed tokens and their (frame, row, column), so a clip is only a longer list of tokens to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError
from frameloom.core.logging import get_logger
from frameloom.models.denoisers.export_forms import ExportForms, as_json, refuse_differences
from frameloom.models.denoisers.opensora2.config import MMDiTConfig
from frameloom.models.state_dict import load_fitting

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


Layout = Literal["fused", "split", "diffusers"]
Pairing = Literal["pairwise", "half-split"]
PUBLISHED: dict[Layout, Pairing] = {"fused": "pairwise", "split": "half-split", "diffusers": "pairwise"}

_FUSED = re.compile(r"(.+_attn\.)qkv\.(weight|bias)|(single_blocks\.\d+\.)linear1\.(weight|bias)")
_QUERY = re.compile(r"(.+_attn\.)q_proj\.(weight|bias)|(single_blocks\.\d+\.)q_proj\.(weight|bias)")
_ROTATED_ROWS = re.compile(r".+\.[qk]_proj\.(weight|bias)")
_ROTATED_SCALE = re.compile(r".+\.(query|key)_norm\.scale")
_log = get_logger(__name__)


def detect_layout(keys: Iterable[str]) -> Layout:
    names = list(keys)
    if any(name.startswith(("transformer_blocks.", "single_transformer_blocks.")) for name in names):
        return "diffusers"
    if any(_FUSED.fullmatch(name) for name in names):
        return "fused"
    if any(_QUERY.fullmatch(name) for name in names):
        return "split"
    raise CheckpointError(
        f"opensora2 checkpoint: none of its {len(names)} tensors is a block of Open-Sora 2.0 or Flux "
        f"(first: {', '.join(sorted(names)[:3])}); choose a file of this family"
    )


def order_pairs(head_dim: int, to: Pairing) -> Tensor:
    """Index list that re-orders a head's channels: even ones first for half-split, and its inverse for pairwise."""
    even_first = torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])
    return even_first if to == "half-split" else even_first.argsort()


def split_fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fused to split layout; rows are q, k, v and, in single blocks, the MLP, which stays with v."""
    result: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        match = _FUSED.fullmatch(key)
        if match is None:
            result[key] = tensor
        elif match[1]:
            for name, part in zip("qkv", tensor.chunk(3), strict=False):
                result[f"{match[1]}{name}_proj.{match[2]}"] = part
        else:
            # linear2 maps back to the model's width, so its rows tell where q and k end.
            width = tensors[f"{match[3]}linear2.bias"].shape[0] if f"{match[3]}linear2.bias" in tensors else 0
            q, k, v_mlp = tensor[:width], tensor[width : 2 * width], tensor[2 * width :]
            for name, part in (("q_proj", q), ("k_proj", k), ("v_mlp", v_mlp)):
                result[f"{match[3]}{name}.{match[4]}"] = part
    return result


def fuse_split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split to fused layout; an incomplete triple stays as it is."""
    result = dict(tensors)
    for key in tensors:
        match = _QUERY.fullmatch(key)
        if match is None:
            continue
        prefix, leaf = (match[1], match[2]) if match[1] else (match[3], match[4])
        fused, names = (
            ("qkv", ("q_proj", "k_proj", "v_proj")) if match[1] else ("linear1", ("q_proj", "k_proj", "v_mlp"))
        )
        parts = [f"{prefix}{name}.{leaf}" for name in names]
        if all(part in tensors for part in parts):
            result[f"{prefix}{fused}.{leaf}"] = torch.cat([result.pop(part) for part in parts])
    return result


def reorder_pairs(split: Mapping[str, Tensor], to: Pairing) -> dict[str, Tensor]:
    """Turn weights (split layout) of the one rotary pairing into the same function with the other."""
    head_dim = next((len(tensor) for key, tensor in split.items() if _ROTATED_SCALE.fullmatch(key)), 0)
    index = order_pairs(head_dim, to)
    result = dict(split)
    for key, tensor in split.items():
        if _ROTATED_SCALE.fullmatch(key) and len(tensor) == head_dim:
            result[key] = tensor[index]
        elif _ROTATED_ROWS.fullmatch(key) and head_dim and len(tensor) % head_dim == 0:
            result[key] = torch.unflatten(tensor, 0, (-1, head_dim))[:, index].flatten(0, 1)
    return result


def convert(tensors: Mapping[str, Tensor], *, to: Layout, has: Pairing, wants: Pairing) -> dict[str, Tensor]:
    """The same model in another layout (`to`) and rotary pairing (from `has` to `wants`)."""
    layout = detect_layout(tensors)
    if (layout, has) == (to, wants):
        return dict(tensors)
    split = _TO_SPLIT[layout](tensors)
    if has != wants:
        split = reorder_pairs(split, wants)
    return _FROM_SPLIT[to](split)


Step = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
_TO_SPLIT: dict[Layout, Step] = {"fused": split_fused, "split": dict, "diffusers": from_diffusers}
_FROM_SPLIT: dict[Layout, Step] = {"fused": fuse_split, "split": dict, "diffusers": to_diffusers}


def own_form(config: MMDiTConfig) -> tuple[Layout, Pairing]:
    return "fused" if config.fused_qkv else "split", "half-split" if config.use_liger_rope else "pairwise"


def load_original(model: nn.Module, tensors: Mapping[str, Tensor], *, pairing: Pairing | None = None) -> None:
    """Fill an MMDiT from any layout.

    Tensors in the model's own key layout are taken to have its own rotary pairing, those in another layout the
    published one; `pairing` says otherwise. A file without a condition input leaves it at zero, and the guidance
    embedding of a distilled file is left out of a model that has none; anything else that does not fit is an error.
    """
    config: MMDiTConfig = model.config  # type: ignore[assignment]
    layout, own = detect_layout(tensors), own_form(config)
    if pairing is None:
        pairing = own[1] if layout == own[0] else PUBLISHED[layout]
        if layout == own[0] and PUBLISHED[layout] != pairing:
            _log.warning(
                "opensora2 checkpoint: taken to have %s rotary pairs like the model; published %s files have %s ones",
                pairing,
                layout,
                PUBLISHED[layout],
            )
    converted = convert(tensors, to=own[0], has=pairing, wants=own[1])
    load_fitting(model, _fill_gaps(converted, model), where="opensora2 checkpoint")


def export_original(model: nn.Module, layout: Layout, *, pairing: Pairing | None = None) -> dict[str, Tensor]:
    """The model's weights in a layout, with the rotary pairing that this layout is published with."""
    config: MMDiTConfig = model.config  # type: ignore[assignment]
    state = {key: tensor.detach() for key, tensor in model.state_dict().items()}
    converted = convert(state, to=layout, has=own_form(config)[1], wants=pairing or PUBLISHED[layout])
    return {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in converted.items()}


def _fill_gaps(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    own = model.state_dict()
    state = dict(tensors)
    if not any(key.startswith("guidance_in.") for key in own) and any(key.startswith("guidance_in.") for key in state):
        _log.warning("opensora2 checkpoint: its guidance embedding is left out, the model has none (guidance_embed)")
        state = {key: tensor for key, tensor in state.items() if not key.startswith("guidance_in.")}
    if "cond_in.weight" in own and not any(key.startswith("cond_in.") for key in state):
        _log.info("opensora2 checkpoint: no condition input; it starts from zeros")
        like = next(iter(state.values()))
        state |= {key: like.new_zeros(own[key].shape) for key in ("cond_in.weight", "cond_in.bias")}
    return state


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
