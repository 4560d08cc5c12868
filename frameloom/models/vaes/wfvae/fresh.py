"""Fresh weights that already are an autoencoder: colours of 8x8 blocks go straight through the latent.

From random weights a small WFVAE first spends hundreds of steps on brightness and only then finds colour, because
encoder and decoder must learn to agree on both. Here the coarsest colour band has a path from the start, residual
branches begin as identities, and everything else is left to training. Published trainings did not do this.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from frameloom.models.vaes.wfvae.blocks import FrameAttention, FrameConv2d, ResBlock2D, ResBlock3D
from frameloom.models.vaes.wfvae.model import COLOURS, WFVAE

Conv = nn.Conv2d | nn.Conv3d

# Two constant channels keep the norm before the last layer nearly the same for every colour, so that it divides
# all of them by about the same number and colours stay apart.
_ANCHOR = 3.0
_TYPICAL_COLOUR_SQUARED = 2.0
_QUIET = 0.1
_LOGVAR = -6.0  # a small spread: with the usual 0 the noise hides what the latent says


@torch.no_grad()
def start_as_lowpass(model: WFVAE) -> None:
    """Turn freshly drawn weights into a low-pass autoencoder.

    Models too narrow for it, and those with groupnorm, stay as drawn.
    """
    config = model.config
    is_wide = min(config.encoder_flow_channels, config.decoder_flow_channels) >= 2 * COLOURS
    if config.norm != "layernorm" or config.latent_channels < COLOURS or config.base_channels < COLOURS or not is_wide:
        return
    for module in model.modules():
        _silence_branch(module)
    gain = math.prod(8**0.5 if in_time else 2.0 for in_time in (True, config.level1_temporal, config.level2_temporal))
    _open_encoder(model, gain)
    _open_decoder(model, gain)


def _silence_branch(module: nn.Module) -> None:
    if isinstance(module, ResBlock2D | ResBlock3D):
        last = module.conv2 if isinstance(module, ResBlock2D) else module.conv2.conv
    elif isinstance(module, FrameAttention):
        last = module.proj_out.conv
    else:
        return
    for parameter in last.parameters():
        parameter.zero_()


def _open_encoder(model: WFVAE, gain: float) -> None:
    """Each colour as a positive and a negative copy: silu(x) - silu(-x) = x brings it through the last nonlinearity."""
    encoder, latent_channels = model.encoder, model.config.latent_channels
    _copy_channels(encoder.connect_l2, rows=range(COLOURS), columns=range(COLOURS), weight=1 / gain)
    _copy_channels(encoder.connect_l2, rows=range(COLOURS, 2 * COLOURS), columns=range(COLOURS), weight=-1 / gain)
    shortcut = _shortcut(encoder.mid[0])
    for parameter in shortcut.parameters():
        parameter.mul_(_QUIET * 3)
    first = 2 * model.config.base_channels
    _copy_channels(shortcut, rows=range(2 * COLOURS), columns=range(first, first + 2 * COLOURS), weight=1.0)
    for row, anchor in ((2 * COLOURS, _ANCHOR), (2 * COLOURS + 1, -_ANCHOR)):
        shortcut.weight[row] = 0
        _bias(shortcut)[row] = anchor
    last = encoder.conv_out.conv
    _copy_channels(last, rows=range(COLOURS), columns=range(COLOURS), weight=1.0)
    for colour in range(COLOURS):
        _centre(last.weight)[colour, COLOURS + colour] = -1
    last.weight[latent_channels:] *= _QUIET
    _bias(last)[latent_channels:] = _LOGVAR


def _open_decoder(model: WFVAE, gain: float) -> None:
    """Half of the true gain: what is missing wakes the other paths, which learn detail faster than from nothing."""
    decoder, width = model.decoder, 4 * model.config.base_channels
    _copy_channels(decoder.conv_in.conv, rows=range(COLOURS), columns=range(COLOURS), weight=1.0)
    shortcut = _shortcut(decoder.mid[-1])
    _copy_channels(shortcut, rows=range(width, width + COLOURS), columns=range(COLOURS), weight=1.0)
    coarse = decoder.connect_l2[-1]
    assert isinstance(coarse, FrameConv2d)
    for output in (coarse, decoder.connect_l1[-1], decoder.conv_out):
        assert isinstance(output, FrameConv2d)
        output.weight.mul_(_QUIET)
        _bias(output).zero_()
    norm = math.sqrt(2 * (_ANCHOR**2 + _TYPICAL_COLOUR_SQUARED) / width)
    _copy_channels(coarse, rows=range(COLOURS), columns=range(COLOURS), weight=gain * norm / 2)


def _shortcut(block: nn.Module) -> Conv:
    assert isinstance(block, ResBlock3D) and block.nin_shortcut is not None
    return block.nin_shortcut.conv


def _bias(layer: Conv) -> Tensor:
    assert layer.bias is not None
    return layer.bias


def _copy_channels(layer: Conv, *, rows: range, columns: range, weight: float) -> None:
    """Make output channels `rows` copies of the input channels `columns`, times `weight`."""
    for row, column in zip(rows, columns, strict=True):
        layer.weight[row] = 0
        _bias(layer)[row] = 0
        _centre(layer.weight)[row, column] = weight


def _centre(weight: Tensor) -> Tensor:
    """The tap of the current position: the middle in space and, for causal kernels, the last in time."""
    middle = weight[..., weight.shape[-2] // 2, weight.shape[-1] // 2]
    return middle[..., -1] if weight.ndim == 5 else middle
