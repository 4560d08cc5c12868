"""From recipe sections to objects: autoencoder, text encoders, denoiser, objective.

Nothing here draws from the global generators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frameloom.checkpoint.model_folder import Architecture, read_weights
from frameloom.config.objective_settings import ObjectiveSection, beta_range
from frameloom.config.schema import ModelSection, TextSection, VAESection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import digest_value
from frameloom.core.process_settings import avoid_amx_in_virtual_machines, keep_freed_memory
from frameloom.core.random import key, stream
from frameloom.diffusion.ddpm import DDPMObjective
from frameloom.diffusion.edm import EDMObjective
from frameloom.diffusion.flow import FlowObjective
from frameloom.diffusion.objective import NoiseSettings, Objective
from frameloom.diffusion.timesteps import LevelBias
from frameloom.generate.published import warn_of_differences
from frameloom.models.architecture import override_fields
from frameloom.models.half_precision import PRECISIONS
from frameloom.models.registry import get_denoiser, get_vae
from frameloom.models.spec import DenoiserSpec
from frameloom.models.text.base import TextEncoder, TextStates
from frameloom.models.text.building import build_text_encoder
from frameloom.models.text.dropout import drop_text
from frameloom.models.vaes.base import VideoVAE
from frameloom.models.vaes.half import HalfVAE
from frameloom.models.vaes.sliced import SlicedVAE


def pick_device(name: str) -> torch.device:
    """`auto` is the first accelerator that is there, else the CPU, whose work then keeps the memory that it frees."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"train.device: '{name}' is not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"train.device: '{name}' asked for, but PyTorch sees no CUDA device; use auto or cpu")
    if device.type == "cpu":
        keep_freed_memory()
        avoid_amx_in_virtual_machines()
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
        model = HalfVAE(model, PRECISIONS[section.precision], fp32_norms=section.fp32_norms)
    if section.mini_batch is not None:
        model = SlicedVAE(model, section.mini_batch)
    return LoadedVAE(model, section.name, config, digest_value(facts))


def configure_vae(section: VAESection, stored: Architecture | None) -> Any:
    """The architecture that its weights bring along, or else that of the recipe's size; with overrides."""
    family = get_vae(section.name)
    base = family.sizes[section.size]
    if stored is not None and stored.config and not section.inflate:
        _expect(stored, kind="vae", name=section.name, path=section.weights or "")
        base = family.config_class(**stored.config)
    return override_fields(base, section.overrides, where="vae.overrides")


class TextPipeline:
    """All text encoders of a recipe as one.

    `join` "first": token states of the first encoder; "concat": of all, side by side along D. The pooled vector is that
    of the last encoder that has one. An encoder that adds to neither is not run.

    Shape letters: B batch, K text tokens, D width, E encoders.
    """

    def __init__(self, encoders: Sequence[TextEncoder], *, join: Literal["first", "concat"] = "first") -> None:
        self._encoders, self._join = list(encoders), join
        self._words = self._encoders if join == "concat" else self._encoders[:1]
        pooling = [index for index, encoder in enumerate(self._encoders) if encoder.pooled_width]
        self._pooling = pooling[-1] if pooling else None
        if len({encoder.max_length for encoder in self._words}) > 1:
            found = ", ".join(f"{encoder.name} has {encoder.max_length}" for encoder in self._words)
            raise ConfigError(
                f"text.encoders: their token states stand side by side, so max_length must be equal, but {found}"
            )
        self.width = sum(encoder.width for encoder in self._words)
        self.pooled_width = 0 if self._pooling is None else self._encoders[self._pooling].pooled_width
        self.max_length = self._encoders[0].max_length

    @property
    def encoders(self) -> tuple[TextEncoder, ...]:
        return tuple(self._encoders)

    def with_each(self, change: Callable[[TextEncoder], TextEncoder]) -> TextPipeline:
        """The same with other encoders in the place of its own, one for one."""
        return TextPipeline([change(encoder) for encoder in self._encoders], join=self._join)

    @property
    def num_encoders(self) -> int:
        return len(self._encoders)

    def fingerprint(self) -> str:
        found = [encoder.fingerprint() for encoder in self._encoders]
        return digest_value(found if self._join == "first" else [self._join, *found])

    def to(self, device: torch.device | str) -> TextPipeline:
        for encoder in self._encoders:
            encoder.to(device)
        return self

    def unload(self) -> None:
        """Free the memory of the weights, for as long as nothing is encoded."""
        for encoder in self._encoders:
            encoder.unload()

    def encode(self, captions: Sequence[str]) -> TextStates:
        used = {*range(len(self._words)), *([] if self._pooling is None else [self._pooling])}
        states = {index: self._encoders[index].encode(captions) for index in sorted(used)}
        words = [states[index] for index in range(len(self._words))]
        mask_BK = words[0].mask_BK
        for other in words[1:]:
            mask_BK = mask_BK | other.mask_BK
        tokens_BKD = torch.cat([part.tokens_BKD for part in words], dim=-1) if len(words) > 1 else words[0].tokens_BKD
        pooled_BD = tokens_BKD.new_zeros(len(captions), 0) if self._pooling is None else states[self._pooling].pooled_BD
        return TextStates(tokens_BKD, mask_BK, pooled_BD)

    def drop(self, states: TextStates, null: TextStates, dropped_BE: Tensor) -> TextStates:
        """`null`, the states of the empty caption, in the places of the encoders that are dropped for a sample.

        Works on joined states, so on cached ones too. Equal columns drop a caption as a whole.
        """
        words_BD = dropped_BE[:, :1]
        if len(self._words) > 1:
            columns = [dropped_BE[:, [index]].expand(-1, part.width) for index, part in enumerate(self._words)]
            words_BD = torch.cat(columns, dim=1)
        return drop_text(states, null, words_BD, dropped_BE[:, [self._pooling or 0]])


