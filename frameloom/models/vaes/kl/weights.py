"""Weights of the KL autoencoder: diffusers' folders, Stability's single files, and files of the autoencoder alone.

    diffusers                             single file, after `first_stage_model.`; bare in a file of it alone
    encoder.down_blocks.i.resnets.j       encoder.down.i.block.j
    encoder.down_blocks.i.downsamplers.0  encoder.down.i.downsample
    decoder.up_blocks.i.resnets.j         decoder.up.(3 - i).block.j
    decoder.up_blocks.i.upsamplers.0      decoder.up.(3 - i).upsample
    mid_block.resnets.0, .1               mid.block_1, mid.block_2
    mid_block.attentions.0                mid.attn_1; linear layers are 1x1 convolutions there

The layout is seen from the keys. Files of older versions of diffusers call the attention's layers query, key, value and
proj_attn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from torch import Tensor

from frameloom.core.errors import CheckpointError
from frameloom.models.vaes.base import VideoVAE, load_same_keys
from frameloom.models.vaes.kl.config import NUM_LEVELS

Layout = Literal["diffusers", "single", "bare"]
VAE_PREFIX = "first_stage_model."
# Other parts of a whole single file.
_OTHER_PARTS = ("model.diffusion_model.", "conditioner.")


def load_original(model: VideoVAE, tensors: Mapping[str, Tensor]) -> None:
    """Load any layout, or raise CheckpointError that names what does not fit."""
    load_same_keys(model, to_folder_keys(tensors), where="kl autoencoder weights")


def export_original(model: VideoVAE, layout: Layout) -> dict[str, Tensor]:
    """The autoencoder's weights in a layout."""
    state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    if layout == "diffusers":
        return state
    prefix = VAE_PREFIX if layout == "single" else ""
    named = {str(vae_to_single(key)): tensor for key, tensor in state.items()}
    return {f"{prefix}{key}": vae_tensor_to_single(key, tensor) for key, tensor in named.items()}


def detect_layout(names: Iterable[str]) -> Layout:
    known = list(names)
    if any(name.startswith(VAE_PREFIX) for name in known):
        return "single"
    if any(name.startswith(("encoder.down.", "decoder.up.")) for name in known):
        return "bare"
    if any(name.startswith(("encoder.down_blocks.", "decoder.up_blocks.")) for name in known):
        return "diffusers"
    raise CheckpointError(
        f"kl autoencoder weights: none of the {len(known)} tensors is a block of this autoencoder "
        f"(first: {', '.join(sorted(known)[:3])}); choose a file of it"
    )


