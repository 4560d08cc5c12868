"""Specs of denoiser families, autoencoders and text encoders, and checks of their architecture fields; torch-free.

Shape letters: B batch, C channels, F frames, H height, W width.

The `config.py` of a family ends with its spec, and `models/registry.py` finds it by name. Recipes are checked against
specs without loading torch: code that needs torch is a link, which is imported when it is first read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, overload

from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.models.vaes.config import LengthRule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from frameloom.models.denoisers.base import Denoiser
    from frameloom.models.denoisers.export_forms import ExportForms
    from frameloom.models.lora.keys import LoraNames
    from frameloom.models.text.base import TextEncoder
    from frameloom.models.vaes.base import VideoVAE

Linked = TypeVar("Linked")
Config = TypeVar("Config")
Latent = tuple[int, int, int]
"""latent cells (frames, height, width) of one clip"""
# Fields of denoisers that follow from the autoencoder and the text encoders; no recipe sets them.
WIDTH_FIELDS = ("in_channels", "context_in_dim", "vec_in_dim")


class Link(Generic[Linked]):
    """A field that is written as "package.module:name" and read as what this names; "" is read as None."""

    def __init__(self, default: str | None = None) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, spec: None, owner: type) -> str: ...
    @overload
    def __get__(self, spec: object, owner: type) -> Linked: ...
    def __get__(self, spec: object | None, owner: type) -> Any:
        if spec is None:
            if self._default is None:
                raise AttributeError(self._name)  # so that dataclasses see a field without a default
            return self._default
        target = vars(spec)[self._name]
        return load_object(target) if target else None

    def __set__(self, spec: object, target: str) -> None:
        vars(spec)[self._name] = target


def load_object(target: str) -> Any:
    """The object that `target`, "package.module:name", names; its module is imported if it was not yet."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ValueError(f"'{target}' names no object; write it as package.module:name")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and something that it imports does not
        raise ImportError(f"'{target}': there is no module '{error.name}'") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise ImportError(f"'{target}': the module has no '{name}'") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSpec:
    """Base of the specs of denoisers and autoencoders.

    sizes  architectures by name; "tiny" comes first
    """

    name: str
    sizes: Mapping[str, Any]

    @property
    def config_class(self) -> type[Any]:
        return type(self._first)

    @cached_property
    def fields(self) -> dict[str, type]:
        """Fields of the architecture that a recipe may override, with the types of their values."""
        return field_types(self._first, without=WIDTH_FIELDS)

    @property
    def _first(self) -> Any:
        return next(iter(self.sizes.values()))


class DenoiserConfig:
    """Base of the architectures of denoisers, which are frozen dataclasses."""

    where: ClassVar[str]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        problems = self.find_problems()
        if problems:
            raise ConfigError(problems)

    def find_problems(self) -> list[str]:
        """What is wrong with the values, a message each."""
        raise NotImplementedError

    @property
    def condition(self) -> Literal["none", "inpaint", "control"]:
        """What the model expects in `cond_latents`."""
        return "none"

    @property
    def patch(self) -> Latent:
        """Latent cells (frames, height, width) per token."""
        side = getattr(self, "patch_size", 1)
        return getattr(self, "patch_size_t", 1), side, side

    @property
    def heads(self) -> int | None:
        """Heads of self-attention, which limit the ranks of a sequence group; None: tokens cannot be divided."""
        return getattr(self, "num_attention_heads", None)

    def token_grid(self, latent_FHW: Latent) -> Latent:
        """Tokens along (frames, rows, columns); ConfigError for a latent that the model cannot take."""
        return token_grid(latent_FHW, self.patch[1], where=self.where)

    def num_tokens(self, latent_FHW: Latent) -> int:
        return math.prod(self.token_grid(latent_FHW))

    def derive_widths(
        self, *, latent_channels: int, text_width: int, pooled_width: int, overrides: Mapping[str, Any]
    ) -> dict[str, int]:
        """Fields that follow from the autoencoder and the text encoders."""
        widths = dict(zip(WIDTH_FIELDS, (latent_channels, text_width, pooled_width), strict=True))
        return {name: width for name, width in widths.items() if hasattr(self, name)}


