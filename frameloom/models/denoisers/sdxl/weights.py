"""Published checkpoints of the UNet in and out: diffusers' folders and Stability's single files.

    layout     keys                                    published with
    diffusers  down_blocks.*, add_embedding.*          folders `unet/`
    single     model.diffusion_model.input_blocks.*    whole files of Stability; the other parts are passed over
    bare       input_blocks.*                          the same without its prefix

The layout is seen from the keys; values and shapes are the same in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from torch import Tensor, nn

from frameloom.core.errors import CheckpointError
from frameloom.models.denoisers.export_forms import ExportForms
from frameloom.models.denoisers.sdxl.keys import UNetNames
from frameloom.models.denoisers.sdxl.pipeline import describe_unet
from frameloom.models.denoisers.sdxl.single_file import UNET_PREFIX, to_single_file
from frameloom.models.fit import load_fitting
from frameloom.models.lora.keys import LoraNames

Layout = Literal["diffusers", "single", "bare"]
# Other parts of a whole single file.
_OTHER_PARTS = ("first_stage_model.", "conditioner.")


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


def single_file_layers(layers: Iterable[str]) -> dict[str, str]:
    """Names in the single layout, without its prefix, of layers; the list must hold those of all residual blocks."""
    keys = {layer: f"{layer}.weight" for layer in layers}
    names = UNetNames.read(keys.values())
    singles = {layer: names.to_single(key) for layer, key in keys.items()}
    return {layer: single.removesuffix(".weight") for layer, single in singles.items() if single}


LORA_NAMES = LoraNames(part="unet", single=single_file_layers)

EXPORT = ExportForms(
    original_layout="single",
    diffusers_layout="diffusers",
    describe_diffusers=describe_unet,
    part="unet",
    pipeline=lambda config: "StableDiffusionXLImg2ImgPipeline" if config.aesthetic else "StableDiffusionXLPipeline",
    join_parts=lambda config, parts: to_single_file(parts, refiner=config.aesthetic),
)
