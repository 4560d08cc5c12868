"""Weight names of SDXL's UNet and text encoders in diffusers' folders and in single files, both ways.

    diffusers                          single file, n = num_res_blocks
    down_blocks.i.resnets.j            input_blocks.(1 + (n + 1) i + j).0
    down_blocks.i.attentions.j         input_blocks.(1 + (n + 1) i + j).1
    down_blocks.i.downsamplers.0.conv  input_blocks.((n + 1)(i + 1)).0.op
    mid_block.resnets.0, .1            middle_block.0, middle_block.2
    mid_block.attentions.0             middle_block.1
    up_blocks.i.resnets.j              output_blocks.((n + 1) i + j).0
    up_blocks.i.attentions.j           output_blocks.((n + 1) i + j).1
    up_blocks.i.upsamplers.0.conv      output_blocks.((n + 1) i + n).2.conv, or .1.conv without attention

Names inside a transformer are the same. Values and shapes are the same everywhere.

CLIP-L, the first text encoder, has the same names after its prefix. OpenCLIP bigG, the second, keeps q, k and v in one
tensor, in that order, and its projection transposed: text @ text_projection there, Linear here. Its `logit_scale`
belongs to the contrastive training that it comes from and has no counterpart.

Folder names have the outer `text_model.` of the published folders; newer versions of transformers leave it out of
CLIP-L's own state dict, so names without it are understood too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# UNet

_TOP = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_TOP_BACK = {single: folder for folder, single in _TOP.items()}
_RESNET_BACK = {single: folder for folder, single in _RESNET.items()}
_STAGE = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")
_MIDDLE = re.compile(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)")
_SINGLE_STAGE = re.compile(r"(input|output)_blocks\.(\d+)\.(\d)\.(.+)")
_SINGLE_MIDDLE = re.compile(r"middle_block\.(\d)\.(.+)")
_MIDDLE_PLACES = {("resnets", "0"): "0", ("attentions", "0"): "1", ("resnets", "1"): "2"}
_MIDDLE_PARTS = {place: part for part, place in _MIDDLE_PLACES.items()}
_DOWNSAMPLER = re.compile(r"input_blocks\.(\d+)\.0\.op\.")


@dataclass(frozen=True)
class UNetNames:
    """The map for one architecture; a name that no rule covers gives None.

    `attention_up` are the indices of up blocks with attention; only the way to the single file needs them.
    """

    num_res_blocks: int
    attention_up: frozenset[int] = frozenset()

    @classmethod
    def read(cls, keys: Iterable[str]) -> UNetNames:
        """The map that fits a whole list of keys, of either layout and without a prefix."""
        names = list(keys)
        folder = [found for name in names if (found := _STAGE.fullmatch(name))]
        if folder:
            counts = [int(found[4]) + 1 for found in folder if found[1] == "down" and found[3] == "resnets"]
            up = frozenset(int(found[2]) for found in folder if found[1] == "up" and found[3] == "attentions")
            return cls(max(counts, default=0), up)
        places = [int(found[1]) for name in names if (found := _DOWNSAMPLER.match(name))]
        last = [int(found[2]) for name in names if (found := _SINGLE_STAGE.fullmatch(name)) and found[1] == "input"]
        # A UNet of one level has no downsampler, so all its input blocks belong to that level.
        return cls(min(places) - 1 if places else max(last, default=0))

    def to_single(self, key: str) -> str | None:
        layer, _, leaf = key.rpartition(".")
        if layer in _TOP:
            return f"{_TOP[layer]}.{leaf}"
        if found := _MIDDLE.fullmatch(key):
            place = _MIDDLE_PLACES.get((found[1], found[2]))
            inner = _rename_inner(found[1], found[3], _RESNET)
            return f"middle_block.{place}.{inner}" if place and inner else None
        if found := _STAGE.fullmatch(key):
            return self._stage_to_single(found[1], int(found[2]), found[3], int(found[4]), found[5])
        return None

    def to_folder(self, key: str) -> str | None:
        layer, _, leaf = key.rpartition(".")
        if layer in _TOP_BACK:
            return f"{_TOP_BACK[layer]}.{leaf}"
        if found := _SINGLE_MIDDLE.fullmatch(key):
            part, index = _MIDDLE_PARTS.get(found[1], ("", ""))
            inner = _rename_inner(part, found[2], _RESNET_BACK) if part else None
            return f"mid_block.{part}.{index}.{inner}" if inner else None
        if found := _SINGLE_STAGE.fullmatch(key):
            return self._stage_to_folder(found[1], int(found[2]), found[3], found[4])
        return None

    def _stage_to_single(self, side: str, level: int, part: str, index: int, rest: str) -> str | None:
        first = (self.num_res_blocks + 1) * level
        if part in ("resnets", "attentions"):
            inner = _rename_inner(part, rest, _RESNET)
            place = 0 if part == "resnets" else 1
            start = f"input_blocks.{1 + first + index}" if side == "down" else f"output_blocks.{first + index}"
            return f"{start}.{place}.{inner}" if inner else None
        if index != 0 or not rest.startswith("conv."):
            return None
        if side == "down" and part == "downsamplers":
            return f"input_blocks.{first + self.num_res_blocks + 1}.0.op.{rest.removeprefix('conv.')}"
        if side == "up" and part == "upsamplers":
            return f"output_blocks.{first + self.num_res_blocks}.{2 if level in self.attention_up else 1}.{rest}"
        return None

    def _stage_to_folder(self, side: str, block: int, place: str, rest: str) -> str | None:
        level, index = divmod(block - 1 if side == "input" else block, self.num_res_blocks + 1)
        start = f"{'down' if side == 'input' else 'up'}_blocks.{level}"
        if side == "input" and place == "0" and rest.startswith("op."):
            return f"{start}.downsamplers.0.conv.{rest.removeprefix('op.')}"
        if side == "output" and place in "12" and rest.startswith("conv."):
            return f"{start}.upsamplers.0.{rest}"
        if place not in "01":
            return None
        part = "resnets" if place == "0" else "attentions"
        inner = _rename_inner(part, rest, _RESNET_BACK)
        return f"{start}.{part}.{index}.{inner}" if inner else None


def _rename_inner(part: str, rest: str, names: dict[str, str]) -> str | None:
    if part == "attentions":
        return rest
    layer, _, leaf = rest.rpartition(".")
    return f"{names[layer]}.{leaf}" if layer in names else None


# Text encoders

LOGIT_SCALE = "logit_scale"
POSITION_IDS = "embeddings.position_ids"
_WRAPPER = "text_model."
_TEXT_TOP = {
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
}
_TEXT_TOP_BACK = {single: folder for folder, single in _TEXT_TOP.items()}
_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_LAYER_BACK = {single: folder for folder, single in _LAYER.items()}
_FOLDER_LAYER = re.compile(r"text_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_SINGLE_LAYER = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
_FUSED = re.compile(r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")
_PROJECTION = re.compile(r"self_attn\.([qkv])_proj")


def open_clip_to_single(key: str) -> tuple[str, int] | None:
    """The single file's name of a tensor of the second encoder, and its place among the parts of that tensor."""
    key = wrap_text(key)
    if key in _TEXT_TOP:
        return _TEXT_TOP[key], 0
    found = _FOLDER_LAYER.fullmatch(key)
    if found is None:
        return None
    start = f"transformer.resblocks.{found[1]}."
    if projection := _PROJECTION.fullmatch(found[2]):
        return f"{start}attn.in_proj_{found[3]}", "qkv".index(projection[1])
    return (f"{start}{_LAYER[found[2]]}.{found[3]}", 0) if found[2] in _LAYER else None


def open_clip_to_folder(key: str) -> list[str]:
    """Folder names of one tensor of the single file: three for q, k and v, none where no rule covers it."""
    if key in _TEXT_TOP_BACK:
        return [_TEXT_TOP_BACK[key]]
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


def wrap_text(key: str) -> str:
    """One spelling of the names of text encoders, which differ between versions of transformers; the first encoder has
    it in the single file, too."""
    is_bare = not key.startswith((_WRAPPER, "text_projection."))
    return f"{_WRAPPER}{key}" if is_bare else key
