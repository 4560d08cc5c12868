"""Golden cases of the WFVAE: the whole model against tensors of the published code.

Outputs are recognised by their names: `<input>.moments`, `<input>.recon_mode`, `<chunked run>.moments` and so on, for
any input and any chunked run that a file holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from frameloom.core.parity import ParityCase, ParityOutput
from frameloom.models.vaes.base import Moments
from frameloom.models.vaes.parity_weights import find_weights
from frameloom.models.vaes.wfvae.config import WFVAEConfig
from frameloom.models.vaes.wfvae.model import WFVAE
from frameloom.models.vaes.wfvae.weights import load_original

TOLERANCE = 1e-4
# Without attention and with repeated frames a narrow norm amplifies rounding: the published code itself moves by
# 9e-5 from one CPU kernel to another.
TOLERANCE_NEAREST = 3e-4


def matches(case: ParityCase) -> bool:
    return case.config.get("cls") == "WFVAEModel"


def run(case: ParityCase) -> list[ParityOutput]:
    config = WFVAEConfig.from_original(case.config["model"])
    weights, probes = find_weights(case, leave_out=lambda key: "wavelet_tranform" in key)
    model = WFVAE(config).eval()
    load_original(model, weights)
    is_rough = config.time_interpolation == "nearest" and not config.attention
    with torch.no_grad():
        outputs = _Comparison(case, model, TOLERANCE_NEAREST if is_rough else TOLERANCE).compare_all()
    return probes + outputs


class _Comparison:
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
            return ParityOutput(name, ours, whole, self.tolerance, note, deviation="chunking-that-loses-frames")
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
        self.model.enable_chunking(encode_frames=encode_frames, decode_frames=entry["t_chunk_dec"])
        try:
            if kind == "moments":
                return self.model.encode_raw(self.case.inputs[entry["input"]].float())
            return self.model.decode(mean_BCFHW)
        finally:
            self.model.disable_chunking()

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
        return ParityOutput(name, ours, self.case.outputs[name], self.tolerance)

    def _skip(self, name: str, reason: str, deviation: str = "") -> ParityOutput:
        return ParityOutput(name, None, self.case.outputs[name], self.tolerance, reason, deviation)
