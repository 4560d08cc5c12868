"""Golden cases of Open-Sora-Plan's denoisers, LatteT2V, OpenSoraT2V and its inpaint variant: whole forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from frameloom.models.denoisers.base import NUM_TIMESTEPS, build_fresh
from frameloom.models.denoisers.latte.config import LatteConfig
from frameloom.models.denoisers.latte.model import LatteT2V
from frameloom.models.denoisers.latte.weights import load_original as load_latte
from frameloom.models.denoisers.opensora_plan.config import OpenSoraPlanConfig
from frameloom.models.denoisers.opensora_plan.model import OpenSoraT2V
from frameloom.models.denoisers.opensora_plan.skiparse import Scales
from frameloom.models.denoisers.opensora_plan.weights import load_original, read_config
from frameloom.models.layers.patches import Grid
from frameloom.models.spec import token_grid
from tests.parity.cases import ParityCase, ParityOutput, compare, golden, under

TOLERANCE = 2e-5
DEEP_TOLERANCE = 3e-5
_PADDED = "padded-samples"


@golden(lambda case: str(case.config.get("cls", "")).startswith(("OpenSoraT2V_v1_3", "OpenSoraInpaint_v1_3")))
def run_opensora(case: ParityCase) -> list[ParityOutput]:
    """Every output; a name like `history.B_after_A` is what B gives on a model that has seen A before."""
    config = read_config({"_class_name": case.config["cls"], **case.config["model"]}, where=case.name)
    return [_run_one(case, config, name, expected) for name, expected in case.outputs.items()]


def _run_one(case: ParityCase, config: OpenSoraPlanConfig, output: str, expected: Tensor) -> ParityOutput:
    *earlier, name = reversed(output.removeprefix("history.").removesuffix(".sample").split("_after_"))
    grids = [_grid(case, config, each) for each in (*earlier, name)]
    scales = published_scales(config.interpolation_scales, grids)
    note = "" if scales == config.interpolation_scales else f"scales as the published cache has them: {scales}"
    used = replace(
        config, interpolation_scale_t=scales[0], interpolation_scale_h=scales[1], interpolation_scale_w=scales[2]
    )
    tolerance = DEEP_TOLERANCE if config.num_layers > 16 else TOLERANCE
    return _compare_unpadded(
        output,
        lambda inputs: _predict(used, case.weights, inputs),
        under(case.inputs, f"{name}."),
        expected,
        tolerance,
        note,
    )


def _compare_unpadded(
    name: str,
    predict: Callable[[Mapping[str, Tensor]], Tensor],
    inputs: Mapping[str, Tensor],
    expected: Tensor,
    tolerance: float,
    note: str = "",
) -> ParityOutput:
    """The samples of a batch that hold picture in all cells; they see nothing of the others."""
    mask = inputs.get("attention_mask")
    if mask is None or bool(mask.all()):
        return compare(name, predict(inputs), expected, tolerance, note)
    whole_B = mask.flatten(1).bool().all(dim=1)
    if not bool(whole_B.any()):
        return ParityOutput(name, None, expected, tolerance, deviation=_PADDED)
    picked = {key: tensor[whole_B] for key, tensor in inputs.items()}
    return compare(name, predict(picked), expected[whole_B], tolerance, note, _PADDED)


def _grid(case: ParityCase, config: OpenSoraPlanConfig, name: str) -> Grid:
    frames, height, width = case.inputs[f"{name}.hidden_states"].shape[2:]
    return token_grid((frames, height, width), config.patch_size)


def published_scales(scales: Scales, grids: Sequence[Grid]) -> Scales:
    """The scales that the published code really uses for the last of `grids`, after the others.

    It keeps tables by the length of an axis and forgets their scale: an axis takes over the table of the first axis of
    its length that the model ever saw. Ours gives every axis its own; with equal scales both are the same.
    """
    seen: dict[int, float] = {}
    for grid in grids:
        for count, scale in zip(grid, scales, strict=True):
            seen.setdefault(count, scale)
    frames, rows, columns = (seen[count] for count in grids[-1])
    return frames, rows, columns


def _predict(config: OpenSoraPlanConfig, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
    model = build_fresh(OpenSoraT2V, config)
    load_original(model, weights)
    noisy, beside = inputs["hidden_states"].tensor_split([config.in_channels], dim=1)
    with torch.no_grad():
        prediction: Tensor = model(
            noisy,
            inputs["timestep"] / NUM_TIMESTEPS,
            {
                "text": inputs["encoder_hidden_states"].squeeze(1),
                "text_mask": inputs["encoder_attention_mask"].squeeze(1),
                **({"cond_latents": beside} if config.inpaint else {}),
            },
        )
    return prediction


@golden(lambda case: case.config.get("cls") == "LatteT2V")
def run_latte(case: ParityCase) -> list[ParityOutput]:
    runs = {entry["name"]: entry for entry in case.config["run"]}
    with torch.no_grad():
        return [_run_latte_output(case, name, runs) for name in case.outputs]


def _run_latte_output(case: ParityCase, name: str, runs: Mapping[str, dict[str, Any]]) -> ParityOutput:
    entry, expected = runs.get(name.removesuffix(".sample")), case.outputs[name]
    if entry is None:
        return ParityOutput(name, None, expected, TOLERANCE, "an output that no run of the file describes")
    inputs = under(case.inputs, entry["inputs"] + ".")
    without_temporal = not entry.get("kwargs", {}).get("enable_temporal_attentions", True)
    if without_temporal and inputs["hidden_states"].shape[2] > 1:
        return ParityOutput(name, None, expected, TOLERANCE, deviation="clips-without-temporal-blocks")
    model = _build_latte(case, entry)
    return _compare_unpadded(name, lambda picked: _predict_latte(model, picked), inputs, expected, TOLERANCE)


def _build_latte(case: ParityCase, entry: Mapping[str, Any]) -> LatteT2V:
    config = LatteConfig.from_original(case.config["model"] | entry.get("overrides", {}))
    # The published code forgets the temporal positions of a joint batch unless it recomputes activations.
    model = build_fresh(LatteT2V, replace(config, joint_temporal_positions=entry.get("gradient_checkpointing", False)))
    load_latte(model, case.weights)
    return model


def _predict_latte(model: LatteT2V, inputs: Mapping[str, Tensor]) -> Tensor:
    text, mask = inputs["encoder_hidden_states"], inputs["encoder_attention_mask"]
    conditions = {"text": text, "text_mask": mask}
    if text.ndim == 4:
        conditions = {"text": text[:, 0], "text_mask": mask[:, 0]}
        if text.shape[1] > 1:
            conditions |= {"image_text": text[:, 1:].flatten(0, 1), "image_text_mask": mask[:, 1:].flatten(0, 1)}
    return model.predict(inputs["hidden_states"], inputs["timestep"] / NUM_TIMESTEPS, conditions)
