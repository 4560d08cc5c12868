"""The base of all denoisers: one `forward`, fresh weights, lists of repeated blocks, sequence groups.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens, D width, I images of a sample.

A denoiser is called with a noisy latent, a timestep per sample (1 is pure noise, 0 is data; `find_index` gives a DDPM's
index) and named conditions. Absent ones get their neutral value:

    text            [B, K, D] token states, zero where `text_mask` is False
    text_mask       [B, K] bool
    pooled          [B, D] summary of the caption
    sizes           [B, 6] original height and width, crop top and left, target height and width, in pixels
    cond_latents    [B, C, F, H, W] channels beside the noisy ones (inpaint mask and masked latent, control), in the
                    order of `pack_known`
    image_text      [B * I, K, D] captions of single images that follow the clip along F, with `image_text_mask`
    guidance        [B] guidance scale that a distilled model takes as an input
    dropout_seeds   [B] int64 on the host, seeds of the masks of a model with dropout; absent: nothing is dropped

After `use_sequence_group` the model is called as before, by all ranks of the group with the same tensors (noise, noise
levels, captions, conditions); each gets the whole prediction. For training, the gradients of all weights must then be
joined over the group, by the group's `reduction`; for sampling there is nothing else to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.distributed.sequence_parallel import Exchange, SequenceGroup, set_sequence_group
from frameloom.models.spec import DenoiserSpec, Latent

Conditions = Mapping[str, Tensor]
Encode = Callable[[Tensor], Tensor]
NUM_TIMESTEPS = 1000
_TEXT = ("text", "text_mask", "pooled")
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Draws:
    """Random numbers of the samples of a batch by purpose, each from its own stream: [B], and [B, ...] of a shape."""

    uniform_B: Callable[[str], Tensor]
    normal: Callable[[str, tuple[int, ...]], Tensor]
    is_training: bool


class Denoiser(nn.Module):
    """`config` is the family's; `block_lists` are the lists of repeated blocks, in the order of the forward pass.

    Blocks take and return tensors only (recompute, sharding, compile).
    """

    family: ClassVar[str]
    block_lists: ClassVar[tuple[str, ...]]
    config: Any

    def forward(self, noisy_BCFHW: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
        """The prediction, in shape and dtype of the noisy latent."""
        raise NotImplementedError

    def accepted(self) -> tuple[str, ...]:
        """Conditions besides the text that this model has an input for."""
        return ()

    def check_conditions(self, timestep_B: Tensor, conditions: Conditions) -> None:
        """ConfigError for a condition without an input: ignoring it would train on something else."""
        for name in conditions:
            if name not in (*_TEXT, *self.accepted()):
                raise ConfigError(f"{self.family}: the model has no input for the condition '{name}'; leave it out")
        if timestep_B.ndim != 1:
            raise ConfigError(
                f"{self.family}: noise levels of shape {list(timestep_B.shape)}; this family takes one for each sample"
            )

    def blocks(self) -> list[nn.Module]:
        return [block for name in self.block_lists for block in cast(nn.ModuleList, getattr(self, name))]

    def is_zero(self, name: str) -> bool:
        """Whether the module of this name starts from zeros."""
        return False

    def finish_weights(self, generator: torch.Generator) -> None:
        """Fresh values of what no rule of `initialize` fills."""

    @staticmethod
    def exchanges(config: Any, latent_FHW: Latent, num_text: int, degree: int) -> list[Exchange]:
        """Every self-attention of one clip around which the ranks of a sequence group exchange tokens."""
        return []

    def pack_known(self, clip_BCFHW: Tensor, known_B1FHW: Tensor, encode: Encode, draws: Draws) -> Tensor:
        """`cond_latents` of an inpaint model, from the clip as pixels in [-1, 1], a mask that is 1 where a pixel is
        given and 0 where it must be made, a function from pixels to normalised latents, and random numbers."""
        raise NotImplementedError

    def find_known(self, cond_latents_BCFHW: Tensor) -> tuple[Tensor, Tensor] | None:
        """(mask_B1FHW, latent_BCFHW) of given cells, where the family encodes them apart from the clip; None: they are
        those of the encoded clip."""
        return None


Model = TypeVar("Model", bound=Denoiser)


def build_fresh(make: Callable[[Any], Model], config: Any, generator: torch.Generator | None = None) -> Model:
    """A model with weights from `initialize`, drawn from `generator` alone; without one, from a fixed stream.

    Under `torch.device("meta")` the model has shapes and no weights.
    """
    device = torch.get_default_device()
    # Made without storage first: layers would otherwise fill themselves from the global generator.
    with torch.device("meta"):
        model = make(config)
    if device.type == "meta":
        return model
    model.to_empty(device=device)
    if generator is None:
        generator = stream(0, f"{model.family} weights", device=device.type)
    initialize(model, generator, is_zero=model.is_zero)
    with torch.no_grad():
        model.finish_weights(generator)
    return model


def initialize(
    model: nn.Module, generator: torch.Generator, *, is_zero: Callable[[str], bool] = lambda name: False
) -> None:
    """Fill every parameter from `generator`, in the order of the modules; no other random state is read or changed.

    Linear and convolution layers get PyTorch's usual uniform numbers, +-1/sqrt(inputs); norms start as identity;
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
            elif not parameters:
                continue
            elif isinstance(module, _NORMS):
                for key, parameter in parameters.items():
                    parameter.fill_(1.0 if key == "weight" else 0.0)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(generator=generator)
            elif callable(own := getattr(module, "initialize_parameters", None)):
                own(generator)
            else:
                raise TypeError(
                    f"{name}: no rule to initialize a {type(module).__name__}; give it initialize_parameters"
                )


def use_sequence_group(
    family: DenoiserSpec, model: Denoiser, group: SequenceGroup, *, key: str = "parallel.sequence"
) -> None:
    """Let `group` share the tokens of every clip that the model sees from now on; a group of one undoes it.

    Weights stay where they are. Comes at any time after the model is built, before or behind recompute and compile.
    `key` is what a person has set, for the words of an error.
    """
    check_degree(family, model.config, group.degree, key=key)
    set_sequence_group(model, group)


def check_degree(family: DenoiserSpec, config: Any, degree: int, *, key: str = "parallel.sequence") -> None:
    """ConfigError when so many ranks cannot share the heads of a model's attention."""
    if degree == 1:
        return
    # A model of diffusers has its own config, which says nothing about heads to divide.
    num_heads = getattr(config, "heads", None)
    if num_heads is None:
        raise ConfigError(
            f"{key} is {degree}, but the tokens of {family.name} cannot be divided over ranks; set it to 1"
        )
    if num_heads % degree:
        fitting = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
        raise ConfigError(
            f"{key} is {degree}, but this {family.name} has {num_heads} attention heads, and ranks take "
            f"equally many; set it to one of {', '.join(map(str, fitting))}"
        )


def find_index(timestep_B: Tensor) -> Tensor:
    """The index of a noise level, as a DDPM counts them; a whole number in float32."""
    return (timestep_B.float() * NUM_TIMESTEPS).round()
