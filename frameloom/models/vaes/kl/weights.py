"""Weights of the KL autoencoder: diffusers' folders, Stability's single files, and files of the autoencoder alone.

    diffusers                             single file, after `first_stage_model.`; bare in a file of it alone
    encoder.down_blocks.i.resnets.j       encoder.down.i.block.j
    encoder.down_blocks.i.downsamplers.0  encoder.down.i.downsample
    decoder.up_blocks.i.resnets.j         decoder.up.(3 - i).block.j
    decoder.up_blocks.i.upsamplers.0      decoder.up.(3 - i).upsample
    mid_block.resnets.0, .1               mid.block_1, mid.block_2
    mid_block.attentions.0                mid.attn_1; linear layers are 1x1 convolutions there

The layout is seen from the keys; `image_keys` has the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from torch import Tensor

from frameloom.core.errors import CheckpointError
from frameloom.models.vaes import image_keys
from frameloom.models.vaes.base import VideoVAE, load_same_keys

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
    named = {str(image_keys.to_single(key)): tensor for key, tensor in state.items()}
    return {f"{prefix}{key}": image_keys.tensor_to_single(key, tensor) for key, tensor in named.items()}


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
        inner = key.removeprefix(VAE_PREFIX)
        if layout == "diffusers":  # of an older version, maybe
            inner = image_keys.to_single(inner) or inner
        name = image_keys.to_folder(inner)
        result[name or key] = image_keys.tensor_to_folder(name or key, tensors[key])
    return result
