"""Weights of a CausalVAE: published checkpoints, and inflation of image autoencoders.

The kernel of a picture becomes the last tap in time of a causal kernel, and the other taps are zero: every frame is
then treated as the image autoencoder treats a picture, as far as nothing else looks along time. Reads the key layouts
of the first Stable Diffusion releases and of diffusers' AutoencoderKL.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from frameloom.core.logging import get_logger
from frameloom.models.vaes import image_keys
from frameloom.models.vaes.base import VideoVAE, load_same_keys
from frameloom.models.vaes.blocks import COLOURS, ResBlock2D, ResBlock3D
from frameloom.models.vaes.causal.model import CausalVAE, Level
from frameloom.models.vaes.lowpass import ANCHOR, LOGVAR, QUIET, Conv, bias_of, inner_conv, silence_branches

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

# Layers that look along time alone: an image has nothing to say about them.
_OF_TIME = re.compile(r".+\.time_(?:down|up)sample\..+")
_LEVEL = re.compile(r"^decoder\.up_blocks\.(\d+)\.")
_KERNEL_DIMS = {"image": 4, "clip": 5}


def is_image_vae(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the decoder of this state dict starts with a convolution of pictures; those of clips never do."""
    first = tensors.get("decoder.conv_in.weight")
    return first is not None and first.ndim == _KERNEL_DIMS["image"]


def inflate(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of `expected` from an image autoencoder; what has no place keeps its name, for the error list."""
    num_levels = 1 + max((int(match[1]) for key in tensors if (match := _LEVEL.match(key))), default=0)
    given = {image_keys.to_single(key, num_levels) or key: tensor for key, tensor in tensors.items()}
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


# Fresh weights

_ANCHORS = (2 * COLOURS, 2 * COLOURS + 1)
_NUM_PATHS = 2 * COLOURS + 2
_TYPICAL_SQUARE = 1.0


@torch.no_grad()
def start_as_lowpass(model: CausalVAE) -> None:
    """Turn freshly drawn weights into a low-pass autoencoder.

    Models with fewer latent channels than colours, or with norms that would tear the paths apart (a group of less
    than 8 channels, as in the published sizes), stay as drawn.
    """
    config = model.config
    if config.hidden_size // config.norm_groups < _NUM_PATHS or min(config.embed_dim, config.z_channels) < COLOURS:
        return
    silence_branches(model)
    for module in model.modules():
        if isinstance(module, ResBlock2D | ResBlock3D) and module.nin_shortcut is not None:
            _pass_paths(inner_conv(module.nin_shortcut))
        elif isinstance(module, Level):
            for name in module.resizes:
                if getattr(getattr(module, name), "conv", None) is not None:
                    _pass_paths(inner_conv(getattr(module, name).conv))
    first_group = config.widths[-1] // config.norm_groups
    _open_ends(model.encoder.conv_in, model.encoder.conv_out, _norm_of(first_group))
    _open_ends(model.decoder.conv_in, model.decoder.conv_out, _norm_of(config.hidden_size // config.norm_groups))
    spread = inner_conv(model.encoder.conv_out)
    spread.weight[config.z_channels :] *= QUIET
    bias_of(spread)[config.z_channels :] = LOGVAR
    if config.use_quant_layer:
        for layer, split in ((model.quant_conv.conv, config.z_channels), (model.post_quant_conv.conv, None)):
            _pass_through(layer, split)


def _norm_of(channels: int) -> float:
    """What the norm divides a group by that holds the paths and is quiet otherwise."""
    return math.sqrt(2 * (ANCHOR**2 + COLOURS * _TYPICAL_SQUARE / 2) / channels)


def _pass_paths(layer: Conv) -> None:
    """Let a shortcut or a layer that resizes pass the paths."""
    layer.weight.mul_(QUIET)
    bias_of(layer).zero_()
    for path in range(_NUM_PATHS):
        _set_row(layer, path, path, 1.0)


def _open_ends(first: nn.Module, last: nn.Module, norm: float) -> None:
    """Colours in as two copies beside the anchors, and out again as their difference."""
    entry, leave = inner_conv(first), inner_conv(last)
    entry.weight.mul_(QUIET)
    bias_of(entry).zero_()
    for colour in range(COLOURS):
        _set_row(entry, colour, colour, 1.0)
        _set_row(entry, COLOURS + colour, colour, -1.0)
        _set_row(leave, colour, colour, norm)
        _add_tap(leave, colour, COLOURS + colour, -norm)
    for row, anchor in zip(_ANCHORS, (ANCHOR, -ANCHOR), strict=True):
        entry.weight[row] = 0
        bias_of(entry)[row] = anchor


def _pass_through(layer: Conv, split: int | None) -> None:
    """An identity; with `split`, of the means and of the log-variances, each as far as there are outputs."""
    layer.weight.zero_()
    bias_of(layer).zero_()
    outputs, inputs = layer.weight.shape[:2]
    halves = [(0, 0, min(outputs, inputs))]
    if split is not None:
        halves = [(0, 0, min(outputs // 2, split)), (outputs // 2, split, min(outputs // 2, split))]
        bias_of(layer)[outputs // 2 :] = LOGVAR * (outputs // 2 > split)
    for row, column, count in halves:
        for index in range(count):
            layer.weight[row + index, column + index] = 1.0


def _set_row(layer: Conv, row: int, column: int, value: float) -> None:
    """Make an output channel nothing but `value` times an input channel."""
    layer.weight[row] = 0
    bias_of(layer)[row] = 0
    _add_tap(layer, row, column, value)


def _add_tap(layer: Conv, row: int, column: int, value: float) -> None:
    """At the current place and frame; a layer that halves a side takes the mean of the two cells it joins."""
    kernel = layer.weight[row, column]
    taps: list[slice] = []
    dims = (True, False, False) if kernel.ndim == 3 else (False, False)
    for size, stride, is_time in zip(kernel.shape, layer.stride, dims, strict=True):
        if is_time:
            taps.append(slice(size - stride, size))
        elif stride == 2:
            taps.append(slice(0, 2))
        else:
            taps.append(slice(size // 2, size // 2 + 1))
    region = kernel[tuple(taps)]
    region += value / region.numel()
