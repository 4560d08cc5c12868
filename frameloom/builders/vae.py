"""Autoencoders from a recipe section, a run, a model folder or published weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from frameloom.builders.denoiser import check_stored
from frameloom.builders.published import warn_of_differences
from frameloom.checkpoint.model_folder import Architecture, find_own, read_weights
from frameloom.config.schema.models import VAESection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import digest_value
from frameloom.core.logging import get_logger
from frameloom.core.random import key
from frameloom.core.spelling import refuse_unknown
from frameloom.models.precision import Precision
from frameloom.models.registry import VAES, get_vae
from frameloom.models.spec import override_fields
from frameloom.models.state_dict import check_fit
from frameloom.models.vaes.base import EncodePolicy, VideoVAE
from frameloom.weights.files import read_config

_log = get_logger(__name__)


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
    found = read_weights(Path(section.weights), kind="vae") if section.weights else None
    # An image autoencoder becomes a video one only when it is asked for, and nothing else can.
    is_image = found is not None and family.inflates is not None and family.inflates(found.tensors)
    if is_image and not section.inflate:
        raise CheckpointError(
            f"{section.weights}: holds an image autoencoder; set vae.inflate: true to start {section.name} from it, or "
            "name weights of a video autoencoder"
        )
    if found is not None and section.inflate and not is_image:
        raise CheckpointError(
            f"{section.weights}: vae.inflate is true, but this is no image autoencoder that {section.name} can start "
            "from; name the weights of Stable Diffusion's, or remove vae.inflate"
        )
    config = configure_vae(section, found)
    if found is not None and not found.config and not section.inflate:
        warn_of_differences(family, config, found.original_config, key="vae", path=section.weights or "")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "vae weights") >> 1)
        model = family.build(config)
    if found is not None:
        family.load_original(model, found.tensors)
    elif family.start is not None:
        family.start(model)
    identity = [section.name, dataclasses.asdict(config), found.digest if found else seed]
    if section.precision != "fp32":
        identity += [section.precision, section.fp32_norms]
    return LoadedVAE(model.use(encode_policy(section)), section.name, config, digest_value(identity))


def encode_policy(section: VAESection) -> EncodePolicy:
    precision = Precision.frozen(section.precision, fp32_norms=section.fp32_norms)
    return EncodePolicy(precision, clips=section.mini_batch)


def configure_vae(section: VAESection, stored: Architecture | None) -> Any:
    """The architecture that its weights bring along, or else that of the recipe's size; with overrides."""
    family = get_vae(section.name)
    base = family.sizes[section.size]
    if stored is not None and stored.config and not section.inflate:
        check_stored(stored, kind="vae", name=section.name, path=section.weights or "")
        base = family.config_class(**stored.config)
    return override_fields(base, section.overrides, where="vae.overrides")


def load_vae(
    weights: Path | None = None,
    name: str | None = None,
    size: str | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> LoadedVAE:
    """The autoencoder that a person names, on the host and in evaluation mode.

    A run or a model folder says what it is; published weights need a `name` and a `size`. `overrides` are architecture
    fields, such as the tiles of the autoencoders that have their own.
    """
    own = find_own(weights) if weights is not None else None
    if weights is not None and not weights.exists():
        raise CheckpointError(f"{weights}: no such file or folder; name a run, a model folder or a weights file")
    name = _find_name(weights, name, size, own)
    if weights is None:
        _log.warning(
            "no weights given: this %s is freshly drawn, and its numbers say nothing about a trained one", name
        )
    sizes = get_vae(name).sizes
    size = size or next(iter(sizes))
    refuse_unknown(size, sizes, what=f"size of the autoencoder {name}")
    source = None if weights is None else str(weights)
    section = VAESection(name=name, size=size, weights=source, overrides=dict(overrides) if own is None else {})
    loaded = build_vae(section, seed=0)
    if own is not None and overrides:
        # The same weights under other settings, which must not change what the weights are.
        config = override_fields(loaded.config, overrides, where="--set")
        model, tensors = get_vae(name).build(config), loaded.model.state_dict()
        check_fit(model.state_dict(), tensors, where="with --set, the autoencoder's weights")
        model.load_state_dict(tensors)
        loaded = dataclasses.replace(loaded, model=model, config=config)
    loaded.model.eval().requires_grad_(False)
    return loaded


def _find_name(weights: Path | None, name: str | None, size: str | None, own: Path | None) -> str:
    if own is not None:
        content = read_config(own)
        if content.get("kind") != "vae":
            raise CheckpointError(f"{own}: holds a {content.get('kind')}, not an autoencoder; name another folder")
        found = str(content["name"])
        if name not in (None, found):
            raise CheckpointError(f"{own}: holds the autoencoder '{found}', not '{name}'; leave --name out")
        return found
    if weights is not None and (weights / "checkpoints").is_dir():
        raise CheckpointError(f"{weights}: a run that has not finished, so it has no export yet; let it train on")
    if weights is not None and (name is None or size is None):
        raise ConfigError(
            f"{weights}: published weights do not say what they are; add --name ({', '.join(VAES)}) and --size"
        )
    if name is None:
        raise ConfigError(f"which autoencoder? give --vae RUN or FOLDER, or --name ({', '.join(VAES)}) and --weights")
    return name


def use_policy(loaded: LoadedVAE, policy: EncodePolicy) -> VideoVAE:
    """The autoencoder under a policy from flags; ConfigError names the settings of one that cannot be cut so."""
    if policy.chunk_frames is not None and not loaded.model.exact_chunks:
        parts = ("tile", "tiling", "chunk")
        names = [item.name for item in dataclasses.fields(loaded.config) if any(part in item.name for part in parts)]
        raise ConfigError(
            f"--chunk-frames: the autoencoder {loaded.name} has no pieces that equal the whole clip; "
            + (f"it has these settings: --set {', --set '.join(names)}" if names else "leave it out")
        )
    return loaded.model.use(policy)


def check_frames(vae: VideoVAE, frames: int | None) -> None:
    """ConfigError with the neighbours when a person asks for a number of frames that the autoencoder cannot take."""
    if frames is None or vae.usable_frames(frames) == frames:
        return
    below, above = vae.usable_frames(frames), frames
    while vae.usable_frames(above) != above:
        above += 1
    raise ConfigError(f"--frames {frames}: this autoencoder takes {below} or {above} frames, not {frames}")
