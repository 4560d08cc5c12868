"""Weights of golden cases: stored, or computed from a recipe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from frameloom.core.parity import ParityCase, ParityOutput
from frameloom.core.recipe_weights import draw_recipe_weight


def draw_weights(case: ParityCase, *, leave_out: Callable[[str], bool] = lambda key: False) -> dict[str, Tensor]:
    """The tensors of a case that only lists their keys and shapes."""
    seed, gain = case.config.get("recipe_seed", 0), case.config.get("recipe_gain", 1.0)
    return {
        key: torch.from_numpy(draw_recipe_weight(key, tuple(shape), seed=seed, gain=gain))
        for key, shape in case.config["state_dict_shapes"].items()
        if not leave_out(key)
    }


def find_weights(
    case: ParityCase, *, leave_out: Callable[[str], bool] = lambda key: False
) -> tuple[dict[str, Tensor], list[ParityOutput]]:
    """Stored weights, or computed ones with a comparison of every number that the file gives of them."""
    if case.config.get("weights") != "recipe":
        return dict(case.weights), []
    weights = draw_weights(case, leave_out=leave_out)
    stored = [ParityOutput(f"weights.{key}", weights[key], tensor, 0.0) for key, tensor in case.weights.items()]
    probes = [
        ParityOutput(f"recipe_probe.{key}", weights[key].flatten()[: len(values)], torch.tensor(values), 0.0)
        for key, values in case.config.get("recipe_probe", {}).items()
    ]
    return weights, stored + probes
