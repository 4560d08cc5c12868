"""Published SDXL checkpoints, read and written, and the descriptions of a diffusers pipeline.

    layout     keys                                    published with
    diffusers  down_blocks.*, add_embedding.*          folders `unet/`
    single     model.diffusion_model.input_blocks.*    whole files of Stability; the other parts are passed over
    bare       input_blocks.*                          the same without its prefix

The layout is seen from the keys; values and shapes are the same in all.

Weights do not tell everything about a model: the width of a head and the groups of a norm leave no trace in them. So
a file of weights alone needs a description, the published one where the shapes fit it, or one that comes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError
from frameloom.models.denoisers.export_forms import ExportForms, as_json
from frameloom.models.denoisers.sdxl.config import SIZES, SDXLConfig
from frameloom.models.denoisers.sdxl.keys import UNetNames, wrap_text
from frameloom.models.denoisers.sdxl.model import diffusers_arguments
from frameloom.models.denoisers.sdxl.single_file import UNET_PREFIX, Part, to_single_file
from frameloom.models.lora.keys import LoraNames
from frameloom.models.state_dict import check_fit, load_fitting
from frameloom.models.text.clip import CLIP_CONFIGS
from frameloom.models.vaes.kl.config import SIZES as VAE_SIZES
from frameloom.models.vaes.kl.config import KLConfig

Layout = Literal["diffusers", "single", "bare"]
# Other parts of a whole single file.
_OTHER_PARTS = ("first_stage_model.", "conditioner.")
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


def load_original(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill the UNet from any layout; of a whole single file only the UNet's part is read, and it must fit exactly."""
    load_fitting(model, to_folder_keys(tensors), where="sdxl checkpoint")


def export_original(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The UNet's weights in a layout."""
    state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    if layout == "diffusers":
        return state
    names, prefix = UNetNames.read(state), UNET_PREFIX if layout == "single" else ""
    return {f"{prefix}{names.to_single(key)}": tensor for key, tensor in state.items()}


def detect_layout(keys: Iterable[str]) -> Layout:
    names = list(keys)
    if any(name.startswith(UNET_PREFIX) for name in names):
        return "single"
    if any(name.startswith("input_blocks.") for name in names):
        return "bare"
    if any(name.startswith("down_blocks.") for name in names):
        return "diffusers"
    raise CheckpointError(
        f"sdxl checkpoint: none of its {len(names)} tensors is a block of an SDXL UNet "
        f"(first: {', '.join(sorted(names)[:3])}); choose a file of this family"
    )


def to_folder_keys(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The UNet's tensors with diffusers' keys; one that no rule covers keeps its own, to be refused by name."""
    layout = detect_layout(tensors)
    if layout == "diffusers":
        return dict(tensors)
    # By key: a look at a tensor of another part would read it from the file.
    own = {key: tensors[key] for key in tensors if not key.startswith(_OTHER_PARTS)}
    names = UNetNames.read(key.removeprefix(UNET_PREFIX) for key in own)
    return {names.to_folder(key.removeprefix(UNET_PREFIX)) or key: tensor for key, tensor in own.items()}


def single_file_layers(layers: Iterable[str]) -> dict[str, str]:
    """Names in the single layout, without its prefix, of layers; the list must hold those of all residual blocks."""
    keys = {layer: f"{layer}.weight" for layer in layers}
    names = UNetNames.read(keys.values())
    singles = {layer: names.to_single(key) for layer, key in keys.items()}
    return {layer: single.removesuffix(".weight") for layer, single in singles.items() if single}


def describe_unet(config: SDXLConfig) -> dict[str, Any]:
    """The `config.json` of the UNet."""
    return as_json({"_class_name": CLASSES["unet"][1], **diffusers_arguments(config), "sample_size": 128})


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
    return as_json(content)


def published_descriptions(part: Part) -> list[dict[str, Any]]:
    """What published folders say of a part: one description for each released size."""
    if part == "unet":
        return [describe_unet(SIZES[name]) for name in ("base", "refiner")]
    if part == "vae":
        return [describe_vae(VAE_SIZES["sdxl"])]
    return [CLIP_CONFIGS[ENCODERS[part]]]


def check_description(part: Part, content: Mapping[str, Any], tensors: Mapping[str, Tensor], *, where: str) -> None:
    """CheckpointError unless a model that is built as described takes exactly these tensors; needs no memory."""
    expected: Mapping[str, Tensor] = _build_empty(part, content).state_dict()
    if part in ENCODERS:
        expected, tensors = ({wrap_text(name): one for name, one in table.items()} for table in (expected, tensors))
    check_fit(expected, tensors, where=where)


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
    library, name = CLASSES[part]
    kind: Any = getattr(import_module(library), name)
    with torch.device("meta"):
        if library == "diffusers":
            model: nn.Module = kind.from_config(dict(content))
        else:
            model = kind(kind.config_class.from_dict(dict(content)))
    return model


LORA_NAMES = LoraNames(part="unet", single=single_file_layers)
EXPORT = ExportForms(
    original_layout="single",
    diffusers_layout="diffusers",
    describe_diffusers=describe_unet,
    part="unet",
    pipeline=lambda config: "StableDiffusionXLImg2ImgPipeline" if config.aesthetic else "StableDiffusionXLPipeline",
    join_parts=lambda config, parts: to_single_file(parts, refiner=config.aesthetic),
)
