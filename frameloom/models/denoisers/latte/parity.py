"""Golden cases of LatteT2V: whole forwards of the published code, each run with its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from frameloom.core.parity import ParityCase, ParityOutput, under
from frameloom.models.denoisers.latte.config import LatteConfig
from frameloom.models.denoisers.latte.model import LatteT2V, build
from frameloom.models.denoisers.latte.weights import load_original

TOLERANCE = 2e-5


def matches(case: ParityCase) -> bool:
    return case.config.get("cls") == "LatteT2V"


def run(case: ParityCase) -> list[ParityOutput]:
    runs = {entry["name"]: entry for entry in case.config["run"]}
    with torch.no_grad():
        return [_run_output(case, name, runs) for name in case.outputs]


def _run_output(case: ParityCase, name: str, runs: Mapping[str, dict[str, Any]]) -> ParityOutput:
    entry, expected = runs.get(name.removesuffix(".sample")), case.outputs[name]
    if entry is None:
        return ParityOutput(name, None, expected, TOLERANCE, "an output that no run of the file describes")
    inputs = under(case.inputs, entry["inputs"] + ".")
    without_temporal = not entry.get("kwargs", {}).get("enable_temporal_attentions", True)
    if without_temporal and inputs["hidden_states"].shape[2] > 1:
        return ParityOutput(name, None, expected, TOLERANCE, "only single frames go without temporal blocks here")
    return ParityOutput(name, _predict(_build(case, entry), inputs), expected, TOLERANCE)


def _build(case: ParityCase, entry: Mapping[str, Any]) -> LatteT2V:
    config = LatteConfig.from_original(case.config["model"] | entry.get("overrides", {}))
    # The published code forgets the temporal positions of a joint batch unless it recomputes activations.
    model = build(replace(config, joint_temporal_positions=entry.get("gradient_checkpointing", False)))
    load_original(model, case.weights)
    return model


def _predict(model: LatteT2V, inputs: Mapping[str, Tensor]) -> Tensor:
    text, mask = inputs["encoder_hidden_states"], inputs["encoder_attention_mask"]
    if text.ndim == 3:
        text, mask = text[:, None], mask[:, None]
    prediction: Tensor = model(inputs["hidden_states"], inputs["timestep"], text, mask, inputs.get("attention_mask"))
    return prediction
