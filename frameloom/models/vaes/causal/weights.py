"""Weights of a CausalVAE: published checkpoints, and inflation of image autoencoders.

The kernel of a picture becomes the last tap in time of a causal kernel, and the other taps are zero: every frame is
then treated as the image autoencoder treats a picture, as far as nothing else looks along time. Reads the key layouts
of the first Stable Diffusion releases and of diffusers' AutoencoderKL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from frameloom.core.logging import get_logger
from frameloom.models.vaes.base import VideoVAE, load_same_keys

_log = get_logger(__name__)


def load_original(model: VideoVAE, tensors: Mapping[str, Tensor]) -> None:
    """Load a state dict with published keys, or raise CheckpointError that names what does not fit.

    A `module.` prefix goes, and so does the loss network that files of version 1.1 carry. The weights of an image
    autoencoder of the same widths (Stable Diffusion's) are inflated: its kernels become those of the current frame,
    and layers that resize in time stay as they start.
    """
    given = {key.replace("module.", ""): tensor for key, tensor in tensors.items()}
    given = {key: tensor for key, tensor in given.items() if not key.startswith("loss.")}
    if is_image_vae(given):
        _log.info("CausalVAE weights: an image autoencoder; its kernels become those of the current frame")
        given = inflate(given, model.state_dict())
    load_same_keys(model, given, where="CausalVAE weights")


def export_original(model: VideoVAE) -> dict[str, Tensor]:
    """The model's weights under the published keys."""
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


# Inflation of image autoencoders

# diffusers -> first releases; the levels of the decoder are counted from the other end there.
_DIFFUSERS = (
    (r"^encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.", r"encoder.down.\1.block.\2."),
    (r"^encoder\.down_blocks\.(\d+)\.downsamplers\.0\.", r"encoder.down.\1.downsample."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.", ".mid.attn_1."),
    (r"\.attn_1\.group_norm\.", ".attn_1.norm."),
    (r"\.attn_1\.(?:to_q|query)\.", ".attn_1.q."),
    (r"\.attn_1\.(?:to_k|key)\.", ".attn_1.k."),
    (r"\.attn_1\.(?:to_v|value)\.", ".attn_1.v."),
    (r"\.attn_1\.(?:to_out\.0|proj_attn)\.", ".attn_1.proj_out."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.conv_norm_out\.", ".norm_out."),
)
_UP = re.compile(r"^decoder\.up_blocks\.(\d+)\.(?:resnets\.(\d+)|upsamplers\.0)\.")
# Layers that look along time alone: an image has nothing to say about them.
_OF_TIME = re.compile(r".+\.time_(?:down|up)sample\..+")
_KERNEL_DIMS = {"image": 4, "clip": 5}


def is_image_vae(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the decoder of this state dict starts with a convolution of pictures; those of clips never do."""
    first = tensors.get("decoder.conv_in.weight")
    return first is not None and first.ndim == _KERNEL_DIMS["image"]


def inflate(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of `expected` from an image autoencoder; what has no place keeps its name, for the error list."""
    given = _rename_diffusers(tensors)
    result: dict[str, Tensor] = {}
    for key, own in expected.items():
        source = key if key in given else re.sub(r"\.conv(\.\w+)$", r"\1", key)
        if source in given:
            result[key] = _add_time(given.pop(source), own)
        elif _OF_TIME.fullmatch(key) and not own.is_meta:
            result[key] = own
    return result | given


def _add_time(tensor: Tensor, own: Tensor) -> Tensor:
    if tensor.ndim == 2 and own.ndim >= _KERNEL_DIMS["image"]:
        tensor = tensor[:, :, None, None]  # a linear layer in place of a 1x1 convolution
    if tensor.ndim != _KERNEL_DIMS["image"] or own.ndim != _KERNEL_DIMS["clip"]:
        return tensor
    past = tensor.new_zeros(*tensor.shape[:2], own.shape[2] - 1, *tensor.shape[2:])
    return torch.cat([past, tensor[:, :, None]], dim=2)


def _rename_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    levels = [int(match[1]) for key in tensors if (match := _UP.match(key))]
    top = max(levels, default=0)

    def turn(match: re.Match[str]) -> str:
        level = top - int(match[1])
        return f"decoder.up.{level}.{'upsample' if match[2] is None else f'block.{match[2]}'}."

    renamed = {}
    for key, tensor in tensors.items():
        key = _UP.sub(turn, key)
        for pattern, replacement in _DIFFUSERS:
            key = re.sub(pattern, replacement, key)
        renamed[key] = tensor
    return renamed