def to_folder_keys(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The autoencoder's tensors as diffusers has them; one that no rule covers keeps its name, to be refused by it."""
    layout = detect_layout(tensors)
    result: dict[str, Tensor] = {}
    for key in tensors:
        # Before its tensor is looked at: that would read it from the file.
        if layout == "single" and key.startswith(_OTHER_PARTS):
            continue
        name = _renew(key) if layout == "diffusers" else vae_to_folder(key.removeprefix(VAE_PREFIX))
        result[name or key] = vae_tensor_to_folder(name or key, tensors[key])
    return result


_PLAIN = re.compile(r"(quant_conv|post_quant_conv|(encoder|decoder)\.(conv_in|conv_out))\.(weight|bias)")
_NORM_OUT = re.compile(r"(encoder|decoder)\.(conv_norm_out|norm_out)\.(weight|bias)")
_FOLDER_STAGE = re.compile(
    r"(encoder\.down|decoder\.up)_blocks\.(\d)\.(resnets\.(\d+)|downsamplers\.0|upsamplers\.0)\.(.+)\.(weight|bias)"
)
_SINGLE_STAGE = re.compile(
    r"(encoder\.down|decoder\.up)\.(\d)\.(block\.(\d+)|downsample|upsample)\.(.+)\.(weight|bias)"
)
_FOLDER_MIDDLE = re.compile(r"(encoder|decoder)\.mid_block\.(resnets|attentions)\.(\d)\.(.+)\.(weight|bias)")
_SINGLE_MIDDLE = re.compile(r"(encoder|decoder)\.mid\.(block|attn)_(\d)\.(.+)\.(weight|bias)")
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_ATTENTION_BACK = {single: folder for folder, single in _ATTENTION.items()}
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_RESNET = {name: name for name in ("norm1", "conv1", "norm2", "conv2")} | {"conv_shortcut": "nin_shortcut"}
_RESNET_BACK = {single: folder for folder, single in _RESNET.items()}
_CONV = {"conv": "conv"}
_SAMPLERS = {"downsamplers.0": "downsample", "upsamplers.0": "upsample"}
_SAMPLERS_BACK = {single: folder for folder, single in _SAMPLERS.items()}


def vae_to_single(key: str) -> str | None:
    """The name in a single file, after its prefix; None for a name that no rule covers."""
    if _PLAIN.fullmatch(key):
        return key
    if found := _NORM_OUT.fullmatch(key):
        return f"{found[1]}.norm_out.{found[3]}" if found[2] == "conv_norm_out" else None
    if found := _FOLDER_STAGE.fullmatch(key):
        part, names = (f"block.{found[4]}", _RESNET) if found[4] else (_SAMPLERS[found[3]], _CONV)
        start = f"{found[1]}.{_turn(found[1], int(found[2]))}.{part}"
        return f"{start}.{names[found[5]]}.{found[6]}" if found[5] in names else None
    if found := _FOLDER_MIDDLE.fullmatch(key):
        part, names = ("block", _RESNET) if found[2] == "resnets" else ("attn", _ATTENTION)
        start = f"{found[1]}.mid.{part}_{int(found[3]) + 1}"
        return f"{start}.{names[found[4]]}.{found[5]}" if found[4] in names else None
    return None


def vae_to_folder(key: str) -> str | None:
    """The name in a folder for a name in a single file, without its prefix; None for one that no rule covers."""
    if _PLAIN.fullmatch(key):
        return key
    if found := _NORM_OUT.fullmatch(key):
        return f"{found[1]}.conv_norm_out.{found[3]}" if found[2] == "norm_out" else None
    if found := _SINGLE_STAGE.fullmatch(key):
        part, names = (f"resnets.{found[4]}", _RESNET_BACK) if found[4] else (_SAMPLERS_BACK[found[3]], _CONV)
        start = f"{found[1]}_blocks.{_turn(found[1], int(found[2]))}.{part}"
        return f"{start}.{names[found[5]]}.{found[6]}" if found[5] in names else None
    if found := _SINGLE_MIDDLE.fullmatch(key):
        part, names = ("resnets", _RESNET_BACK) if found[2] == "block" else ("attentions", _ATTENTION_BACK)
        start = f"{found[1]}.mid_block.{part}.{int(found[3]) - 1}"
        return f"{start}.{names[found[4]]}.{found[5]}" if found[4] in names else None
    return None


def _renew(key: str) -> str:
    """A folder's name as diffusers spells it now."""
    found = _FOLDER_MIDDLE.fullmatch(key)
    if found is None or found[2] != "attentions" or found[4] not in _OLD_ATTENTION:
        return key
    return f"{found[1]}.mid_block.attentions.{found[3]}.{_OLD_ATTENTION[found[4]]}.{found[5]}"


def vae_tensor_to_folder(folder_key: str, tensor: Tensor) -> Tensor:
    """1x1 convolutions of the attention become linear layers."""
    is_projection = ".attentions." in folder_key and folder_key.endswith(".weight")
    return tensor[:, :, 0, 0] if is_projection and tensor.shape[2:] == (1, 1) else tensor


def vae_tensor_to_single(single_key: str, tensor: Tensor) -> Tensor:
    is_projection = ".attn_" in single_key and single_key.endswith(".weight") and tensor.ndim == 2
    return tensor[:, :, None, None] if is_projection else tensor


def _turn(side: str, level: int) -> int:
    """The decoder counts its levels from the picture in single files, from the latent in folders."""
    return level if side == "encoder.down" else NUM_LEVELS - 1 - level
