"""Denoisers from a recipe section, a checkpoint or published weights.

Nothing here draws from the global generators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from frameloom.builders.published import warn_of_differences
from frameloom.builders.text import TextPipeline
from frameloom.checkpoint.model_folder import Architecture, read_weights
from frameloom.config.schema.models import ModelSection
from frameloom.core.errors import CheckpointError
from frameloom.core.files import digest_value
from frameloom.core.random import stream
from frameloom.models.denoisers.base import Denoiser
from frameloom.models.registry import get_denoiser
from frameloom.models.spec import DenoiserSpec, override_fields


@dataclass(frozen=True)
class LoadedDenoiser:
    """A denoiser, what it was built from, and a digest that changes with its first weights; a checkpoint's has none."""

    family: DenoiserSpec
    model: Denoiser
    config: Any
    digest: str = ""


def build_denoiser(section: ModelSection, *, latent_channels: int, text: TextPipeline, seed: int) -> LoadedDenoiser:
    """The denoiser of a recipe; fresh weights follow from `seed`."""
    family = get_denoiser(section.family)
    widths = {"latent_channels": latent_channels, "text_width": text.width, "pooled_width": text.pooled_width}
    found = read_weights(Path(section.weights), kind="denoiser") if section.weights else None
    config = configure_denoiser(section, found, **widths)
    if found is not None and not found.config:
        warn_of_differences(family, config, found.original_config, key="model", path=section.weights or "")
    model = family.build(config, generator=stream(seed, "denoiser weights"))
    if found is not None:
        family.load_original(model, found.tensors)
    digest = digest_value([section.family, dataclasses.asdict(config), found.digest if found else seed])
    return LoadedDenoiser(family, model, config, digest)


def configure_denoiser(section: ModelSection, stored: Architecture | None, **widths: int) -> Any:
    """The architecture that its weights bring along, or else that of the recipe's size; with overrides.

    `widths` are those of latents and text. CheckpointError where the weights were made for others.
    """
    family = get_denoiser(section.family)
    if stored is None or not stored.config:
        return family.configure(section.size, **widths, overrides=section.overrides)
    check_stored(stored, kind="denoiser", name=section.family, path=section.weights or "")
    here = family.configure(section.size, **widths, overrides={})
    wider = family.configure(section.size, **{name: width + 1 for name, width in widths.items()}, overrides={})
    derived = [name for name, value in dataclasses.asdict(here).items() if value != getattr(wider, name)]
    rest = {name: value for name, value in stored.config.items() if name not in derived}
    # Some widths depend on other fields: on the size of a patch, for one.
    expected = family.configure(section.size, **widths, overrides=rest)
    wrong = [name for name in derived if name in stored.config and stored.config[name] != getattr(expected, name)]
    if wrong:
        listed = ", ".join(f"{name} {stored.config[name]} (here {getattr(expected, name)})" for name in wrong)
        raise CheckpointError(
            f"{section.weights}: was made for another autoencoder or text encoder, with {listed}; name those of its "
            "run in vae and text, or choose other weights"
        )
    config = family.config_class(**stored.config)
    return override_fields(config, section.overrides, where="model.overrides", derived=derived)


def rebuild_denoiser(name: str, architecture: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LoadedDenoiser:
    """The denoiser of a checkpoint, from the architecture saved with it."""
    family = get_denoiser(name)
    config = family.config_class(**architecture)
    model = family.build(config, generator=stream(0, "denoiser weights"))
    model.load_state_dict(tensors)
    return LoadedDenoiser(family, model, config)


def check_stored(found: Architecture, *, kind: str, name: str, path: str) -> None:
    if (found.kind, found.name) != (kind, name):
        raise CheckpointError(
            f"{path}: holds the {found.kind} '{found.name}', the recipe asks for the {kind} '{name}'; "
            "change the name in the recipe or choose other weights"
        )
