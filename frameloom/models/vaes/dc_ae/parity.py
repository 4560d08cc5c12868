"""Golden cases of the video DC-AE: pixels to latents and latents to pixels, with and without tiles.

Variants whose names say so run in tiles in space, in time or both; outputs with `.untiled.` are the same input whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from frameloom.core.parity import ParityCase, ParityOutput
from frameloom.models.vaes.base import VideoVAE
from frameloom.models.vaes.dc_ae.config import DCAEConfig
from frameloom.models.vaes.dc_ae.model import DCAE
from frameloom.models.vaes.dc_ae.weights import load_original

TOLERANCE = 5e-5
_WHOLE = (False, False)
_TILING = {"tile_spatial": (True, False), "tile_temporal": (False, True), "tile_both": (True, True)}
Build = Callable[[bool, bool], VideoVAE]


def matches(case: ParityCase) -> bool:
    return "encoder.width_list" in case.config.get("dotlist", "") and bool(case.weights)


def run(case: ParityCase) -> list[ParityOutput]:
    given = case.config
    config = DCAEConfig.from_original(
        given["dotlist"], scaling_factor=given["scaling_factor"], tile_overlap=given["tile_overlap_factor"]
    )

    @cache
    def build_cut(in_space: bool, in_time: bool) -> VideoVAE:
        replaced = dataclasses.replace(config, spatial_tiling=in_space, temporal_tiling=in_time)
        model = DCAE(replaced).eval()
        load_original(model, case.weights)
        return model

    with torch.no_grad():
        return [_compare(case, name, build_cut) for name in case.outputs]


def _compare(case: ParityCase, name: str, build_cut: Build) -> ParityOutput:
    variant, _, kind = name.rpartition(".")
    source = variant.removesuffix(".untiled")
    model = build_cut(*(_WHOLE if variant != source else _TILING.get(source, _WHOLE)))
    ours = _compute(case, model, source, kind)
    note = "" if ours is not None else "an output of a kind that the DC-AE runner does not know"
    return ParityOutput(name, ours, case.outputs[name], TOLERANCE, note)


def _compute(case: ParityCase, model: VideoVAE, source: str, kind: str) -> Tensor | None:
    if kind == "decoded":
        return model.decode(model.denormalize(case.inputs[f"{source}.latents"].float()))
    if kind == "encoded":
        return model.normalize(model.encode(case.inputs[f"{source}.pixels"].float()).mode())
    if kind == "encoder_raw":
        return model.encode(case.inputs[f"{source}.pixels"].float()).mode()
    return None
