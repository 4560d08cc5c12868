"""Fresh weights of small autoencoders as low-pass filters.

From random weights a small CausalVAE spends hundreds of steps before its decoder looks at the latent at all, and a
small WFVAE spends them on brightness and only then finds colour, because encoder and decoder must learn to agree. Here
each colour has a path through the latent from the start, as a positive and a negative copy (silu(x) - silu(-x) = x
brings it through the nonlinearities); in a WFVAE so do edges and changes of 8x8 blocks, where there are enough latent
channels. Residual branches begin as identities, and everything else is left to training. Published trainings start
from random weights, or from an image autoencoder.
"""

from __future__ import annotations

from torch import Tensor, nn

from frameloom.models.layers.causal_conv import CausalConv3d
from frameloom.models.vaes.blocks import FrameAttention, ResBlock2D, ResBlock3D

Conv = nn.Conv2d | nn.Conv3d
# Two constant channels keep the norms nearly the same for every colour, so that colours stay apart.
ANCHOR = 3.0
QUIET = 0.1
LOGVAR = -6.0  # a small spread: with the usual 0 the noise hides what the latent says


def silence_branches(model: nn.Module) -> None:
    """Make the branches beside the shortcuts silent."""
    for module in model.modules():
        if isinstance(module, ResBlock2D | ResBlock3D | FrameAttention):
            last = module.proj_out if isinstance(module, FrameAttention) else module.conv2
            for parameter in last.parameters():
                parameter.zero_()


def inner_conv(layer: nn.Module) -> Conv:
    inner = layer.conv if isinstance(layer, CausalConv3d) else layer
    assert isinstance(inner, nn.Conv2d | nn.Conv3d)
    return inner


def bias_of(layer: Conv) -> Tensor:
    assert layer.bias is not None
    return layer.bias
