"""Published checkpoints in and out. The keys are those of diffusers' CogVideoXTransformer3DModel, and ours.

Only the patch projection may have another number of input channels than the model, as in the published code: a text to
video checkpoint becomes an inpaint or control model whose new inputs start from zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from frameloom.core.log import get_logger
from frameloom.models.denoisers.cogvideox_fun.config import FAMILY_NAME
from frameloom.models.denoisers.cogvideox_fun.published import read_published as read_config
from frameloom.models.fit import load_fitting
from frameloom.models.lora_keys import LoraNames

__all__ = ["LORA_NAMES", "PROJECTION", "export_original", "fit_input_channels", "load_original", "read_config"]

PROJECTION = "patch_embed.proj.weight"
# Tables that some repacked files carry although the model computes them.
_TABLES = ("pos_embedding", "patch_embed.pos_embedding")
LORA_NAMES = LoraNames(root="lora_unet__")
_log = get_logger(__name__)


def fit_input_channels(weight: Tensor, num_inputs: int) -> Tensor:
    """The projection [D, inputs, ...] for another number of inputs: zeros behind the last one, or a cut tail.

    In the linear form of V1.5 inputs are patch features, which run over channels first, so it holds there as well.
    """
    if weight.shape[1] >= num_inputs:
        return weight[:, :num_inputs]
    missing = weight.new_zeros(len(weight), num_inputs - weight.shape[1], *weight.shape[2:])
    return torch.cat([weight, missing], dim=1)


def load_original(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill a model from a published checkpoint or one of its own; what does not fit is refused with a list."""
    own = model.state_dict()
    state = {key: tensor for key, tensor in tensors.items() if key in own or key not in _TABLES}
    if PROJECTION in state:
        state[PROJECTION] = _fit_projection(state[PROJECTION], own[PROJECTION])
    load_fitting(model, state, where=f"{FAMILY_NAME} checkpoint")


def _fit_projection(weight: Tensor, own: Tensor) -> Tensor:
    given, wanted = weight.shape, own.shape
    if given == wanted or len(given) != len(wanted) or given[0] != wanted[0] or given[2:] != wanted[2:]:
        return weight
    if given[1] < wanted[1]:
        _log.info("%s checkpoint: %d inputs for %d; the new ones start from zeros", FAMILY_NAME, given[1], wanted[1])
    else:
        _log.warning("%s checkpoint: %d inputs for %d; the last ones are cut off", FAMILY_NAME, given[1], wanted[1])
    return fit_input_channels(weight, wanted[1])


def export_original(model: nn.Module) -> dict[str, Tensor]:
    """The weights as a published folder holds them; `published.write_published` gives its `config.json`."""
    state = model.state_dict()
    return {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in state.items()}
