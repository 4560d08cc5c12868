"""Golden cases of the CausalVAE: the whole model against tensors of the published code.

Outputs are recognised by their names: `<input>.moments`, `<input>.recon_mode`, `<input>.decoded` and those of tiled
runs, for any input and any tiled run that a file holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from frameloom.core.parity import ParityCase, ParityOutput
from frameloom.models.vaes.base import Moments
from frameloom.models.vaes.causal.config import CausalVAEConfig
from frameloom.models.vaes.causal.model import CausalVAE
from frameloom.models.vaes.causal.tiling import Tiling
from frameloom.models.vaes.causal.weights import load_original
from frameloom.models.vaes.parity_weights import find_weights

Compute = Callable[[CausalVAE, Tensor], Tensor]
TOLERANCE = 1e-4
# One channel per norm group amplifies rounding: in float64 the published code itself moves by 5e-5.
TOLERANCE_NARROW = 3e-4


def matches(case: ParityCase) -> bool:
    return case.config.get("cls") == "CausalVAEModel"


def run(case: ParityCase) -> list[ParityOutput]:
    config = CausalVAEConfig.from_original(case.config["model"])
    weights, probes = find_weights(case)
    model = CausalVAE(config).eval()
    load_original(model, weights)
    tolerance = TOLERANCE_NARROW if max(config.widths) == config.norm_groups else TOLERANCE
    with torch.no_grad():
        return probes + [_compare(case, model, name, tolerance) for name in case.outputs]


def _compare(case: ParityCase, model: CausalVAE, name: str, tolerance: float) -> ParityOutput:
    source, _, kind = name.rpartition(".")
    tiled: dict[str, Any] = (case.config.get("run") or {}).get(source, {})
    x_BCFHW = case.inputs.get(tiled.get("input", source))
    compute = (_OF_TILED if tiled else _OF_INPUT).get(kind)
    if x_BCFHW is None or compute is None:
        return ParityOutput(name, None, case.outputs[name], tolerance, "an output of a kind that this runner lacks")
    if tiled:
        model.enable_tiling(_read_tiling(tiled))
    try:
        return ParityOutput(name, compute(model, x_BCFHW.float()), case.outputs[name], tolerance)
    finally:
        model.disable_tiling()


def _read_tiling(entry: dict[str, Any]) -> Tiling:
    return Tiling(
        sample_side=entry["tile_sample_min_size"],
        sample_frames=entry["tile_sample_min_size_t"],
        latent_side=entry["tile_latent_min_size"],
        latent_frames=entry["tile_latent_min_size_t"],
        overlap=entry["tile_overlap_factor"],
    )


def _reconstruct(model: CausalVAE, pixels_BCFHW: Tensor) -> Tensor:
    return model.decode(Moments.from_raw(model.encode_raw(pixels_BCFHW)).mode())


def _measure_encode_gap(model: CausalVAE, pixels_BCFHW: Tensor) -> Tensor:
    """How far tiles are from the whole; the model is left without tiling."""
    tiled = model.encode_raw(pixels_BCFHW)
    model.disable_tiling()
    return (tiled - model.encode_raw(pixels_BCFHW)).abs().max()


def _measure_decode_gap(model: CausalVAE, pixels_BCFHW: Tensor) -> Tensor:
    """The same for the decoder, from the mean that the tiled encoder gives."""
    latent = model.encode(pixels_BCFHW).mode()
    tiled = model.decode(latent)
    model.disable_tiling()
    return (tiled - model.decode(latent)).abs().max()


_OF_INPUT: dict[str, Compute] = {
    "moments": CausalVAE.encode_raw,
    "recon_mode": _reconstruct,
    "decoded": CausalVAE.decode,
}
_OF_TILED: dict[str, Compute] = {
    "moments": CausalVAE.encode_raw,
    "decoded_from_tiled_mean": _reconstruct,
    "max_abs_diff_moments_vs_untiled": _measure_encode_gap,
    "max_abs_diff_decoded_vs_untiled": _measure_decode_gap,
}
