"""A denoiser whose tokens lie on the ranks of a sequence group. See `distributed/sequence_parallel.py`.

After `use_sequence_group` the model is called as before, by all ranks of the group with the same tensors (noise, noise
levels, captions, conditions); each gets the whole prediction. For training, the gradients of all weights must then be
joined over the group, by the group's `reduction`; for sampling there is nothing else to do.
"""

from __future__ import annotations

from torch import nn

from frameloom.core.errors import ConfigError
from frameloom.distributed.sequence_parallel import Exchange, SequenceGroup, set_sequence_group
from frameloom.models.spec import DenoiserSpec


def use_sequence_group(
    family: DenoiserSpec, model: nn.Module, group: SequenceGroup, *, key: str = "parallel.sequence"
) -> None:
    """Let `group` share the tokens of every clip that the model sees from now on; a group of one undoes it.

    Weights stay where they are. Comes at any time after the model is built, before or behind recompute and compile.
    `key` is what a person has set, for the words of an error.
    """
    check_degree(family, model.config, group.degree, key=key)
    set_sequence_group(model, group)


def check_degree(family: DenoiserSpec, config: object, degree: int, *, key: str = "parallel.sequence") -> None:
    """ConfigError when so many ranks cannot share the heads of a model's attention."""
    if degree == 1:
        return
    if family.num_heads is None:
        raise ConfigError(
            f"{key} is {degree}, but the tokens of {family.name} cannot be divided over ranks; set it to 1"
        )
    num_heads = family.num_heads(config)
    if num_heads % degree:
        fitting = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
        raise ConfigError(
            f"{key} is {degree}, but this {family.name} has {num_heads} attention heads, and ranks take "
            f"equally many; set it to one of {', '.join(map(str, fitting))}"
        )


def no_exchanges(config: object, latent_FHW: tuple[int, int, int], num_text: int, degree: int) -> list[Exchange]:
    """Of a family whose tokens cannot be divided over ranks."""
    return []
