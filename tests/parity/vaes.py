"""Golden cases of autoencoders: pixels to moments and latents, latents to pixels, in tiles and pieces; Haar transforms.

Outputs are recognised by their names: `<input>.moments`, `<input>.decoded`, `<chunked or tiled run>.moments` and so on,
for any input and any run that a file holds. Variants of Open-Sora 2.0 whose names say so run in tiles in space, in time
or both; outputs with `.untiled.` are the same input whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from frameloom.core.errors import DataError
from frameloom.models.layers.causal_conv import run_in_chunks
from frameloom.models.layers.tiles import Cuts, Tiles
from frameloom.models.layers.tiling import run_in_cuts
from frameloom.models.vaes.base import EncodePolicy, Moments, VideoVAE, load_original
from frameloom.models.vaes.causal.config import CausalVAEConfig
from frameloom.models.vaes.causal.model import CausalVAE
from frameloom.models.vaes.causal.weights import load_original as load_causal
from frameloom.models.vaes.cogvideox.config import CogVideoXConfig
from frameloom.models.vaes.cogvideox.model import CogVideoXVAE
from frameloom.models.vaes.dc_ae.config import DCAEConfig
from frameloom.models.vaes.dc_ae.model import DCAE
from frameloom.models.vaes.hunyuan.config import HunyuanConfig
from frameloom.models.vaes.hunyuan.model import HunyuanVAE
from frameloom.models.vaes.wfvae.config import WFVAEConfig
from frameloom.models.vaes.wfvae.model import WFVAE
from frameloom.models.vaes.wfvae.wavelet import Haar
from frameloom.models.vaes.wfvae.weights import load_original as load_wfvae
from tests.parity.cases import ParityCase, ParityOutput, compare, compare_numbers, golden, leave_out, pair_outputs
from tests.parity.weights import find_weights

COGVIDEOX_TOLERANCE = 1e-5
HUNYUAN_TOLERANCE = 1e-5
# Its latents reach magnitudes of 10.
DC_AE_TOLERANCE = 5e-5
WFVAE_TOLERANCE = 1e-4
# Without attention and with repeated frames a narrow norm amplifies rounding: the published code itself moves by
# 9e-5 from one CPU kernel to another.
WFVAE_TOLERANCE_NEAREST = 3e-4
CAUSAL_TOLERANCE = 1e-4
# One channel per norm group amplifies rounding: in float64 the published code itself moves by 5e-5.
CAUSAL_TOLERANCE_NARROW = 3e-4
HAAR_TOLERANCE = 3e-6

Entry = dict[str, Any]
Compute = Callable[[CausalVAE, Tensor, Entry], Tensor]
Transform = Callable[[Tensor], Tensor]

_COGVIDEOX_TILING = {
    "tile_sample_min_height": "tile_height_px",
    "tile_sample_min_width": "tile_width_px",
    "tile_overlap_factor_height": "tile_overlap_height",
    "tile_overlap_factor_width": "tile_overlap_width",
}
SIZES_KEY = "[T,H,W,latent_size]"
_SEEDED = "z_sample_generator_seed_"
# Tiles in space and in time, by the beginning of a variant's name.
_TILING = {"tile_spatial": (True, False), "tile_temporal": (False, True), "tile_both": (True, True)}


@golden(lambda case: "CogVideoXDownBlock3D" in case.config.get("down_block_types", ()) and bool(case.weights))
@torch.no_grad()
def run_cogvideox(case: ParityCase) -> list[ParityOutput]:
    given = dict(case.config)
    tiling = {_COGVIDEOX_TILING[key]: value for key, value in given.pop("tiling_for_tiled_variant", {}).items()}
    whole = CogVideoXConfig.from_original(given)
    tiled = replace(whole, tiling=True, **tiling)

    @cache
    def build(is_tiled: bool, first_alone: bool) -> CogVideoXVAE:
        model = CogVideoXVAE(replace(tiled if is_tiled else whole, decode_first_alone=first_alone)).eval()
        load_original(model, case.weights)
        return model

    def compute(source: str, kind: str) -> Tensor | None:
        model = build(source.startswith("tiled"), kind != "decoded_auto_split")
        if kind in ("decoded", "decoded_auto_split"):
            return model.decode(case.inputs[f"{source}.latents"].float())
        pixels = case.inputs[f"{source}.pixels"].float()
        if kind == "moments":
            return model.encode_raw(pixels)
        moments = model.encode(pixels)
        return {"mode": moments.mode(), "std": torch.exp(0.5 * moments.logvar_BCFHW)}.get(kind)

    return _compare_kinds(case, compute, COGVIDEOX_TOLERANCE)


def _compare_kinds(
    case: ParityCase, compute: Callable[[str, str], Tensor | None], tolerance: float
) -> list[ParityOutput]:
    """`compute` gets both sides of the last point of an output's name, and gives None for a kind it does not know."""
    parts = {name: name.rpartition(".") for name in case.outputs}
    return pair_outputs(case, {name: compute(source, kind) for name, (source, _, kind) in parts.items()}, tolerance)


