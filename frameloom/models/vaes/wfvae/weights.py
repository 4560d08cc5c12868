"""Published weights of a WFVAE."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from frameloom.models.vaes.base import VideoVAE, load_same_keys
from frameloom.models.vaes.wfvae.wavelet import Haar

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
