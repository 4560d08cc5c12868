"""Golden cases of the CogVideoX autoencoder: pixels to moments, latents to pixels in both ways of cutting, tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from frameloom.models.vaes.base import load_original
from frameloom.models.vaes.cogvideox.config import CogVideoXConfig
from frameloom.models.vaes.cogvideox.model import CogVideoXVAE
from tests.parity.cases import ParityCase, ParityOutput, Runner, compare

TOLERANCE = 1e-5
_TILING_KEY = "tiling_for_tiled_variant"
_TILING = {
    "tile_sample_min_height": "tile_height_px",
    "tile_sample_min_width": "tile_width_px",
    "tile_overlap_factor_height": "tile_overlap_height",
    "tile_overlap_factor_width": "tile_overlap_width",
}


def is_vae(case: ParityCase) -> bool:
    return "CogVideoXDownBlock3D" in case.config.get("down_block_types", ()) and bool(case.weights)


def run_vae(case: ParityCase) -> list[ParityOutput]:
    given = dict(case.config)
    tiling = given.pop(_TILING_KEY, {})
    whole = CogVideoXConfig.from_original(given)
    tiled = dataclasses.replace(whole, tiling=True, **{_TILING[key]: value for key, value in tiling.items()})

    @cache
    def build_cut(is_tiled: bool, first_alone: bool) -> CogVideoXVAE:
        model = CogVideoXVAE(dataclasses.replace(tiled if is_tiled else whole, decode_first_alone=first_alone)).eval()
        load_original(model, case.weights)
        return model

    with torch.no_grad():
        return [_compare(case, name, build_cut) for name in case.outputs]


def _compare(case: ParityCase, name: str, build_cut: Callable[[bool, bool], CogVideoXVAE]) -> ParityOutput:
    source, _, kind = name.rpartition(".")
    ours = _compute(case, build_cut(source.startswith("tiled"), kind != "decoded_auto_split"), source, kind)
    note = "" if ours is not None else "an output of a kind that the CogVideoX runner does not know"
    return compare(name, ours, case.outputs[name], TOLERANCE, note)


def _compute(case: ParityCase, model: CogVideoXVAE, source: str, kind: str) -> Tensor | None:
    if kind in ("decoded", "decoded_auto_split"):
        return model.decode(case.inputs[f"{source}.latents"].float())
    pixels = case.inputs[f"{source}.pixels"].float()
    if kind == "moments":
        return model.encode_raw(pixels)
    moments = model.encode(pixels)
    return {"mode": moments.mode(), "std": torch.exp(0.5 * moments.logvar_BCFHW)}.get(kind)


RUNNERS = (Runner(is_vae, run_vae),)
