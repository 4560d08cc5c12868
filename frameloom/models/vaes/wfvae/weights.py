"""Published WFVAE weights into our model. The keys are the same; files differ in what they leave out or spell right."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from frameloom.models.vaes.base import VideoVAE
from frameloom.models.vaes.loading import load_same_keys
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
