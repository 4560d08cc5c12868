"""LoRA training: adapters that train, are saved, resumed and exported instead of the whole denoiser."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from frameloom.models.state_dict import shorten
from frameloom.training.task import TrainedPart

_log = get_logger(__name__)


def build_adapters(section: LoraSection, denoiser: LoadedDenoiser, *, weights: str | None, seed: int) -> TrainedPart:
    """Freeze the denoiser and put adapters beside its layers; fresh ones follow from `seed`.

    `weights` is where those of the denoiser came from. Adapters that do not train are saved all the same.
    """
    family, model = denoiser.family, denoiser.model
    if weights is None:
        _log.warning("lora: model.weights is null, so the adapters are trained beside random weights")
    rank, alpha = section.rank, float(section.rank) if section.alpha is None else section.alpha
    layers = linear_layers(model)
    given = read_lora(Path(section.weights), denoiser) if section.weights else {}
    if section.targets is None:
        chosen = default_layers(model, family.lora_targets, model.blocks())
    else:
        chosen = choose_layers(model, section.targets, where="lora.targets")
    add_adapters(model, chosen, rank=rank, alpha=alpha, generator=stream(seed, "lora weights"))

    def parameters() -> dict[str, Tensor]:
        own = dict(model.named_parameters())
        return {name: own[name] for layer in chosen for name in parameter_names(layer)}

    def state() -> dict[str, Any]:
        return {"rank": rank, "alpha": alpha, "base": denoiser.digest, "weights": weights}

    def check(saved: Mapping[str, Any], where: str) -> None:
        check_base(denoiser, saved, weights=weights, where=where)
        for name, value in (("rank", rank), ("alpha", alpha)):
            if saved[name] != value:
                raise CheckpointError(
                    f"{where}: has lora.{name} {saved[name]:g}, the recipe {value:g}; put it back, or start a new run "
                    "with --name"
                )

    def export(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        base = {"sha256": denoiser.digest, "weights": weights}
        write_lora(folder, denoiser, to_adapters(tensors, alpha=alpha), layers=list(layers), base=base)

    if section.weights:
        _start_from(parameters(), given, chosen, rank, alpha, where=section.weights)
    _log.info("lora: %d layers, %d numbers train", len(chosen), sum(one.numel() for one in parameters().values()))
    return TrainedPart("lora", parameters, state(), check, export)


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
