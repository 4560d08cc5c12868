"""Golden cases of the Hunyuan autoencoder: pixels to moments, latents to pixels, with and without tiles, and sizes.

Variants whose names say so run in tiles in space, in time or both; outputs with `.untiled.` are the same input whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from frameloom.core.parity import ParityCase, ParityOutput
from frameloom.models.vaes.base import Moments, VideoVAE
from frameloom.models.vaes.hunyuan.config import HunyuanConfig
from frameloom.models.vaes.hunyuan.model import HunyuanVAE
from frameloom.models.vaes.hunyuan.weights import load_original

TOLERANCE = 1e-5
SIZES_KEY = "[T,H,W,latent_size]"
_SEEDED = "z_sample_generator_seed_"
_WHOLE = (False, False)
_TILING = {"tile_spatial": (True, False), "tile_temporal": (False, True), "tile_both": (True, True)}
Build = Callable[[bool, bool], VideoVAE]


def matches(case: ParityCase) -> bool:
    return _is_model(case) or _is_sizes(case)


def run(case: ParityCase) -> list[ParityOutput]:
    if _is_sizes(case):
        return _compare_sizes(case)
    config = HunyuanConfig.from_original(case.config)

    @cache
    def build_cut(in_space: bool, in_time: bool) -> VideoVAE:
        replaced = dataclasses.replace(config, spatial_tiling=in_space, temporal_tiling=in_time)
        model = HunyuanVAE(replaced).eval()
        load_original(model, case.weights)
        return model

    with torch.no_grad():
        return [_compare(case, name, build_cut) for name in case.outputs]


def _is_model(case: ParityCase) -> bool:
    return {"sample_tsize", "tile_overlap_factor"} <= case.config.keys() and bool(case.weights)


def _is_sizes(case: ParityCase) -> bool:
    # The same table could be another autoencoder's; the side of the first row tells the compression.
    rows = case.config.get(SIZES_KEY, [])
    return bool(rows) and rows[0][1] == 8 * rows[0][3][1]


def _compare_sizes(case: ParityCase) -> list[ParityOutput]:
    config = HunyuanConfig()
    outputs = []
    for frames, height, width, expected in case.config[SIZES_KEY]:
        ours = torch.tensor(config.latent_size(frames, height, width))
        outputs.append(ParityOutput(f"{frames}x{height}x{width}", ours, torch.tensor(expected), 0.0))
    return outputs


def _compare(case: ParityCase, name: str, build_cut: Build) -> ParityOutput:
    variant, _, kind = name.rpartition(".")
    source = variant.removesuffix(".untiled")
    model = build_cut(*(_WHOLE if variant != source else _TILING.get(source, _WHOLE)))
    ours = _compute(case, model, source, kind)
    note = "" if ours is not None else "an output of a kind that the Hunyuan runner does not know"
    return ParityOutput(name, ours, case.outputs[name], TOLERANCE, note)


def _compute(case: ParityCase, model: VideoVAE, source: str, kind: str) -> Tensor | None:
    if kind == "decoded":
        return model.decode(model.denormalize(case.inputs[f"{source}.latents"].float()))
    moments = model.encode(case.inputs[f"{source}.pixels"].float())
    if kind == "moments":
        return torch.cat(moments, dim=1)
    if kind == "z_mode":
        return model.normalize(moments.mode())
    if kind.startswith(_SEEDED):
        return model.normalize(_sample(moments, int(kind.removeprefix(_SEEDED))))
    return None


def _sample(moments: Moments, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return moments.sample(torch.randn(moments.mean_BCFHW.shape, generator=generator))
