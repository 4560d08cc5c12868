"""Golden cases of Open-Sora-Plan's autoencoders, WFVAE and CausalVAE, and of the Haar transforms alone.

Outputs are recognised by their names: `<input>.moments`, `<input>.recon_mode`, `<chunked or tiled run>.moments` and so
on, for any input and any run that a file holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from frameloom.models.layers.causal_conv import run_in_chunks
from frameloom.models.layers.tiles import Cuts, Tiles
from frameloom.models.layers.tiling import run_in_cuts
from frameloom.models.vaes.base import EncodePolicy, Moments
from frameloom.models.vaes.causal.config import CausalVAEConfig
from frameloom.models.vaes.causal.model import CausalVAE
from frameloom.models.vaes.causal.weights import load_original as load_causal
from frameloom.models.vaes.wfvae.config import WFVAEConfig
from frameloom.models.vaes.wfvae.model import WFVAE
from frameloom.models.vaes.wfvae.wavelet import Haar
from frameloom.models.vaes.wfvae.weights import load_original as load_wfvae
from tests.parity.cases import ParityCase, ParityOutput, Runner, compare
from tests.parity.weights import find_weights

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


def is_wfvae(case: ParityCase) -> bool:
    return case.config.get("cls") == "WFVAEModel"


def run_wfvae(case: ParityCase) -> list[ParityOutput]:
    config = WFVAEConfig.from_original(case.config["model"])
    weights, probes = find_weights(case, leave_out=lambda key: "wavelet_tranform" in key)
    model = WFVAE(config).eval()
    load_wfvae(model, weights)
    is_rough = config.time_interpolation == "nearest" and not config.attention
    with torch.no_grad():
        outputs = _WFVAEComparison(case, model, WFVAE_TOLERANCE_NEAREST if is_rough else WFVAE_TOLERANCE).compare_all()
    return probes + outputs


class _WFVAEComparison:
    """One model and one case; encodings of the whole inputs are computed once."""

    def __init__(self, case: ParityCase, model: WFVAE, tolerance: float) -> None:
        self.case = case
        self.model = model
        self.tolerance = tolerance
        self.chunked_runs = {entry["tag"]: entry for entry in case.config.get("run", {}).get("chunked", [])}
        self._encoded: dict[str, Tensor] = {}
        self._of_input: dict[str, Callable[[str], Tensor]] = {
            "moments": self._encode,
            "recon_mode": lambda name: model.decode(self._mean(name)),
            "encoder_in_coeffs": lambda name: model.split_pixels(case.inputs[name].float()),
            "z_sample": self._sample,
            "recon_sample": lambda name: model.decode(self._sample(name)),
            "decoded": lambda name: model.decode(case.inputs[name].float()),
        }
        self._of_wrapper: dict[str, Callable[[str], Tensor]] = {
            "encode": lambda name: model.normalize(self._sample(name)),
            "decode": self._decode_wrapped,
        }

    def compare_all(self) -> list[ParityOutput]:
        return [self._compare(name) for name in self.case.outputs]

    def _compare(self, name: str) -> ParityOutput:
        source, _, kind = name.rpartition(".")
        if source in self.chunked_runs:
            return self._compare_chunked(name, kind, self.chunked_runs[source])
        if kind in ("z_sample", "recon_sample", "encode", "decode"):
            needed = f"eps_{source.removeprefix('wrapper.')}"
            if needed not in self.case.inputs:
                return self._skip(name, f"a random sample, and the file has no in.{needed}")
        if source.startswith("wrapper.") and kind in self._of_wrapper:
            return self._result(name, self._of_wrapper[kind](source.removeprefix("wrapper.")))
        if source in self.case.inputs and kind in self._of_input:
            return self._result(name, self._of_input[kind](source))
        return self._skip(name, "an output of a kind that the WFVAE runner does not know")

    def _compare_chunked(self, name: str, kind: str, entry: dict[str, Any]) -> ParityOutput:
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
        return self._result(name, ours)

    def _is_lossy(self, name: str, whole: Tensor) -> bool:
        """Whether the published chunked result is known to differ from the published whole one."""
        tag, _, kind = name.rpartition(".")
        expected = self.case.outputs[name]
        if expected.shape != whole.shape:
            return True
        recorded = self.case.outputs.get(f"{tag}.max_abs_diff_{kind.split('_')[0]}_vs_unchunked")
        gap = recorded if recorded is not None else (expected - whole).abs().max()
        return not bool(gap <= self.tolerance)

    def _run_chunked(self, kind: str, entry: dict[str, Any]) -> Tensor:
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

    def _encode(self, name: str) -> Tensor:
        if name not in self._encoded:
            self._encoded[name] = self.model.encode_raw(self.case.inputs[name].float())
        return self._encoded[name]

    def _mean(self, name: str) -> Tensor:
        return Moments.from_raw(self._encode(name)).mode()

    def _sample(self, name: str) -> Tensor:
        return Moments.from_raw(self._encode(name)).sample(self.case.inputs[f"eps_{name}"].float())

    def _decode_wrapped(self, name: str) -> Tensor:
        latent_BCFHW = self.model.denormalize(self.model.normalize(self._sample(name)))
        return self.model.decode(latent_BCFHW).transpose(1, 2)

    def _result(self, name: str, ours: Tensor) -> ParityOutput:
        return compare(name, ours, self.case.outputs[name], self.tolerance)

    def _skip(self, name: str, reason: str, deviation: str = "") -> ParityOutput:
        return ParityOutput(name, None, self.case.outputs[name], self.tolerance, reason, deviation)


def is_causal(case: ParityCase) -> bool:
    return case.config.get("cls") == "CausalVAEModel"


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


def is_haar(case: ParityCase) -> bool:
    return str(case.config.get("cls", "")).startswith("Haar ")


def run_haar(case: ParityCase) -> list[ParityOutput]:
    with torch.no_grad():
        return [_compare_haar(case, name) for name in case.outputs]


def _compare_haar(case: ParityCase, name: str) -> ParityOutput:
    expected = case.outputs[name]
    ours = _compute_haar(case, name)
    note = "" if ours is not None else "an output of a kind that the Haar runner does not know"
    return compare(name, ours, expected, HAAR_TOLERANCE, note)


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


RUNNERS = (Runner(is_wfvae, run_wfvae), Runner(is_haar, run_haar), Runner(is_causal, run_causal))
