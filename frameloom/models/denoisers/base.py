"""What a denoiser family offers to the trainer, the sampler and the planner, and what families share in offering it.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.layers.sequence_parallel import Exchange
from frameloom.models.lora_keys import LoraNames
from frameloom.models.names import refuse_unknown
from frameloom.models.text.base import TextStates

__all__ = [
    "NOTHING",
    "NUM_TIMESTEPS",
    "Conditions",
    "DenoiserFamily",
    "Draws",
    "Encode",
    "TextStates",
    "build_fresh",
    "choose_size",
    "find_index",
    "find_too_small",
    "initialize",
    "list_blocks",
    "override_fields",
    "refuse_foreign",
]

Config = TypeVar("Config")
Model = TypeVar("Model", bound=nn.Module)
Encode = Callable[[Tensor], Tensor]


class Draws(Protocol):
    """The random numbers of the samples of a batch, each from its own stream; `purpose` keeps draws apart."""

    @property
    def is_training(self) -> bool: ...

    def uniform_B(self, purpose: str) -> Tensor: ...
    def normal(self, purpose: str, shape: tuple[int, ...]) -> Tensor: ...


NUM_TIMESTEPS = 1000
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Conditions:
    """What a denoiser may be told besides the noisy latent, its noise level and the caption; None is "not given".

    beside_BCFHW     latent channels that stand beside the noisy ones (inpaint mask and masked latent, control), in the
                     order of the family's `pack_known`
    sizes_B6         original height and width, crop top and left, target height and width, in pixels
    cells_BFHW       1 where a latent cell holds picture, 0 where a batch of several sizes was padded
    image_text       captions of single images that follow the clip along F: N for each sample, B * N in this order
    guidance_B       guidance scale that a distilled model is told
    """

    beside_BCFHW: Tensor | None = None
    sizes_B6: Tensor | None = None
    cells_BFHW: Tensor | None = None
    image_text: TextStates | None = None
    guidance_B: Tensor | None = None


NOTHING = Conditions()


@dataclass(frozen=True)
class DenoiserFamily:
    """One architecture, as a record of functions; nothing outside its folder names the family.

    configure      (size, *, latent_channels, text_width, pooled_width, overrides) -> config
    build          (config, generator=None) -> model with fresh weights drawn from `generator` alone; without one,
                   from a fixed stream. Under `torch.device("meta")` the model has shapes and no weights.
    patch          config -> latent cells (frames, height, width) per token
    denoise        (model, noisy_BCFHW, timestep_B, text, given=NOTHING) -> prediction_BCFHW; timestep 1 is pure noise,
                   0 is data (`find_index` gives a DDPM's index). What is not given gets its neutral value;
                   a condition that the model has no input for is a ConfigError.
    blocks         model -> its repeated blocks; they take and return tensors only (recompute, sharding, compile). The
                   kind of a block is the name of the list that it stands in; blocks of a kind come in the order of
                   the forward pass.
    load_original  (model, tensors) fills the model from a published checkpoint or from one of its own
    num_tokens     (config, latent (frames, height, width)) -> video tokens of one sample
    beside         config -> what the model expects in `Conditions.beside_BCFHW`: "none", "inpaint" or "control"
    pack_known     (config, clip_BCFHW, known_B1FHW, encode, draws) -> beside_BCFHW for "inpaint": from the clip as
                   pixels in [-1, 1], a mask that is 1 where a pixel is given and 0 where it must be made, a function
                   from pixels to normalised latents, and random numbers for families that vary what they give. The
                   family blanks, encodes, brings the mask to latent cells and orders the channels.
    knows          what an "inpaint" model can be given: any "regions" of a clip, or whole frames at its "ends"
    find_kept      beside_BCFHW -> (mask_B1FHW, latent_BCFHW) for "inpaint": the latent cells that are given, where the
                   family encodes them apart from the clip; None: they are those of the encoded clip
    told_guidance  config -> whether the model was distilled to be told its guidance scale (`Conditions.guidance_B`)
    text_join      "first": token states of the first text encoder; "concat": of all, side by side along D. The pooled
                   vector is that of the last one in both.
    num_heads      config -> heads of self-attention, which limit the ranks of a sequence group; None: the tokens of a
                   clip cannot be divided over ranks
    exchanges      (config, latent (frames, height, width), text tokens, ranks of a sequence group) -> every
                   self-attention of one clip around which these ranks exchange tokens
    images_skip    whether clips of one frame leave out blocks that longer ones use: processes that split the weights
                   must then not mix the two in one pass
    lora_targets   patterns of the linear layers that get LoRA adapters by default; None: all inside the blocks
    lora_names     how published LoRA files call the family and its layers
    """

    name: str
    config_class: type
    sizes: Mapping[str, Any]
    configure: Callable[..., Any]
    build: Callable[..., nn.Module]
    patch: Callable[[Any], tuple[int, int, int]]
    denoise: Callable[..., Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]
    load_original: Callable[..., None]
    num_tokens: Callable[[Any, tuple[int, int, int]], int]
    beside: Callable[[Any], Literal["none", "inpaint", "control"]] = lambda config: "none"
    pack_known: Callable[[Any, Tensor, Tensor, Encode, Draws], Tensor] | None = None
    knows: Literal["regions", "ends"] = "regions"
    find_kept: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    told_guidance: Callable[[Any], bool] = lambda config: False
    text_join: Literal["first", "concat"] = "first"
    num_heads: Callable[[Any], int] | None = None
    exchanges: Callable[[Any, tuple[int, int, int], int, int], list[Exchange]] = lambda *_: []
    images_skip: bool = False
    lora_targets: tuple[str, ...] | None = None
    lora_names: LoraNames = field(default_factory=LoraNames)


def find_index(timestep_B: Tensor) -> Tensor:
    """The index of a noise level, as a DDPM counts them; a whole number in float32."""
    return (timestep_B.float() * NUM_TIMESTEPS).round()


def list_blocks(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """The blocks of all lists called `names`, one list after the other."""
    return [block for name in names for block in cast(nn.ModuleList, getattr(model, name))]


def refuse_foreign(given: Conditions, family: str, *, known: Collection[str]) -> None:
    """ConfigError for a condition that the family has no input for: ignoring it would train on something else."""
    for name, value in vars(given).items():
        if value is not None and name not in known:
            raise ConfigError(f"{family}: the model has no input for the condition '{name}'; leave it out")


def choose_size(
    sizes: Mapping[str, Config], size: str, *, family: str, derived: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Config:
    """A named size with the fields that follow from other parts of the recipe, and `overrides` of any other."""
    refuse_unknown(size, sizes, what=f"{family} size")
    fitted = dataclasses.replace(sizes[size], **derived)  # type: ignore[type-var]
    return override_fields(fitted, overrides, where="model.overrides", derived=derived)


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
    fields = {field.name for field in dataclasses.fields(config)} - set(derived)  # type: ignore[arg-type]
    for name, value in overrides.items():
        if name in derived:
            raise ConfigError(f"{where}: '{name}' follows from the autoencoder and the text encoders; remove it")
        refuse_unknown(name, fields, what=where)
        _refuse_other_type(name, value, getattr(config, name), where=where)
    return dataclasses.replace(config, **overrides)  # type: ignore[type-var]


def _refuse_other_type(name: str, value: Any, current: Any, *, where: str) -> None:
    expected = {tuple: (tuple, list), float: (float, int)}.get(type(current), (type(current),))
    # bool is an int to Python, but `depth: true` is a mistake.
    if not isinstance(value, expected) or isinstance(value, bool) != isinstance(current, bool):
        raise ConfigError(f"{where}: '{name}' is {value!r}; it should be like {current!r}")


def build_fresh(
    make: Callable[[], Model],
    generator: torch.Generator | None,
    *,
    family: str,
    is_zero: Callable[[str], bool] = lambda name: False,
    finish: Callable[[Model, torch.Generator], None] = lambda model, generator: None,
) -> Model:
    """What `make` makes, with weights from `initialize`, then `finish`; under `torch.device("meta")`, shapes only."""
    device = torch.get_default_device()
    # Made without storage first: layers would otherwise fill themselves from the global generator.
    with torch.device("meta"):
        model = make()
    if device.type == "meta":
        return model
    model.to_empty(device=device)
    if generator is None:
        generator = stream(0, f"{family} weights", device=device.type)
    initialize(model, generator, is_zero=is_zero)
    finish(model, generator)
    return model


def initialize(
    model: nn.Module, generator: torch.Generator, *, is_zero: Callable[[str], bool] = lambda name: False
) -> None:
    """Fill every parameter from `generator`, in the order of the modules; no other random state is read or changed.

    Linear and convolution layers get PyTorch's usual uniform law, +-1/sqrt(inputs); norms start as identity;
    modules for whose name `is_zero` holds start as zeros. A module with parameters of its own kind has a method
    `initialize_parameters(generator)`.
    """
    with torch.no_grad():
        for name, module in model.named_modules():
            parameters = dict(module.named_parameters(recurse=False))
            if is_zero(name):
                for parameter in parameters.values():
                    parameter.zero_()
            elif isinstance(module, _LINEAR):
                bound = module.weight[0].numel() ** -0.5
                for parameter in parameters.values():
                    parameter.uniform_(-bound, bound, generator=generator)
            elif parameters:
                _initialize_other(name, module, generator)


def _initialize_other(name: str, module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, _NORMS):
        for key, parameter in module.named_parameters(recurse=False):
            parameter.fill_(1.0 if key == "weight" else 0.0)
    elif isinstance(module, nn.Embedding):
        module.weight.normal_(generator=generator)
    elif callable(own := getattr(module, "initialize_parameters", None)):
        own(generator)
    else:
        raise TypeError(f"{name}: no rule to initialize a {type(module).__name__}; give it initialize_parameters")
