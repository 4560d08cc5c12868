"""A diffusers pipeline of SDXL as data: its parts, and what their `config.json` files say.

Weights do not tell everything about a model: the width of a head and the groups of a norm leave no trace in them. So
a file of weights alone needs a description, the published one where the shapes fit it, or one that comes with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from frameloom.models.denoisers.sdxl.config import SIZES, SDXLConfig
from frameloom.models.denoisers.sdxl.model import diffusers_arguments
from frameloom.models.denoisers.sdxl.single_file import Part
from frameloom.models.fit import check_fit
from frameloom.models.text.clip import CLIP_CONFIGS
from frameloom.models.vaes.kl.config import SIZES as VAE_SIZES
from frameloom.models.vaes.kl.config import KLConfig

# Library and class of each part, as `model_index.json` names them.
CLASSES: dict[Part, tuple[str, str]] = {
    "unet": ("diffusers", "UNet2DConditionModel"),
    "vae": ("diffusers", "AutoencoderKL"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
}
TOKENIZERS: dict[str, Part] = {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"}
# Our names of the text encoders.
ENCODERS: dict[Part, str] = {"text_encoder": "clip_l", "text_encoder_2": "clip_bigg"}
_WRAPPER = "text_model."


def describe_unet(config: SDXLConfig) -> dict[str, Any]:
    """The `config.json` of the UNet."""
    return _as_json({"_class_name": CLASSES["unet"][1], **diffusers_arguments(config), "sample_size": 128})


def describe_vae(config: KLConfig) -> dict[str, Any]:
    """The `config.json` of the autoencoder; channels of different scale get a mean and a deviation each."""
    from frameloom.models.vaes.kl.model import diffusers_arguments as vae_arguments

    content = {"_class_name": CLASSES["vae"][1], **vae_arguments(config), "force_upcast": config.force_upcast}
    if len(set(config.scale)) == 1 and not any(config.shift):
        content["scaling_factor"] = config.scale[0]
    else:
        # diffusers decodes latent * latents_std / scaling_factor + latents_mean
        deviations = [1.0 / scale for scale in config.scale]
        content |= {"scaling_factor": 1.0, "latents_mean": list(config.shift), "latents_std": deviations}
    return _as_json(content)


def published_descriptions(part: Part) -> list[dict[str, Any]]:
    """What published folders say of a part: one description for each released size."""
    if part == "unet":
        return [describe_unet(SIZES[name]) for name in ("base", "refiner")]
    if part == "vae":
        return [describe_vae(VAE_SIZES["sdxl"])]
    return [CLIP_CONFIGS[ENCODERS[part]]]


def check_description(part: Part, content: Mapping[str, Any], tensors: Mapping[str, Tensor], *, where: str) -> None:
    """CheckpointError unless a model that is built as described takes exactly these tensors; needs no memory."""
    expected = {_wrapped(part, name): one for name, one in _build_empty(part, content).state_dict().items()}
    check_fit(expected, {_wrapped(part, name): one for name, one in tensors.items()}, where=where)


def describe_scheduler(prediction: str = "epsilon", *, zero_terminal_snr: bool = False) -> dict[str, Any]:
    """The published sampler: Euler steps on the schedule that SDXL was trained with."""
    content: dict[str, Any] = {
        "_class_name": "EulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "prediction_type": prediction,
        "interpolation_type": "linear",
        "timestep_spacing": "leading",
        "steps_offset": 1,
        "use_karras_sigmas": False,
    }
    if zero_terminal_snr:
        content |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return content


def _build_empty(part: Part, content: Mapping[str, Any]) -> nn.Module:
    import importlib

    import torch

    library, name = CLASSES[part]
    kind: Any = getattr(importlib.import_module(library), name)
    with torch.device("meta"):
        if library == "diffusers":
            model: nn.Module = kind.from_config(dict(content))
        else:
            model = kind(kind.config_class.from_dict(dict(content)))
    return model


def _wrapped(part: Part, name: str) -> str:
    """One spelling for text encoders, whose own names differ between versions of transformers."""
    if part not in ENCODERS or name.startswith((_WRAPPER, "text_projection.")):
        return name
    return f"{_WRAPPER}{name}"


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    """Lists for tuples, as a file would give it back."""
    content: dict[str, Any] = json.loads(json.dumps(value))
    return content
