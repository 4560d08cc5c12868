"""Autoencoders from a recipe section, a run, a model folder or published weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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
from frameloom.models.vaes.base import VideoVAE
from frameloom.models.vaes.wrappers import HalfVAE, SlicedVAE, TiledVAE
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
    if found is not None:
        _check_inflation(section, is_image=family.inflates is not None and family.inflates(found.tensors))
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
    facts = [section.name, dataclasses.asdict(config), found.digest if found else seed]
    if section.precision != "fp32":
        facts += [section.precision, section.fp32_norms]
        model = HalfVAE(model, Precision.frozen(section.precision, fp32_norms=section.fp32_norms))
    if section.mini_batch is not None:
        model = SlicedVAE(model, section.mini_batch)
    return LoadedVAE(model, section.name, config, digest_value(facts))


def configure_vae(section: VAESection, stored: Architecture | None) -> Any:
    """The architecture that its weights bring along, or else that of the recipe's size; with overrides."""
    family = get_vae(section.name)
    base = family.sizes[section.size]
    if stored is not None and stored.config and not section.inflate:
        check_stored(stored, kind="vae", name=section.name, path=section.weights or "")
        base = family.config_class(**stored.config)
    return override_fields(base, section.overrides, where="vae.overrides")


def _check_inflation(section: VAESection, *, is_image: bool) -> None:
    """An image autoencoder becomes a video one only when it is asked for, and nothing else can."""
    if is_image and not section.inflate:
        raise CheckpointError(
            f"{section.weights}: holds an image autoencoder; set vae.inflate: true to start {section.name} from it, or "
            "name weights of a video autoencoder"
        )
    if section.inflate and not is_image:
        raise CheckpointError(
            f"{section.weights}: vae.inflate is true, but this is no image autoencoder that {section.name} can start "
            "from; name the weights of Stable Diffusion's, or remove vae.inflate"
        )


@dataclass(frozen=True)
class VAEChoice:
    """Which autoencoder. A run or a model folder says what it is; published weights need a `name` and a `size`.

    `overrides` are architecture fields, such as the tiles of the autoencoders that have their own.
    """

    weights: Path | None = None
    name: str | None = None
    size: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)


def load_vae(choice: VAEChoice) -> LoadedVAE:
    """The autoencoder, on the host and in evaluation mode."""
    own = find_own(choice.weights) if choice.weights is not None else None
    if choice.weights is not None and not choice.weights.exists():
        raise CheckpointError(f"{choice.weights}: no such file or folder; name a run, a model folder or a weights file")
    name = _find_name(choice, own)
    if choice.weights is None:
        _log.warning(
            "no weights given: this %s is freshly drawn, and its numbers say nothing about a trained one", name
        )
    family = get_vae(name)
    size = choice.size or next(iter(family.sizes))
    refuse_unknown(size, family.sizes, what=f"size of the autoencoder {name}")
    section = VAESection(
        name=name,
        size=size,
        weights=None if choice.weights is None else str(choice.weights),
        overrides=dict(choice.overrides) if own is None else {},
    )
    loaded = build_vae(section, seed=0)
    if own is not None and choice.overrides:
        loaded = _rebuild(loaded, choice.overrides)
    loaded.model.eval().requires_grad_(False)
    return loaded


def _find_name(choice: VAEChoice, own: Path | None) -> str:
    if own is not None:
        content = read_config(own)
        if content.get("kind") != "vae":
            raise CheckpointError(f"{own}: holds a {content.get('kind')}, not an autoencoder; name another folder")
        found = str(content["name"])
        if choice.name not in (None, found):
            raise CheckpointError(f"{own}: holds the autoencoder '{found}', not '{choice.name}'; leave --name out")
        return found
    if choice.weights is not None and (choice.weights / "checkpoints").is_dir():
        raise CheckpointError(
            f"{choice.weights}: a run that has not finished, so it has no export yet; let it train on"
        )
    if choice.weights is not None and (choice.name is None or choice.size is None):
        raise ConfigError(
            f"{choice.weights}: published weights do not say what they are; add --name ({', '.join(VAES)}) and --size"
        )
    if choice.name is None:
        raise ConfigError(f"which autoencoder? give --vae RUN or FOLDER, or --name ({', '.join(VAES)}) and --weights")
    return choice.name


def _rebuild(loaded: LoadedVAE, overrides: Mapping[str, Any]) -> LoadedVAE:
    """The same weights under other settings; CheckpointError when a setting changes what the weights are."""
    config = override_fields(loaded.config, overrides, where="--set")
    model = get_vae(loaded.name).build(config)
    tensors = loaded.model.state_dict()
    check_fit(model.state_dict(), tensors, where="with --set, the autoencoder's weights")
    model.load_state_dict(tensors)
    return dataclasses.replace(loaded, model=model, config=config)


@dataclass(frozen=True)
class Cuts:
    """How a clip is cut to bound memory: exact pieces of `chunk_frames`, and tiles of `tile_px` that fade."""

    chunk_frames: int | None = None
    tile_px: int | None = None
    tile_overlap: float = 0.25


@runtime_checkable
class _Chunking(Protocol):
    """Autoencoders whose pieces give the result of the whole clip."""

    def enable_chunking(self, *, encode_frames: int, decode_frames: int) -> None: ...


def cut_vae(loaded: LoadedVAE, cuts: Cuts) -> VideoVAE:
    """The autoencoder under `cuts`; ConfigError when it cannot be cut so, with the settings that it has instead."""
    vae: VideoVAE = loaded.model
    if cuts.chunk_frames is not None:
        if not isinstance(vae, _Chunking):
            raise ConfigError(
                f"--chunk-frames: the autoencoder {loaded.name} has no pieces that equal the whole clip; "
                f"{_own_settings(loaded.config)}"
            )
        vae.enable_chunking(
            encode_frames=cuts.chunk_frames, decode_frames=max(1, cuts.chunk_frames // loaded.model.strides[0])
        )
    if cuts.tile_px is not None:
        vae = TiledVAE(vae, tile_px=cuts.tile_px, overlap=cuts.tile_overlap).eval()
    return vae


def _own_settings(config: Any) -> str:
    words = ("tile", "tiling", "chunk")
    names = [item.name for item in dataclasses.fields(config) if any(word in item.name for word in words)]
    return f"it has these settings: --set {', --set '.join(names)}" if names else "leave it out"


def usable_frames(vae: VideoVAE, available: int) -> int:
    """The most frames, at most `available`, that come back from the autoencoder as they went in; at least 1."""
    stride, lead = vae.strides[0], int(vae.causal)
    num_frames = lead + (available - lead) // stride * stride
    # A non-causal model that packs frames decodes one latent frame to one frame.
    is_whole = num_frames > 1 and vae.latent_frames(num_frames) > 1
    return num_frames if is_whole else 1


def check_frames(vae: VideoVAE, frames: int | None) -> None:
    """ConfigError with the neighbours when a person asks for a number of frames that the autoencoder cannot take."""
    if frames is None or usable_frames(vae, frames) == frames:
        return
    below, above = usable_frames(vae, frames), frames
    while usable_frames(vae, above) != above:
        above += 1
    raise ConfigError(f"--frames {frames}: this autoencoder takes {below} or {above} frames, not {frames}")
