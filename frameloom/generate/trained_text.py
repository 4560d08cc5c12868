"""Text encoders that train with the denoiser: their weights by name in a checkpoint, and as folders of their own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from frameloom.checkpoint.folders import replace_folder
from frameloom.config.schema import TextSection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.generate.parts import TextPipeline
from frameloom.models.fit import check_fit
from frameloom.models.text.pretrained import PretrainedEncoder

PREFIX = "text_encoders"
TRAINED_TEXT = "text_encoders"
"""where a run writes them, beside its export"""
_TENSORS = "model.safetensors"


def list_trained(text: TextPipeline, section: TextSection) -> dict[str, nn.Module]:
    """The networks of the encoders that train, by the name of their place in the recipe."""
    found: dict[str, nn.Module] = {}
    for index, (item, encoder) in enumerate(zip(section.encoders, text.encoders, strict=True)):
        if item.train:
            if not isinstance(encoder, PretrainedEncoder):
                raise ConfigError(f"text.encoders.{index}.train is true, but {item.name} cannot be trained; remove it")
            found[f"{PREFIX}.{index}"] = encoder.load()
    return found


def start_training(text: TextPipeline, section: TextSection) -> dict[str, nn.Parameter]:
    """Let the chosen encoders learn, and give their weights by name."""
    params: dict[str, nn.Parameter] = {}
    for place, network in list_trained(text, section).items():
        network.requires_grad_(True)
        params |= {f"{place}.{name}": param for name, param in network.named_parameters()}
    for item, encoder in zip(section.encoders, text.encoders, strict=True):
        if item.train and isinstance(encoder, PretrainedEncoder):
            encoder.learns = True
    return params


@torch.no_grad()
def use_trained(text: TextPipeline, section: TextSection, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Put the weights of a checkpoint into the encoders that were trained."""
    for place, network in list_trained(text, section).items():
        own = dict(network.named_parameters())
        given = {name.removeprefix(f"{place}."): part for name, part in tensors.items() if name.startswith(f"{place}.")}
        check_fit(own, given, where=f"{where}, {place}")
        for name, param in own.items():
            param.copy_(given[name])


def write_trained(folder: Path, text: TextPipeline, section: TextSection) -> None:
    """A folder for each, as transformers reads it and `text.encoders.N.path` takes it."""
    for index, (item, encoder) in enumerate(zip(section.encoders, text.encoders, strict=True)):
        if item.train and isinstance(encoder, PretrainedEncoder):
            with replace_folder(folder / str(index)) as temporary:
                encoder.load().save_pretrained(temporary, safe_serialization=True)  # type: ignore[operator]
                for file in encoder.tokenizer_files():
                    shutil.copy2(file, temporary / file.name)


def read_trained(folder: Path, text: TextPipeline, section: TextSection) -> None:
    """The reverse of `write_trained`, into encoders that are built already."""
    tensors: dict[str, Tensor] = {}
    for place in list_trained(text, section):
        file = folder / place.removeprefix(f"{PREFIX}.") / _TENSORS
        if not file.is_file():
            raise CheckpointError(
                f"{file}: missing, but text.encoders.{place.removeprefix(f'{PREFIX}.')}.train is true, so its weights "
                "belong to the model; sample from the run folder"
            )
        tensors |= {f"{place}.{name}": part for name, part in load_file(file).items()}
    use_trained(text, section, tensors, where=str(folder))
