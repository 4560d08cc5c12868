"""The golden list of keys and shapes of full-size published models, against ours on the meta device.

A published file fits when `load_original` takes exactly its keys and shapes. Nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.core.errors import FrameloomError
from frameloom.models.denoisers.opensora_plan.weights import read_config
from frameloom.models.registry import get_denoiser, get_vae
from frameloom.models.vaes.discriminator import Discriminator, DiscriminatorConfig, load_discriminator
from tests.parity.cases import ParityCase, ParityOutput, compare_facts, compare_numbers, golden

Load = Callable[[Any, Mapping[str, Tensor]], None]


def is_manifest(case: ParityCase) -> bool:
    entries = list(case.config.values())
    return bool(entries) and all(
        isinstance(entry, dict) and {"n_parameters", "keys"} <= entry.keys() for entry in entries
    )


@golden(is_manifest)
def run_manifest(case: ParityCase) -> list[ParityOutput]:
    return [output for name, entry in case.config.items() for output in _compare(name, entry)]


def _compare(name: str, entry: Mapping[str, Any]) -> list[ParityOutput]:
    with torch.device("meta"):
        model, load = _build(name, entry["config"])
        tensors = {key: torch.empty(shape) for key, shape in entry["keys"].items()}
    try:
        load(model, tensors)
        fit = "fits"
    except FrameloomError as error:
        fit = str(error)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    keys = compare_facts(f"{name}: keys and shapes", fit, "fits")
    return [
        ParityOutput(keys.name, keys.ours, keys.expected, 0.0, note="" if fit == "fits" else fit),
        compare_numbers(f"{name}: parameters", num_parameters, entry["n_parameters"]),
    ]


def _build(name: str, config: Mapping[str, Any]) -> tuple[nn.Module, Load]:
    if name.startswith("NLayerDiscriminator3D"):
        sizes = DiscriminatorConfig(config["input_nc"], config["ndf"], config["n_layers"])
        return Discriminator(sizes), load_discriminator
    family: Any = next((get() for start, get in _FAMILIES.items() if name.startswith(start)), None)
    if family is None:
        raise ValueError(f"no family of ours is known to read a model called {name!r}")
    if name.startswith("OpenSora"):
        settings = read_config({"_class_name": name.partition("-")[0], **config}, where=name)
    else:
        settings = family.config_class.from_original(config)
    return family.build(settings), family.load_original


_FAMILIES: dict[str, Callable[[], Any]] = {
    "WFVAE": lambda: get_vae("wfvae"),
    "CausalVAE": lambda: get_vae("causal"),
    "LatteT2V": lambda: get_denoiser("latte"),
    "OpenSora": lambda: get_denoiser("opensora_plan"),
}