def token_grid(latent_FHW: Latent, patch_size: int, *, where: str = "denoiser") -> Latent:
    """Tokens of a latent without patching in time; ConfigError when patches do not tile it."""
    frames, height, width = latent_FHW
    if height % patch_size or width % patch_size or min(latent_FHW) < 1:
        raise ConfigError(
            f"{where}: a latent of {height}x{width} cells cannot be cut into patches of {patch_size}x{patch_size}; "
            f"choose a resolution whose latent sides are multiples of {patch_size} (with an autoencoder of stride 8: "
            f"pixels that are multiples of {8 * patch_size})"
        )
    return frames, height // patch_size, width // patch_size


@dataclass(frozen=True, kw_only=True, eq=False)
class DenoiserSpec(ModelSpec):
    """One architecture; nothing outside its folder names the family.

    model                 "module:Class", a subclass of `Denoiser`
    weights               module with `load_original`, `export_original`, `EXPORT` and, where published LoRA files have
                          other names than most, `LORA_NAMES`
    block_kinds           kinds of its repeated blocks: the names of the lists that they stand in
    supported_conditions  what it can be given besides the caption: "sizes" of pictures and their crops, "images" beside
                          a clip, frames that are "known", a "control" clip; "log_sigma": noise levels between those of
                          a DDPM
    supported_masks       what an inpaint model can be given: any "regions" of a clip, or whole frames at its "ends"
    text_join             "first": token states of the first text encoder; "concat": of all, side by side along D. The
                          pooled vector is that of the last one in both.
    images_skip_temporal_blocks  clips of one frame leave out blocks that longer ones use: processes that split the
                          weights must then not mix the two in one pass
    lora_targets          patterns of the linear layers that get LoRA adapters by default; None: all inside the blocks
    """

    block_kinds: tuple[str, ...]
    supported_conditions: tuple[str, ...] = ()
    supported_masks: Literal["regions", "ends"] = "regions"
    text_join: Literal["first", "concat"] = "first"
    images_skip_temporal_blocks: bool = False
    lora_targets: tuple[str, ...] | None = None
    model: Link[type[Denoiser]] = Link()
    weights: str

    def build(self, config: Any, generator: torch.Generator | None = None) -> Denoiser:
        """A model with fresh weights drawn from `generator` alone; without one, from a fixed stream."""
        model: Denoiser = load_object("frameloom.models.denoisers.base:build_fresh")(self.model, config, generator)
        return model

    @property
    def load_original(self) -> Callable[..., None]:
        """(model, tensors) fills the model from a state dict with the published keys or its own; a CheckpointError
        names what is missing, unexpected or of another shape."""
        load: Callable[..., None] = import_module(self.weights).load_original
        return load

    @property
    def export_forms(self) -> ExportForms:
        forms: ExportForms = import_module(self.weights).EXPORT
        return forms

    @property
    def lora_names(self) -> LoraNames:
        own: LoraNames | None = getattr(import_module(self.weights), "LORA_NAMES", None)
        return own or load_object("frameloom.models.lora.keys:TRANSFORMER_NAMES")

    def configure(
        self, size: str, *, latent_channels: int, text_width: int, pooled_width: int, overrides: Mapping[str, Any]
    ) -> Any:
        """A named size, fitted to the autoencoder and the text encoders, with `overrides` of any other field."""
        refuse_unknown(size, self.sizes, what=f"{self.name} size")
        widths = self.sizes[size].derive_widths(
            latent_channels=latent_channels, text_width=text_width, pooled_width=pooled_width, overrides=overrides
        )
        check_overrides(self.sizes[size], overrides, where="model.overrides", derived=widths)
        return dataclasses.replace(self.sizes[size], **overrides, **widths)

    def preview(self, size: str, overrides: Mapping[str, Any]) -> Any:
        """The architecture as far as it can be read from a recipe that is not checked yet.

        Values that no field can have are left out, and rules across fields are not applied: other checks report both.
        """
        config = copy(self.sizes.get(size, self._first))
        for name, value in overrides.items():
            if name in self.fields and fits_type(value, self.fields[name]):
                object.__setattr__(config, name, value)
        return config

    def patch_of(self, size: str, overrides: Mapping[str, Any]) -> Latent:
        """Latent cells per token in a recipe whose size and overrides are not checked yet."""
        frames, height, width = self.preview(size, overrides).patch
        return max(1, frames), max(1, height), max(1, width)

    def heads_of(self, size: str, overrides: Mapping[str, Any]) -> int | None:
        """Attention heads in a recipe that is not checked yet; None where they are not known or set no limit."""
        heads: int | None = self.preview(size, overrides).heads if size in self.sizes else None
        return heads


