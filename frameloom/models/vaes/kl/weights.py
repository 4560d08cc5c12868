"""Published weights of the autoencoder in and out: diffusers' folders, single files, or files of the autoencoder alone.

The layout is seen from the keys: a single file has them after `first_stage_model.`, or bare in a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from torch import Tensor

from frameloom.core.errors import CheckpointError
from frameloom.models.vaes.base import VideoVAE, load_same_keys
from frameloom.models.vaes.kl import keys

Layout = Literal["diffusers", "single", "bare"]
# Other parts of a whole single file.
_OTHER_PARTS = ("model.diffusion_model.", "conditioner.")


def detect_layout(names: Iterable[str]) -> Layout:
    known = list(names)
    if any(name.startswith(keys.PREFIX) for name in known):
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
        name = keys.renew(key) if layout == "diffusers" else keys.to_folder(key.removeprefix(keys.PREFIX))
        result[name or key] = keys.to_folder_tensor(name or key, tensors[key])
    return result


def load_original(model: VideoVAE, tensors: Mapping[str, Tensor]) -> None:
    """Load any layout, or raise CheckpointError that names what does not fit."""
    load_same_keys(model, to_folder_keys(tensors), where="kl autoencoder weights")


def export_original(model: VideoVAE, layout: Layout) -> dict[str, Tensor]:
    """The autoencoder's weights in a layout."""
    state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    if layout == "diffusers":
        return state
    prefix = keys.PREFIX if layout == "single" else ""
    named = {str(keys.to_single(key)): tensor for key, tensor in state.items()}
    return {f"{prefix}{key}": keys.to_single_tensor(key, tensor) for key, tensor in named.items()}
