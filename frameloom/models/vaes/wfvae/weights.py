"""Published weights of a WFVAE."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from frameloom.models.vaes.base import VideoVAE, load_same_keys
from frameloom.models.vaes.blocks import COLOURS, ResBlock3D
from frameloom.models.vaes.lowpass import ANCHOR, LOGVAR, QUIET, Conv, bias_of, inner_conv, silence_branches
from frameloom.models.vaes.wfvae.model import WFVAE
from frameloom.models.vaes.wfvae.wavelet import Haar

Mix = dict[int, float]

# Where a training checkpoint keeps the weights, best first.
SECTIONS = ("ema_state_dict", "state_dict.gen_model", "state_dict")
_OUTER = ("wavelet_transform_in", "inverse_wavelet_transform_out")


def load_original(model: VideoVAE, tensors: Mapping[str, Tensor]) -> None:
    """Load a state dict with published keys, or raise CheckpointError that names what does not fit.

    Averaged weights hold only what was trained, so absent wavelet filters are made anew. A `module.` prefix goes,
    and so do the filters of the pixel transform, which later versions of the model store.
    """
    given: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Haar):
            fresh = Haar(in_time=layer.in_time, inverse=layer.inverse).state_dict()
            given |= {f"{name}.{key}": taps for key, taps in fresh.items()}
    for key, tensor in tensors.items():
        ours = key.replace("module.", "")
        if not any(part in _OUTER for part in ours.split(".")):
            given[ours.replace("wavelet_transform_", "wavelet_tranform_")] = tensor
    load_same_keys(model, given, where="WFVAE weights")


# Fresh weights

_TYPICAL_COLOUR_SQUARE = 2.0
_EDGE_GAIN = 2.0  # edges are weaker than colours; in the latent they should not drown in a denoiser's noise
_LIGHT, _WARMTH = (3**-0.5, 3**-0.5, 3**-0.5), (2**-0.5, 0.0, -(2**-0.5))


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
    silence_branches(model)
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
        parameter.mul_(QUIET * 3)
    first = 2 * model.config.base_channels
    for copy in range(2 * num_paths):
        _mix_channels(shortcut, copy, {first + copy: 1.0})
    for row, anchor in ((2 * num_paths, ANCHOR), (2 * num_paths + 1, -ANCHOR)):
        shortcut.weight[row] = 0
        bias_of(shortcut)[row] = anchor
    last = encoder.conv_out.conv
    for path in range(num_paths):
        _mix_channels(last, path, {path: _latent_gain(path), num_paths + path: -_latent_gain(path)})
    last.weight[latent_channels:] *= QUIET
    bias_of(last)[latent_channels:] = LOGVAR


def _open_decoder(model: WFVAE, mixes: list[Mix], gain: float) -> None:
    """Half of the true gain: what is missing wakes the other paths, which learn detail faster than from nothing."""
    decoder, width = model.decoder, 4 * model.config.base_channels
    shortcut = _shortcut(decoder.mid[-1])
    for path in range(len(mixes)):
        _mix_channels(decoder.conv_in.conv, path, {path: 1 / _latent_gain(path)})
        _mix_channels(shortcut, width + path, {path: 1.0})
    coarse = inner_conv(decoder.connect_l2[-1])
    for output in (coarse, inner_conv(decoder.connect_l1[-1]), inner_conv(decoder.conv_out)):
        output.weight.mul_(QUIET)
        bias_of(output).zero_()
    norm = math.sqrt(2 * (ANCHOR**2 + _TYPICAL_COLOUR_SQUARE) / width)
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
    bias_of(layer)[row] = 0
    for column, part in parts.items():
        _centre(layer.weight)[row, column] = part


def _centre(weight: Tensor) -> Tensor:
    """The tap of the current position: the middle in space and, for causal kernels, the last in time."""
    middle = weight[..., weight.shape[-2] // 2, weight.shape[-1] // 2]
    return middle[..., -1] if weight.ndim == 5 else middle