@dataclass(frozen=True, kw_only=True, eq=False)
class VAESpec(ModelSpec):
    """One autoencoder. Strides and causality are those of its architecture, the same for all sizes.

    build          config -> model
    load_original  as for a denoiser
    start          (model) improves freshly drawn weights; None: they stay
    inflates       (tensors) -> whether they are those of an image autoencoder that this one can start from; None: it
                   cannot
    """

    build: Link[Callable[[Any], VideoVAE]] = Link()
    load_original: Link[Callable[[VideoVAE, Mapping[str, Tensor]], None]] = Link()
    start: Link[Callable[[Any], None] | None] = Link("")
    inflates: Link[Callable[[Mapping[str, Tensor]], bool] | None] = Link("")

    @property
    def strides(self) -> tuple[int, int, int]:
        """Pixels (frames, height, width) per latent cell."""
        strides: tuple[int, int, int] = self._first.strides
        return strides

    @property
    def causal(self) -> bool:
        return bool(self._first.causal)

    def lengths(self, patch: int = 1) -> LengthRule:
        """The lengths of clips that have a latent, and whose latent frames fill tokens of `patch` frames."""
        return LengthRule(self.strides[0], self.causal, patch)

    def latent_shape(self, frames: int, height: int, width: int) -> Latent:
        """Cells (frames, height, width) of a clip of this size in pixels."""
        cells: Latent = self._first.latent_shape(frames, height, width)
        return cells

    @property
    def can_inflate(self) -> bool:
        """Whether it can start from the weights of an image autoencoder."""
        return bool(vars(self)["inflates"])


@dataclass(frozen=True, kw_only=True, eq=False)
class TextEncoderSpec:
    """One text encoder.

    max_length  the longest text, in tokens, that it was trained for
    window      one with a window reads longer texts in windows of that many tokens, two of which are its start and end,
                and its length is then (window - 2) * n + 2
    packaged    an installed package brings its weights; the others are read from a folder
    build       (name, max_length, path, options) -> encoder
    """

    name: str
    max_length: int
    window: int | None = None
    packaged: bool = False
    build: Link[Callable[..., TextEncoder]] = Link()


def find_too_small(config: object, least: Mapping[str, float], *, where: str) -> list[str]:
    """A message for each field of `config` that is below its `least` value."""
    return [
        f"{where}: {name} is {getattr(config, name)}; it must be at least {smallest}"
        for name, smallest in least.items()
        if getattr(config, name) < smallest
    ]


def override_fields(
    config: Config, overrides: Mapping[str, Any], *, where: str, derived: Collection[str] = ()
) -> Config:
    """A copy of a config dataclass with some fields replaced; `derived` ones follow from other parts of the recipe."""
    check_overrides(config, overrides, where=where, derived=derived)
    return dataclasses.replace(config, **overrides)  # type: ignore[type-var]


def check_overrides(config: object, overrides: Mapping[str, Any], *, where: str, derived: Collection[str] = ()) -> None:
    types = field_types(config, without=derived)
    for name, value in overrides.items():
        if name in derived:
            raise ConfigError(f"{where}: '{name}' follows from the autoencoder and the text encoders; remove it")
        refuse_unknown(name, types, what=where)
        if not fits_type(value, types[name]):
            raise ConfigError(f"{where}: '{name}' is {value!r}; it should be like {getattr(config, name)!r}")


def field_types(config: object, *, without: Collection[str] = ()) -> dict[str, type]:
    """The type of each field's value, in the order of the class."""
    names = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    return {name: type(getattr(config, name)) for name in names if name not in without}


def fits_type(value: object, kind: type) -> bool:
    """Whether a recipe may give `value` to a field of this type: whole numbers for any, lists for tuples."""
    allowed = {float: (int, float), tuple: (list, tuple)}.get(kind, (kind,))
    # bool is an int to Python, but `depth: true` is a mistake.
    return isinstance(value, allowed) and isinstance(value, bool) == (kind is bool)
