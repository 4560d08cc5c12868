"""Golden cases of Open-Sora 2.0's autoencoders: pixels to moments and latents, latents to pixels, tiles, and sizes.

Variants whose names say so run in tiles in space, in time or both; outputs with `.untiled.` are the same input whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from frameloom.core.errors import DataError
from frameloom.models.vaes.base import Moments, VideoVAE
from frameloom.models.vaes.base import load_original as load_dc_ae
from frameloom.models.vaes.base import load_original as load_hunyuan
from frameloom.models.vaes.dc_ae.config import DCAEConfig
from frameloom.models.vaes.dc_ae.model import DCAE
from frameloom.models.vaes.hunyuan.config import HunyuanConfig
from frameloom.models.vaes.hunyuan.model import HunyuanVAE
from tests.parity.cases import ParityCase, ParityOutput, Runner, compare, compare_numbers, leave_out

HUNYUAN_TOLERANCE = 1e-5
# Its latents reach magnitudes of 10.
DC_AE_TOLERANCE = 5e-5
SIZES_KEY = "[T,H,W,latent_size]"
_SEEDED = "z_sample_generator_seed_"
_WHOLE = (False, False)
_TILING = {"tile_spatial": (True, False), "tile_temporal": (False, True), "tile_both": (True, True)}

Build = Callable[[bool, bool], VideoVAE]
Compute = Callable[[ParityCase, VideoVAE, str, str], Tensor | None]


def is_hunyuan(case: ParityCase) -> bool:
    return {"sample_tsize", "tile_overlap_factor"} <= case.config.keys() and bool(case.weights)


def run_hunyuan(case: ParityCase) -> list[ParityOutput]:
    config = HunyuanConfig.from_original(case.config)

    @cache
    def build_cut(in_space: bool, in_time: bool) -> VideoVAE:
        model = HunyuanVAE(dataclasses.replace(config, spatial_tiling=in_space, temporal_tiling=in_time)).eval()
        load_hunyuan(model, case.weights)
        return model

    return _compare_all(case, build_cut, _compute_hunyuan, HUNYUAN_TOLERANCE)


def is_dc_ae(case: ParityCase) -> bool:
    return "encoder.width_list" in case.config.get("dotlist", "") and bool(case.weights)


def run_dc_ae(case: ParityCase) -> list[ParityOutput]:
    given = case.config
    config = DCAEConfig.from_original(
        given["dotlist"], scaling_factor=given["scaling_factor"], tile_overlap=given["tile_overlap_factor"]
    )

    @cache
    def build_cut(in_space: bool, in_time: bool) -> VideoVAE:
        model = DCAE(dataclasses.replace(config, spatial_tiling=in_space, temporal_tiling=in_time)).eval()
        load_dc_ae(model, case.weights)
        return model

    return _compare_all(case, build_cut, _compute_dc_ae, DC_AE_TOLERANCE)


def is_sizes(case: ParityCase) -> bool:
    # The same table could be another autoencoder's; the side of the first row tells the compression.
    rows = case.config.get(SIZES_KEY, [])
    return bool(rows) and rows[0][1] == 8 * rows[0][3][1]


def run_sizes(case: ParityCase) -> list[ParityOutput]:
    """Sizes of latents; the published samplers also round those of clips that our autoencoder refuses."""
    with torch.device("meta"):
        vae = HunyuanVAE(HunyuanConfig())
    results = []
    for frames, height, width, expected in case.config[SIZES_KEY]:
        name, sides = f"{frames}x{height}x{width}", (height // vae.strides[1], width // vae.strides[2])
        try:
            vae.check_pixels(torch.empty(1, 3, frames, height, width, device="meta"))
        except DataError:
            results.append(leave_out(name, "sizes-that-are-refused"))
        else:
            results.append(compare_numbers(name, [vae.latent_frames(frames), *sides], expected))
    return results


@torch.no_grad()
def _compare_all(case: ParityCase, build_cut: Build, compute: Compute, tolerance: float) -> list[ParityOutput]:
    results = []
    for name, expected in case.outputs.items():
        variant, _, kind = name.rpartition(".")
        source = variant.removesuffix(".untiled")
        tiles = next((cut for start, cut in _TILING.items() if source.startswith(start)), _WHOLE)
        model = build_cut(*(_WHOLE if variant != source else tiles))
        ours = compute(case, model, source, kind)
        note = "" if ours is not None else "an output of a kind that the runner does not know"
        results.append(compare(name, ours, expected, tolerance, note))
    return results


def _compute_hunyuan(case: ParityCase, model: VideoVAE, source: str, kind: str) -> Tensor | None:
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


def _compute_dc_ae(case: ParityCase, model: VideoVAE, source: str, kind: str) -> Tensor | None:
    if kind == "decoded":
        return model.decode(model.denormalize(case.inputs[f"{source}.latents"].float()))
    if kind == "encoded":
        return model.normalize(model.encode(case.inputs[f"{source}.pixels"].float()).mode())
    if kind == "encoder_raw":
        return model.encode(case.inputs[f"{source}.pixels"].float()).mode()
    return None


RUNNERS = (Runner(is_hunyuan, run_hunyuan), Runner(is_sizes, run_sizes), Runner(is_dc_ae, run_dc_ae))
