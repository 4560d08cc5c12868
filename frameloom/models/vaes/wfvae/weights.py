"""Weights of a WFVAE: published checkpoints, and low-pass initialisation.

From random weights a small WFVAE spends hundreds of steps on brightness and only then finds colour, because encoder and
decoder must learn to agree on both. `start_as_lowpass` passes the colours of 8x8 blocks straight through the latent
and, where there are enough latent channels, their edges and changes. Residual branches start as identities, and
everything else is left to training. Published trainings start from random weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from frameloom.models.vaes.base import VideoVAE, load_same_keys
from frameloom.models.vaes.wfvae.blocks import FrameAttention, FrameConv2d, ResBlock2D, ResBlock3D
from frameloom.models.vaes.wfvae.model import COLOURS, WFVAE
from frameloom.models.vaes.wfvae.wavelet import HaarJoin2D, HaarJoin3D, HaarSplit2D, HaarSplit3D

# Where a training checkpoint keeps the weights, best first.
SECTIONS = ("ema_state_dict", "state_dict.gen_model", "state_dict")
_FILTERS = (HaarSplit2D, HaarJoin2D, HaarSplit3D, HaarJoin3D)
_OUTER = ("wavelet_transform_in", "inverse_wavelet_transform_out")


def load_original(model: VideoVAE, tensors: Mapping[str, Tensor]) -> None:
    """Load a state dict with published keys, or raise CheckpointError that names what does not fit.

    Averaged weights hold only what was trained, so absent wavelet filters are made anew. A `module.` prefix goes,
    and so do the filters of the pixel transform, which later versions of the model store.
    """
    load_same_keys(model, _make_filters(model) | _rename(tensors), where="WFVAE weights")


def _rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        ours = key.replace("module.", "")
        if not any(part in _OUTER for part in ours.split(".")):
            renamed[ours.replace("wavelet_transform_", "wavelet_tranform_")] = tensor
    return renamed


def _make_filters(model: VideoVAE) -> dict[str, Tensor]:
    """All wavelet entries of the model's state dict, from their constants."""
    entries: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, _FILTERS):
            entries |= {f"{name}.{key}": taps for key, taps in type(layer)().state_dict().items()}
    return entries


# Fresh weights

Conv = nn.Conv2d | nn.Conv3d
Mix = dict[int, float]

# Two constant channels keep the norm before the last layer nearly the same for every colour, so that it divides
# all of them by about the same number and colours stay apart.
_ANCHOR = 3.0
_TYPICAL_COLOUR_SQUARED = 2.0
_QUIET = 0.1
_EDGE_GAIN = 2.0  # edges are weaker than colours; in the latent they should not drown in a denoiser's noise
_LIGHT, _WARMTH = (3**-0.5, 3**-0.5, 3**-0.5), (2**-0.5, 0.0, -(2**-0.5))
_LOGVAR = -6.0  # a small spread: with the usual 0 the noise hides what the latent says


