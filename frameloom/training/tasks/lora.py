"""LoRA training: adapters that train, are saved, resumed and exported instead of the whole denoiser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.builders.lora import check_base, read_lora, write_lora
from frameloom.config.schema.models import LoraSection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.logging import get_logger
from frameloom.core.random import stream
from frameloom.models.lora.adapters import (
    Adapter,
    add_adapters,
    choose_layers,
    default_layers,
    linear_layers,
    parameter_names,
    to_adapters,
)
from frameloom.models.state_dict import check_fit, shorten

_log = get_logger(__name__)


@dataclass(frozen=True)
class Adapters:
    """The adapters that train beside the layers `adapted` of a denoiser.

    `layers` are all linear layers of its model, `weights` is where these came from.
    """

    denoiser: LoadedDenoiser
    rank: int
    alpha: float
    adapted: tuple[str, ...]
    layers: tuple[str, ...]
    weights: str | None

    key: ClassVar[str] = "lora"
    """where a checkpoint keeps `state`"""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model: all adapters, frozen ones included."""
        parameters = dict(self.denoiser.model.named_parameters())
        return {name: parameters[name] for layer in self.adapted for name in parameter_names(layer)}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must say besides, to be used with the right weights."""
        return {"rank": self.rank, "alpha": self.alpha, "base": self.denoiser.digest, "weights": self.weights}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, where: str) -> None:
        """Take up the adapters of a checkpoint with its `state`; refuse those of another base or shape."""
        check_base(self.denoiser, state, weights=self.weights, where=where)
        for name, value in (("rank", self.rank), ("alpha", self.alpha)):
            if state[name] != value:
                raise CheckpointError(
                    f"{where}: has lora.{name} {state[name]:g}, the recipe {value:g}; put it back, or start a new run "
                    "with --name"
                )
        own = self.tensors()
        check_fit(own, tensors, where=where)
        for name, parameter in own.items():
            parameter.copy_(tensors[name])

    def export(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the LoRA files; `tensors` are the parameters to write, averaged or not."""
        base = {"sha256": self.denoiser.digest, "weights": self.weights}
        write_lora(folder, self.denoiser, to_adapters(tensors, alpha=self.alpha), layers=list(self.layers), base=base)


def build_adapters(section: LoraSection, denoiser: LoadedDenoiser, *, weights: str | None, seed: int) -> Adapters:
    """Freeze the denoiser and put adapters beside its layers; fresh ones follow from `seed`."""
    family, model = denoiser.family, denoiser.model
    if weights is None:
        _log.warning("lora: model.weights is null, so the adapters are trained beside random weights")
    alpha = float(section.rank) if section.alpha is None else section.alpha
    layers = tuple(linear_layers(model))
    given = read_lora(Path(section.weights), denoiser) if section.weights else {}
    if section.targets is None:
        chosen = default_layers(model, family.lora_targets, model.blocks())
    else:
        chosen = choose_layers(model, section.targets, where="lora.targets")
    add_adapters(model, chosen, rank=section.rank, alpha=alpha, generator=stream(seed, "lora weights"))
    adapters = Adapters(denoiser, section.rank, alpha, tuple(chosen), layers, weights)
    if section.weights:
        _start_from(adapters.tensors(), given, chosen, section.rank, alpha, where=section.weights)
    _log.info("lora: %d layers, %d numbers train", len(chosen), sum(one.numel() for one in adapters.tensors().values()))
    return adapters


@torch.no_grad()
def _start_from(
    own: Mapping[str, Tensor], given: Mapping[str, Adapter], chosen: list[str], rank: int, alpha: float, *, where: str
) -> None:
    """Fill fresh adapters from a file, which must have the same layers, rank and alpha as the recipe."""
    missing, extra = sorted(set(chosen) - set(given)), sorted(set(given) - set(chosen))
    if missing or extra:
        parts = [f"{len(missing)} layers of lora.targets are not in it ({shorten(missing)})"] * bool(missing)
        parts += [f"{len(extra)} of its layers are not in lora.targets ({shorten(extra)})"] * bool(extra)
        raise ConfigError(f"lora.weights: '{where}' has other layers: {'; '.join(parts)}; change lora.targets")
    ranks, alphas = ({one.rank for one in given.values()}, {one.alpha for one in given.values()} - {None})
    if ranks != {rank}:
        found = ", ".join(map(str, sorted(ranks)))
        raise ConfigError(f"lora.weights: '{where}' has rank {found}, but lora.rank is {rank}; write the same")
    if alphas - {alpha}:
        found = ", ".join(f"{one:g}" for one in alphas if one is not None)
        raise ConfigError(f"lora.weights: '{where}' has alpha {found}, but lora.alpha is {alpha:g}; write the same")
    for layer, one in given.items():
        down, up = parameter_names(layer)
        own[down].copy_(one.down_RI)
        own[up].copy_(one.up_OR)
