"""Fresh weights of small autoencoders as low-pass filters.

From random weights a small CausalVAE spends hundreds of steps before its decoder looks at the latent at all, and a
small WFVAE spends them on brightness and only then finds colour, because encoder and decoder must learn to agree. Here
each colour has a path through the latent from the start, as a positive and a negative copy (silu(x) - silu(-x) = x
brings it through the nonlinearities); in a WFVAE so do edges and changes of 8x8 blocks, where there are enough latent
channels. Residual branches begin as identities, and everything else is left to training. Published trainings start
from random weights, or from an image autoencoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from frameloom.models.layers.causal_conv import CausalConv3d
from frameloom.models.vaes.blocks import COLOURS, FrameAttention, ResBlock2D, ResBlock3D
from frameloom.models.vaes.causal.model import CausalVAE, Level
from frameloom.models.vaes.wfvae.model import WFVAE

Conv = nn.Conv2d | nn.Conv3d
Mix = dict[int, float]
# Two constant channels keep the norms nearly the same for every colour, so that colours stay apart.
_ANCHOR = 3.0
_QUIET = 0.1
_LOGVAR = -6.0  # a small spread: with the usual 0 the noise hides what the latent says


def _silence_branches(model: nn.Module) -> None:
    """Make the branches beside the shortcuts silent."""
    for module in model.modules():
        if isinstance(module, ResBlock2D | ResBlock3D | FrameAttention):
            last = module.proj_out if isinstance(module, FrameAttention) else module.conv2
            for parameter in last.parameters():
                parameter.zero_()


def _inner(layer: nn.Module) -> Conv:
    inner = layer.conv if isinstance(layer, CausalConv3d) else layer
    assert isinstance(inner, nn.Conv2d | nn.Conv3d)
    return inner


def _bias(layer: Conv) -> Tensor:
    assert layer.bias is not None
    return layer.bias


# CausalVAE

_ANCHORS = (2 * COLOURS, 2 * COLOURS + 1)
_NUM_PATHS = 2 * COLOURS + 2
_TYPICAL_SQUARE = 1.0


@torch.no_grad()
def start_causal(model: CausalVAE) -> None:
    """Turn freshly drawn weights into a low-pass autoencoder.

    Models with fewer latent channels than colours, or with norms that would tear the paths apart (a group of less
    than 8 channels, as in the published sizes), stay as drawn.
    """
    config = model.config
    if config.hidden_size // config.norm_groups < _NUM_PATHS or min(config.embed_dim, config.z_channels) < COLOURS:
        return
    _silence_branches(model)
    for module in model.modules():
        if isinstance(module, ResBlock2D | ResBlock3D) and module.nin_shortcut is not None:
            _pass_paths(_inner(module.nin_shortcut))
        elif isinstance(module, Level):
            for name in module.resizes:
                if getattr(getattr(module, name), "conv", None) is not None:
                    _pass_paths(_inner(getattr(module, name).conv))
    first_group = config.widths[-1] // config.norm_groups
    _open_ends(model.encoder.conv_in, model.encoder.conv_out, _norm_of(first_group))
    _open_ends(model.decoder.conv_in, model.decoder.conv_out, _norm_of(config.hidden_size // config.norm_groups))
    spread = _inner(model.encoder.conv_out)
    spread.weight[config.z_channels :] *= _QUIET
    _bias(spread)[config.z_channels :] = _LOGVAR
    if config.use_quant_layer:
        for layer, split in ((model.quant_conv.conv, config.z_channels), (model.post_quant_conv.conv, None)):
            _pass_through(layer, split)


def _norm_of(channels: int) -> float:
    """What the norm divides a group by that holds the paths and is quiet otherwise."""
    return math.sqrt(2 * (_ANCHOR**2 + COLOURS * _TYPICAL_SQUARE / 2) / channels)


def _pass_paths(layer: Conv) -> None:
    """Let a shortcut or a layer that resizes pass the paths."""
    layer.weight.mul_(_QUIET)
    _bias(layer).zero_()
    for path in range(_NUM_PATHS):
        _set_row(layer, path, path, 1.0)


def _open_ends(first: nn.Module, last: nn.Module, norm: float) -> None:
    """Colours in as two copies beside the anchors, and out again as their difference."""
    entry, leave = _inner(first), _inner(last)
    entry.weight.mul_(_QUIET)
    _bias(entry).zero_()
    for colour in range(COLOURS):
        _set_row(entry, colour, colour, 1.0)
        _set_row(entry, COLOURS + colour, colour, -1.0)
        _set_row(leave, colour, colour, norm)
        _add_tap(leave, colour, COLOURS + colour, -norm)
    for row, anchor in zip(_ANCHORS, (_ANCHOR, -_ANCHOR), strict=True):
        entry.weight[row] = 0
        _bias(entry)[row] = anchor


def _pass_through(layer: Conv, split: int | None) -> None:
    """An identity; with `split`, of the means and of the log-variances, each as far as there are outputs."""
    layer.weight.zero_()
    _bias(layer).zero_()
    outputs, inputs = layer.weight.shape[:2]
    halves = [(0, 0, min(outputs, inputs))]
    if split is not None:
        halves = [(0, 0, min(outputs // 2, split)), (outputs // 2, split, min(outputs // 2, split))]
        _bias(layer)[outputs // 2 :] = _LOGVAR * (outputs // 2 > split)
    for row, column, count in halves:
        for index in range(count):
            layer.weight[row + index, column + index] = 1.0


def _set_row(layer: Conv, row: int, column: int, value: float) -> None:
    """Make an output channel nothing but `value` times an input channel."""
    layer.weight[row] = 0
    _bias(layer)[row] = 0
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


# WFVAE

_TYPICAL_COLOUR_SQUARE = 2.0
_EDGE_GAIN = 2.0  # edges are weaker than colours; in the latent they should not drown in a denoiser's noise
_LIGHT, _WARMTH = (3**-0.5, 3**-0.5, 3**-0.5), (2**-0.5, 0.0, -(2**-0.5))


@torch.no_grad()
def start_wfvae(model: WFVAE) -> None:
    """Turn freshly drawn weights into a low-pass autoencoder.

    Models too narrow for it, and those with groupnorm, stay as drawn.
    """
    config = model.config
    widths = (config.encoder_flow_channels // 2, config.decoder_flow_channels, 2 * config.base_channels - 1)
    mixes = _list_mixes(in_time=config.level2_temporal)[: min(config.latent_channels, *widths)]
    if config.norm != "layernorm" or len(mixes) < COLOURS:
        return
    _silence_branches(model)
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
    coarse = _inner(decoder.connect_l2[-1])
    for output in (coarse, _inner(decoder.connect_l1[-1]), _inner(decoder.conv_out)):
        output.weight.mul_(_QUIET)
        _bias(output).zero_()
    norm = math.sqrt(2 * (_ANCHOR**2 + _TYPICAL_COLOUR_SQUARE) / width)
    for target in {source for mix in mixes for source in mix}:
        parts = {path: mix[target] for path, mix in enumerate(mixes) if target in mix}
        _mix_channels(coarse, target, {path: part * gain * norm / 2 for path, part in parts.items()})


def _latent_gain(path: int) -> float:
    return 1.0 if path < COLOURS else _EDGE_GAIN


def _shortcut(block: nn.Module) -> Conv:
    assert isinstance(block, ResBlock3D) and block.nin_shortcut is not None
    return block.nin_shortcut.conv


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