def build_text(section: TextSection, model: ModelSection) -> TextPipeline:
    """The text encoders of a recipe, joined as its denoiser's family asks; on the host until they are moved."""
    encoders: list[TextEncoder] = []
    for item in section.encoders:
        options = item.model_dump(exclude={"name", "max_length", "path", "tokenizer", "train", "lr"}, exclude_none=True)
        if item.path is not None and Path(item.path).is_file():
            from frameloom.generate.text_file import build_from_single_file

            place = Path(item.path)
            made = build_from_single_file(item.name, item.max_length, place, options, tokenizer=item.tokenizer)
            encoders.append(made)
        else:
            encoders.append(build_text_encoder(item.name, max_length=item.max_length, path=item.path, options=options))
    return TextPipeline(encoders, join=get_denoiser(model.family).text_join)


@dataclass(frozen=True)
class LoadedDenoiser:
    """A denoiser, what it was built from, and a digest that changes with its first weights; a checkpoint's has none."""

    family: DenoiserSpec
    model: nn.Module
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

    `widths` are those of latents and text.
    """
    family = get_denoiser(section.family)
    if stored is None or not stored.config:
        return family.configure(section.size, **widths, overrides=section.overrides)
    _expect(stored, kind="denoiser", name=section.family, path=section.weights or "")
    return _fit_stored(family, section, stored.config, widths)


def _fit_stored(
    family: DenoiserSpec, section: ModelSection, stored: Mapping[str, Any], widths: Mapping[str, int]
) -> Any:
    """The architecture that a folder of weights brings along, with the overrides of the recipe.

    CheckpointError where the recipe's autoencoder or text encoders are as wide as others.
    """
    here = family.configure(section.size, **widths, overrides={})
    wider = family.configure(section.size, **{name: width + 1 for name, width in widths.items()}, overrides={})
    derived = [name for name, value in dataclasses.asdict(here).items() if value != getattr(wider, name)]
    rest = {name: value for name, value in stored.items() if name not in derived}
    # Some widths depend on other fields: on the size of a patch, for one.
    expected = family.configure(section.size, **widths, overrides=rest)
    wrong = [name for name in derived if name in stored and stored[name] != getattr(expected, name)]
    if wrong:
        listed = ", ".join(f"{name} {stored[name]} (here {getattr(expected, name)})" for name in wrong)
        raise CheckpointError(
            f"{section.weights}: was made for another autoencoder or text encoder, with {listed}; name those of its "
            "run in vae and text, or choose other weights"
        )
    config = family.config_class(**stored)
    return override_fields(config, section.overrides, where="model.overrides", derived=derived)


def rebuild_denoiser(name: str, architecture: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LoadedDenoiser:
    """The denoiser of a checkpoint, from the architecture saved with it."""
    family = get_denoiser(name)
    config = family.config_class(**architecture)
    model = family.build(config, generator=stream(0, "denoiser weights"))
    model.load_state_dict(tensors)
    return LoadedDenoiser(family, model, config)


def build_objective(section: ObjectiveSection) -> Objective:
    """What a denoiser learns, at which noise levels, and how it is sampled."""
    noise = NoiseSettings(
        offset=section.noise_offset,
        offset_per=section.noise_offset_per,
        perturbation=section.input_perturbation,
        num_strata=section.strata,
    )
    if section.kind == "flow":
        return FlowObjective(
            sigma_min=section.sigma_min,
            law=section.law,
            logit_mean=section.logit_mean,
            logit_std=section.logit_std,
            mode_scale=section.mode_scale,
            num_levels=section.num_levels,
            shift=section.shift,
            patch_area=section.shift_patch,
            sampling_patch_area=section.sampling_shift_patch,
            base_tokens=section.shift_tokens,
            weighting=section.weighting,
            motion_share=section.motion_share,
            noise=noise,
        )
    if section.kind == "edm":
        return EDMObjective(
            **section.edm.model_dump(),
            max_weight=section.min_snr_gamma,
            motion_share=section.motion_share,
            noise=noise,
        )
    beta_start, beta_end = beta_range(section)
    return DDPMObjective(
        beta_schedule=section.betas,
        beta_start=beta_start,
        beta_end=beta_end,
        zero_terminal_snr=section.kind == "v" if section.zero_terminal_snr is None else section.zero_terminal_snr,
        prediction=section.kind,
        snr_gamma=section.min_snr_gamma,
        snr_shift=section.snr_shift,
        spacing=section.spacing,
        motion_share=section.motion_share,
        bias=LevelBias(**section.bias.model_dump()) if section.bias is not None else None,
        within=section.levels,
        noise=noise,
    )


def to_unit_range(pixels: Tensor) -> Tensor:
    """uint8 to [-1, 1]."""
    return pixels.float().div_(127.5).sub_(1)


def to_uint8(pixels: Tensor) -> Tensor:
    """[-1, 1] to uint8, rounded and clamped."""
    return pixels.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)


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


def _expect(found: Architecture, *, kind: str, name: str, path: str) -> None:
    if (found.kind, found.name) != (kind, name):
        raise CheckpointError(
            f"{path}: holds the {found.kind} '{found.name}', the recipe asks for the {kind} '{name}'; "
            "change the name in the recipe or choose other weights"
        )
