"""Published weights into a CausalVAE: its own files, and image autoencoders that it can start from."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from frameloom.core.log import get_logger
from frameloom.models.vaes.base import VideoVAE
from frameloom.models.vaes.causal.inflation import inflate, is_image_vae
from frameloom.models.vaes.loading import load_same_keys

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
