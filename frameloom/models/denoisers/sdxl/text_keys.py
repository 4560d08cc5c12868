"""Names of the two text encoders' weights in Stability's single files and in transformers' folders, both ways.

The first one (CLIP-L) has the same names after its prefix. The second one (OpenCLIP bigG) keeps q, k and v in one
tensor, in that order, and its projection transposed: text @ text_projection there, Linear here. Its `logit_scale`
belongs to the contrastive training that it comes from and has no counterpart.

Folder names have the outer `text_model.` of the published folders; newer versions of transformers leave it out of the
first encoder's own state dict, so names without it are understood too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

LOGIT_SCALE = "logit_scale"
POSITION_IDS = "embeddings.position_ids"
_WRAPPER = "text_model."
_TOP = {
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
}
_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_TOP_BACK = {single: folder for folder, single in _TOP.items()}
_LAYER_BACK = {single: folder for folder, single in _LAYER.items()}
_FOLDER_LAYER = re.compile(r"text_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_SINGLE_LAYER = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
_FUSED = re.compile(r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")
_PROJECTION = re.compile(r"self_attn\.([qkv])_proj")


def clip_to_single(key: str) -> str | None:
    """The single file's name (after its prefix) of a tensor of the first encoder; None for one it does not keep."""
    return None if key.endswith(POSITION_IDS) else _wrap(key)


def clip_to_folder(key: str) -> str | None:
    return None if key.endswith(POSITION_IDS) else key


def open_clip_to_single(key: str) -> tuple[str, int] | None:
    """The single file's name of a tensor of the second encoder, and its place among the parts of that tensor."""
    key = _wrap(key)
    if key in _TOP:
        return _TOP[key], 0
    found = _FOLDER_LAYER.fullmatch(key)
    if found is None:
        return None
    start = f"transformer.resblocks.{found[1]}."
    if projection := _PROJECTION.fullmatch(found[2]):
        return f"{start}attn.in_proj_{found[3]}", "qkv".index(projection[1])
    return (f"{start}{_LAYER[found[2]]}.{found[3]}", 0) if found[2] in _LAYER else None


def open_clip_to_folder(key: str) -> list[str]:
    """Folder names of one tensor of the single file: three for q, k and v, none where no rule covers it."""
    if key in _TOP_BACK:
        return [_TOP_BACK[key]]
    if found := _FUSED.fullmatch(key):
        return [f"text_model.encoder.layers.{found[1]}.self_attn.{name}_proj.{found[2]}" for name in "qkv"]
    found = _SINGLE_LAYER.fullmatch(key)
    if found is None or found[2] not in _LAYER_BACK:
        return []
    return [f"text_model.encoder.layers.{found[1]}.{_LAYER_BACK[found[2]]}.{found[3]}"]


def split_open_clip(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """One tensor of the single file as what transformers has; q, k and v are copies, so that they can be saved."""
    names = open_clip_to_folder(key)
    if names == ["text_projection.weight"]:
        return {names[0]: tensor.T.contiguous()}
    if len(names) < 2:
        return dict.fromkeys(names, tensor)
    return {name: piece.clone() for name, piece in zip(names, tensor.chunk(len(names)), strict=True)}


def join_open_clip(single_key: str, parts: Sequence[Tensor]) -> Tensor:
    """The tensor of the single file from its parts, in the order that `open_clip_to_single` gives them."""
    if single_key == "text_projection":
        return parts[0].T.contiguous()
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _wrap(key: str) -> str:
    is_bare = not key.startswith((_WRAPPER, "text_projection."))
    return f"{_WRAPPER}{key}" if is_bare else key
