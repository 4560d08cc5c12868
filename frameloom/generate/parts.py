"""From recipe sections to objects: autoencoder, text encoders, denoiser, objective.

Nothing here draws from the global generators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.checkpoint.model_folder import ModelFolder, read_weights
from frameloom.config.schema import ModelSection, ObjectiveSection, TextSection, VAESection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import digest_value
from frameloom.core.random import key, stream
from frameloom.diffusion.ddpm import DDPMObjective
from frameloom.diffusion.flow import FlowObjective
from frameloom.diffusion.objective import Objective
from frameloom.models.denoisers import DenoiserFamily, get_family
from frameloom.models.denoisers.base import override_fields
from frameloom.models.text import TextEncoder, TextStates, build_text_encoder
from frameloom.models.vaes import VideoVAE, get_vae

# The ranges that go with the two schedules in published models: Open-Sora-Plan, and SDXL and CogVideoX.
_BETA_RANGE = {"linear": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012)}


def pick_device(name: str) -> torch.device:
    """`auto` is the first accelerator that is there, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"train.device: '{name}' is not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"train.device: '{name}' asked for, but PyTorch sees no CUDA device; use auto or cpu")
    return device


@dataclass(frozen=True)
class LoadedVAE:
    """An autoencoder, what it was built from, and a digest that changes with its weights."""

    model: VideoVAE
    name: str
    config: Any
    digest: str


def build_vae(section: VAESection, *, seed: int) -> LoadedVAE:
    """The autoencoder of a recipe; fresh weights follow from `seed`."""
    family = get_vae(section.name)
    found = read_weights(Path(section.weights)) if section.weights else None
    if found is not None and found.config:
        _expect(found, kind="vae", name=section.name, path=section.weights or "")
        config = family.config_class(**found.config)
    else:
        config = override_fields(family.sizes[section.size], section.overrides, where="vae.overrides")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "vae weights") >> 1)
        model = family.build(config)
    if found is None:
        family.start(model)
    else:
        family.load_original(model, found.tensors)
    digest = digest_value([section.name, dataclasses.asdict(config), found.digest if found else seed])
    return LoadedVAE(model, section.name, config, digest)


class TextPipeline:
    """All text encoders of a recipe as one: token states of the first, pooled vector of the last."""

    def __init__(self, encoders: Sequence[TextEncoder]) -> None:
        self._encoders = list(encoders)
        self.width = encoders[0].width
        self.pooled_width = encoders[-1].pooled_width
        self.max_length = encoders[0].max_length

    def fingerprint(self) -> str:
        return digest_value([encoder.fingerprint() for encoder in self._encoders])

    def encode(self, captions: Sequence[str]) -> TextStates:
        first = self._encoders[0].encode(captions)
        if len(self._encoders) == 1:
            return first
        return TextStates(first.tokens_BKD, first.mask_BK, self._encoders[-1].encode(captions).pooled_BD)


def build_text(section: TextSection) -> TextPipeline:
    return TextPipeline(
        [build_text_encoder(item.name, max_length=item.max_length, path=item.path) for item in section.encoders]
    )


@dataclass(frozen=True)
class LoadedDenoiser:
    family: DenoiserFamily
    model: nn.Module
    config: Any


def build_denoiser(section: ModelSection, *, latent_channels: int, text: TextPipeline, seed: int) -> LoadedDenoiser:
    """The denoiser of a recipe; fresh weights follow from `seed`."""
    family = get_family(section.family)
    found = read_weights(Path(section.weights)) if section.weights else None
    if found is not None and found.config:
        _expect(found, kind="denoiser", name=section.family, path=section.weights or "")
        config = family.config_class(**found.config)
    else:
        config = family.configure(
            section.size,
            latent_channels=latent_channels,
            text_width=text.width,
            pooled_width=text.pooled_width,
            overrides=section.overrides,
        )
    model = family.build(config, generator=stream(seed, "denoiser weights"))
    if found is not None:
        family.load_original(model, found.tensors)
    return LoadedDenoiser(family, model, config)


def rebuild_denoiser(name: str, architecture: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LoadedDenoiser:
    """The denoiser of a checkpoint, from the architecture saved with it."""
    family = get_family(name)
    config = family.config_class(**architecture)
    model = family.build(config, generator=stream(0, "denoiser weights"))
    model.load_state_dict(tensors)
    return LoadedDenoiser(family, model, config)


def build_objective(section: ObjectiveSection) -> Objective:
    if section.kind == "flow":
        return FlowObjective(sigma_min=section.sigma_min, law=section.law, shift=section.shift)
    beta_start, beta_end = _BETA_RANGE[section.betas]
    return DDPMObjective(
        beta_schedule=section.betas,
        beta_start=beta_start,
        beta_end=beta_end,
        zero_terminal_snr=section.zero_terminal_snr,
        snr_gamma=section.min_snr_gamma,
    )


def to_unit_range(pixels: Tensor) -> Tensor:
    """uint8 to [-1, 1]."""
    return pixels.float().div_(127.5).sub_(1)


def to_uint8(pixels: Tensor) -> Tensor:
    """[-1, 1] to uint8, rounded and clamped."""
    return pixels.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)


def _expect(found: ModelFolder, *, kind: str, name: str, path: str) -> None:
    if (found.kind, found.name) != (kind, name):
        raise CheckpointError(
            f"{path}: holds the {found.kind} '{found.name}', the recipe asks for the {kind} '{name}'; "
            "change the name in the recipe or choose other weights"
        )