@torch.no_grad()
def start_as_lowpass(model: WFVAE) -> None:
    """Turn freshly drawn weights into a low-pass autoencoder.

    Models too narrow for it, and those with groupnorm, stay as drawn.
    """
    config = model.config
    widths = (config.encoder_flow_channels // 2, config.decoder_flow_channels, 2 * config.base_channels - 1)
    mixes = _list_mixes(in_time=config.level2_temporal)[: min(config.latent_channels, *widths)]
    if config.norm != "layernorm" or len(mixes) < COLOURS:
        return
    for module in model.modules():
        _silence_branch(module)
    gain = math.prod(8**0.5 if in_time else 2.0 for in_time in (True, config.level1_temporal, config.level2_temporal))
    _open_encoder(model, mixes, gain)
    _open_decoder(model, mixes, gain)


def _list_mixes(*, in_time: bool) -> list[Mix]:
    """Paths through the latent, most important first, each a mix of coefficients of the coarsest level (bands outside,
    colours inside): its average per colour, then its differences along both sides and in time, in brightness and in
    red against blue."""
    bands = (1, 2, 4) if in_time else (1, 2)
    averages: list[Mix] = [{colour: 1.0} for colour in range(COLOURS)]
    return averages + [
        {band * COLOURS + colour: part for colour, part in enumerate(mix) if part}
        for mix in (_LIGHT, _WARMTH)
        for band in bands
    ]


def _silence_branch(module: nn.Module) -> None:
    if isinstance(module, ResBlock2D | ResBlock3D):
        last = module.conv2 if isinstance(module, ResBlock2D) else module.conv2.conv
    elif isinstance(module, FrameAttention):
        last = module.proj_out.conv
    else:
        return
    for parameter in last.parameters():
        parameter.zero_()


def _open_encoder(model: WFVAE, mixes: list[Mix], gain: float) -> None:
    """Each path as a positive and a negative copy: silu(x) - silu(-x) = x brings it through the last nonlinearity."""
    encoder, latent_channels, num_paths = model.encoder, model.config.latent_channels, len(mixes)
    for path, mix in enumerate(mixes):
        _mix_channels(encoder.connect_l2, path, {source: part / gain for source, part in mix.items()})
        _mix_channels(encoder.connect_l2, num_paths + path, {source: -part / gain for source, part in mix.items()})
    shortcut = _shortcut(encoder.mid[0])
    for parameter in shortcut.parameters():
        parameter.mul_(_QUIET * 3)
    first = 2 * model.config.base_channels
    for copy in range(2 * num_paths):
        _mix_channels(shortcut, copy, {first + copy: 1.0})
    for row, anchor in ((2 * num_paths, _ANCHOR), (2 * num_paths + 1, -_ANCHOR)):
        shortcut.weight[row] = 0
        _bias(shortcut)[row] = anchor
    last = encoder.conv_out.conv
    for path in range(num_paths):
        _mix_channels(last, path, {path: _latent_gain(path), num_paths + path: -_latent_gain(path)})
    last.weight[latent_channels:] *= _QUIET
    _bias(last)[latent_channels:] = _LOGVAR


def _open_decoder(model: WFVAE, mixes: list[Mix], gain: float) -> None:
    """Half of the true gain: what is missing wakes the other paths, which learn detail faster than from nothing."""
    decoder, width = model.decoder, 4 * model.config.base_channels
    shortcut = _shortcut(decoder.mid[-1])
    for path in range(len(mixes)):
        _mix_channels(decoder.conv_in.conv, path, {path: 1 / _latent_gain(path)})
        _mix_channels(shortcut, width + path, {path: 1.0})
    coarse = decoder.connect_l2[-1]
    assert isinstance(coarse, FrameConv2d)
    for output in (coarse, decoder.connect_l1[-1], decoder.conv_out):
        assert isinstance(output, FrameConv2d)
        output.weight.mul_(_QUIET)
        _bias(output).zero_()
    norm = math.sqrt(2 * (_ANCHOR**2 + _TYPICAL_COLOUR_SQUARED) / width)
    for target in {source for mix in mixes for source in mix}:
        parts = {path: mix[target] for path, mix in enumerate(mixes) if target in mix}
        _mix_channels(coarse, target, {path: part * gain * norm / 2 for path, part in parts.items()})


def _latent_gain(path: int) -> float:
    return 1.0 if path < COLOURS else _EDGE_GAIN


def _shortcut(block: nn.Module) -> Conv:
    assert isinstance(block, ResBlock3D) and block.nin_shortcut is not None
    return block.nin_shortcut.conv


def _bias(layer: Conv) -> Tensor:
    assert layer.bias is not None
    return layer.bias


def _mix_channels(layer: Conv, row: int, parts: Mapping[int, float]) -> None:
    """Make an output channel a sum of input channels, each times its part."""
    layer.weight[row] = 0
    _bias(layer)[row] = 0
    for column, part in parts.items():
        _centre(layer.weight)[row, column] = part


def _centre(weight: Tensor) -> Tensor:
    """The tap of the current position: the middle in space and, for causal kernels, the last in time."""
    middle = weight[..., weight.shape[-2] // 2, weight.shape[-1] // 2]
    return middle[..., -1] if weight.ndim == 5 else middle