@golden(lambda case: {"sample_tsize", "tile_overlap_factor"} <= case.config.keys() and bool(case.weights))
def run_hunyuan(case: ParityCase) -> list[ParityOutput]:
    config = HunyuanConfig.from_original(case.config)
    return _compare_tiled(case, lambda **tiling: HunyuanVAE(replace(config, **tiling)), HUNYUAN_TOLERANCE)


@golden(lambda case: "encoder.width_list" in case.config.get("dotlist", "") and bool(case.weights))
def run_dc_ae(case: ParityCase) -> list[ParityOutput]:
    given = case.config
    config = DCAEConfig.from_original(
        given["dotlist"], scaling_factor=given["scaling_factor"], tile_overlap=given["tile_overlap_factor"]
    )
    return _compare_tiled(case, lambda **tiling: DCAE(replace(config, **tiling)), DC_AE_TOLERANCE)


@torch.no_grad()
def _compare_tiled(case: ParityCase, make: Callable[..., VideoVAE], tolerance: float) -> list[ParityOutput]:
    @cache
    def build(in_space: bool, in_time: bool) -> VideoVAE:
        model = make(spatial_tiling=in_space, temporal_tiling=in_time).eval()
        load_original(model, case.weights)
        return model

    def compute(variant: str, kind: str) -> Tensor | None:
        source = variant.removesuffix(".untiled")
        starts = [start for start in _TILING if variant == source and source.startswith(start)]
        model = build(*_TILING[starts[0]]) if starts else build(False, False)
        if kind == "decoded":
            return model.decode(model.denormalize(case.inputs[f"{source}.latents"].float()))
        moments = model.encode(case.inputs[f"{source}.pixels"].float())
        if kind == "moments":
            return torch.cat(moments, dim=1)
        if kind == "encoder_raw":
            return moments.mode()
        if kind in ("z_mode", "encoded"):
            return model.normalize(moments.mode())
        if kind.startswith(_SEEDED):
            generator = torch.Generator().manual_seed(int(kind.removeprefix(_SEEDED)))
            return model.normalize(moments.sample(torch.randn(moments.mean_BCFHW.shape, generator=generator)))
        return None

    return _compare_kinds(case, compute, tolerance)


# The same table could be another autoencoder's; the side of the first row tells the compression.
@golden(lambda case: any(row[1] == 8 * row[3][1] for row in case.config.get(SIZES_KEY, [])[:1]))
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


@golden(lambda case: case.config.get("cls") == "WFVAEModel")
@torch.no_grad()
def run_wfvae(case: ParityCase) -> list[ParityOutput]:
    config = WFVAEConfig.from_original(case.config["model"])
    weights, probes = find_weights(case, leave_out=lambda key: "wavelet_tranform" in key)
    model = WFVAE(config).eval()
    load_wfvae(model, weights)
    is_rough = config.time_interpolation == "nearest" and not config.attention
    comparison = _WFVAEComparison(case, model, WFVAE_TOLERANCE_NEAREST if is_rough else WFVAE_TOLERANCE)
    return probes + [comparison.compare(name) for name in case.outputs]


class _WFVAEComparison:
    """One model and one case; encodings of the whole inputs are computed once."""

    def __init__(self, case: ParityCase, model: WFVAE, tolerance: float) -> None:
        self.case = case
        self.model = model
        self.tolerance = tolerance
        self.chunked_runs = {entry["tag"]: entry for entry in case.config.get("run", {}).get("chunked", [])}
        self._encode = cache(lambda name: model.encode_raw(case.inputs[name].float()))
        self._of_input: dict[str, Callable[[str], Tensor]] = {
            "moments": self._encode,
            "recon_mode": lambda name: model.decode(self._mean(name)),
            "encoder_in_coeffs": lambda name: model.split_pixels(case.inputs[name].float()),
            "z_sample": self._sample,
            "recon_sample": lambda name: model.decode(self._sample(name)),
            "decoded": lambda name: model.decode(case.inputs[name].float()),
            "wrapper.encode": lambda name: model.normalize(self._sample(name)),
            "wrapper.decode": lambda name: model.decode(
                model.denormalize(model.normalize(self._sample(name)))
            ).transpose(1, 2),
        }

    def compare(self, name: str) -> ParityOutput:
        source, _, kind = name.rpartition(".")
        if source in self.chunked_runs:
            return self._compare_chunked(name, kind, self.chunked_runs[source])
        if source.startswith("wrapper."):
            source, kind = source.removeprefix("wrapper."), f"wrapper.{kind}"
        is_random = kind in ("z_sample", "recon_sample", "wrapper.encode", "wrapper.decode")
        if is_random and f"eps_{source}" not in self.case.inputs:
            return self._skip(name, f"a random sample, and the file has no in.eps_{source}")
        if source in self.case.inputs and kind in self._of_input:
            return compare(name, self._of_input[kind](source), self.case.outputs[name], self.tolerance)
        return self._skip(name, "an output of a kind that the WFVAE runner does not know")

    def _compare_chunked(self, name: str, kind: str, entry: Entry) -> ParityOutput:
        """Our pieces equal the whole. Where those of the published code do not, the whole is what we compare with."""
        whole_name = {"moments": "moments", "decoded_from_unchunked_mean": "recon_mode"}.get(kind)
        if whole_name is None:
            return self._skip(name, "a statistic of the published code, not a result")
        if self.model.config.norm == "groupnorm":
            note = "groupnorm spans all frames, so we refuse to run it in pieces"
            return self._skip(name, note, deviation="chunking-with-groupnorm")
        ours = self._run_chunked(kind, entry)
        whole = self.case.outputs.get(f"{entry['input']}.{whole_name}")
        if whole is not None and self._is_lossy(name, whole):
            note = "the published chunking is not lossless here; compared with its unchunked result"
            return compare(name, ours, whole, self.tolerance, note, "chunking-that-loses-frames")
        return compare(name, ours, self.case.outputs[name], self.tolerance)

    def _is_lossy(self, name: str, whole: Tensor) -> bool:
        """Whether the published chunked result is known to differ from the published whole one."""
        tag, _, kind = name.rpartition(".")
        expected = self.case.outputs[name]
        if expected.shape != whole.shape:
            return True
        recorded = self.case.outputs.get(f"{tag}.max_abs_diff_{kind.split('_')[0]}_vs_unchunked")
        gap = recorded if recorded is not None else (expected - whole).abs().max()
        return not bool(gap <= self.tolerance)

    def _run_chunked(self, kind: str, entry: Entry) -> Tensor:
        mean_BCFHW = self._mean(entry["input"])
        stride = self.model.strides[0]
        # The published sizes count coefficient frames, of which there is one for two pixel frames.
        encode_frames = -(-2 * entry["t_chunk_enc"] // stride) * stride
        chunk_frames = encode_frames if kind == "moments" else stride * entry["t_chunk_dec"]
        self.model.use(EncodePolicy(chunk_frames=chunk_frames))
        try:
            if kind == "moments":
                return self.model.encode_raw(self.case.inputs[entry["input"]].float())
            return self.model.decode(mean_BCFHW)
        finally:
            self.model.use(EncodePolicy())

    def _mean(self, name: str) -> Tensor:
        return Moments.from_raw(self._encode(name)).mode()

    def _sample(self, name: str) -> Tensor:
        return Moments.from_raw(self._encode(name)).sample(self.case.inputs[f"eps_{name}"].float())

    def _skip(self, name: str, reason: str, deviation: str = "") -> ParityOutput:
        return ParityOutput(name, None, self.case.outputs[name], self.tolerance, reason, deviation)


@golden(lambda case: case.config.get("cls") == "CausalVAEModel")
def run_causal(case: ParityCase) -> list[ParityOutput]:
    config = CausalVAEConfig.from_original(case.config["model"])
    weights, probes = find_weights(case)
    model = CausalVAE(config).eval()
    load_causal(model, weights)
    tolerance = CAUSAL_TOLERANCE_NARROW if max(config.widths) == config.norm_groups else CAUSAL_TOLERANCE
    with torch.no_grad():
        return probes + [_compare_causal(case, model, name, tolerance) for name in case.outputs]


def _compare_causal(case: ParityCase, model: CausalVAE, name: str, tolerance: float) -> ParityOutput:
    source, _, kind = name.rpartition(".")
    tiled: Entry = (case.config.get("run") or {}).get(source, {})
    x_BCFHW = case.inputs.get(tiled.get("input", source))
    compute = (_OF_TILED if tiled else _OF_INPUT).get(kind)
    if x_BCFHW is None or compute is None:
        return ParityOutput(name, None, case.outputs[name], tolerance, "an output of a kind that this runner lacks")
    return compare(name, compute(model, x_BCFHW.float(), tiled), case.outputs[name], tolerance)


def _encode(model: CausalVAE, pixels_BCFHW: Tensor, tiled: Entry) -> Tensor:
    return run_in_cuts(model.encode_piece, pixels_BCFHW, _published_cuts(tiled, decoding=False))


def _decode(model: CausalVAE, latent_BCFHW: Tensor, tiled: Entry) -> Tensor:
    return run_in_cuts(model.decode_piece, latent_BCFHW, _published_cuts(tiled, decoding=True))


def _published_cuts(entry: Entry, *, decoding: bool) -> Cuts:
    """In time, pieces share one frame, which all but the first piece drop from their result; none fade."""
    if not entry:
        return Cuts()
    shared = entry["tile_latent_min_size_t" if decoding else "tile_sample_min_size_t"] - 1
    sides = [entry["tile_sample_min_size"], entry["tile_latent_min_size"]]
    size, result = reversed(sides) if decoding else sides
    overlap = entry["tile_overlap_factor"]
    blend = int(result * overlap)
    side = Tiles(size=size, stride=int(size * (1 - overlap)), keep=result - blend, blend=blend)
    return Cuts((side, side), Tiles(size=shared, stride=shared, keep=2**31, blend=0), lead=1)


def _reconstruct(model: CausalVAE, pixels_BCFHW: Tensor, tiled: Entry) -> Tensor:
    return _decode(model, Moments.from_raw(_encode(model, pixels_BCFHW, tiled)).mode(), tiled)


def _measure_encode_gap(model: CausalVAE, pixels_BCFHW: Tensor, tiled: Entry) -> Tensor:
    """How far tiles are from the whole."""
    return (_encode(model, pixels_BCFHW, tiled) - _encode(model, pixels_BCFHW, {})).abs().max()


def _measure_decode_gap(model: CausalVAE, pixels_BCFHW: Tensor, tiled: Entry) -> Tensor:
    """The same for the decoder, from the mean that the tiled encoder gives."""
    latent = Moments.from_raw(_encode(model, pixels_BCFHW, tiled)).mode()
    return (_decode(model, latent, tiled) - _decode(model, latent, {})).abs().max()


_OF_INPUT: dict[str, Compute] = {"moments": _encode, "recon_mode": _reconstruct, "decoded": _decode}
_OF_TILED: dict[str, Compute] = {
    "moments": _encode,
    "decoded_from_tiled_mean": _reconstruct,
    "max_abs_diff_moments_vs_untiled": _measure_encode_gap,
    "max_abs_diff_decoded_vs_untiled": _measure_decode_gap,
}


@golden(lambda case: str(case.config.get("cls", "")).startswith("Haar "))
@torch.no_grad()
def run_haar(case: ParityCase) -> list[ParityOutput]:
    return pair_outputs(case, {name: _compute_haar(case, name) for name in case.outputs}, HAAR_TOLERANCE)


def _compute_haar(case: ParityCase, name: str) -> Tensor | None:
    if name == "filters2d":
        return Haar(in_time=False).taps().flatten(1)
    if name == "filters3d":
        return Haar(in_time=True).taps().flatten(1)
    source, _, kind = name.rpartition(".")
    if source not in case.inputs or kind not in _KINDS:
        return None
    split, join = _KINDS[kind]
    given = case.inputs[source].float()
    if join is None:
        return split(given)
    # An input that also has a forward result is a picture: the inverse is that of its coefficients.
    is_picture = f"{source}.fwd2d" in case.outputs or f"{source}.fwd3d" in case.outputs
    return join(split(given) if is_picture else given)


def _join_in_pieces(bands_BCFHW: Tensor) -> Tensor:
    """The inverse of one frame, then of two, then of all others."""
    num_frames = bands_BCFHW.shape[2]
    return run_in_chunks(Haar(in_time=True, inverse=True), bands_BCFHW, sorted({0, 1, min(3, num_frames), num_frames}))


_KINDS: dict[str, tuple[Transform, Transform | None]] = {
    "fwd2d": (Haar(in_time=False), None),
    "fwd3d": (Haar(in_time=True), None),
    "inv2d": (Haar(in_time=False), Haar(in_time=False, inverse=True)),
    "inv3d": (Haar(in_time=True), Haar(in_time=True, inverse=True)),
    "inv3d_cached_chunks": (Haar(in_time=True), _join_in_pieces),
}
