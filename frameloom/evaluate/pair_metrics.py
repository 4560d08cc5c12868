"""Metrics of a clip against its reference: PSNR, SSIM, MS-SSIM, LPIPS, in bounded memory.

Values are in [-1, 1]. Shape letters: B batch, C channels, F frames, H height, W width, N pictures.
torchmetrics is imported at its first use: it takes two seconds, and most runs that could measure do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frameloom.checkpoint.model_folder import read_weights
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.data.media.transforms import psnr_db
from frameloom.models.vaes.lpips import LPIPS, load_lpips

PairMetric = Callable[[Tensor, Tensor], Tensor]
_RANGE = 2.0  # from -1 to 1
_MIN_SSIM_PX = 11  # the window of the original paper
_MIN_MS_SSIM_PX = 176  # halved four times, the picture must still hold the window
# By the name that a person writes: the column of the result, and the smallest side it is defined for.
METRICS = {
    "psnr": ("psnr_db", 1),
    "ssim": ("ssim", _MIN_SSIM_PX),
    "ms-ssim": ("ms_ssim", _MIN_MS_SSIM_PX),
    "lpips": ("lpips", 16),
}
# Frames that are compared at once: activations of a network, or maps of SSIM, of a long clip would fill the memory.
_SLICE_FRAMES = 8


class Measures:
    """Numbers of a pair of clips by column; None where a picture is too small for a metric."""

    def __init__(self, metrics: Mapping[str, PairMetric], device: torch.device | str = "cpu") -> None:
        self._metrics = dict(metrics)
        self._device = torch.device(device)

    @property
    def columns(self) -> list[str]:
        return [METRICS[name][0] for name in self._metrics]

    @torch.no_grad()
    def __call__(self, ours_BCFHW: Tensor, reference_BCFHW: Tensor) -> dict[str, float | None]:
        """The mean over the frames of one clip, which is what every metric here means by the value of a clip."""
        if len(ours_BCFHW) != 1 or ours_BCFHW.shape != reference_BCFHW.shape:
            raise ValueError(f"two clips of one shape, got {tuple(ours_BCFHW.shape)}, {tuple(reference_BCFHW.shape)}")
        side, num_frames = min(ours_BCFHW.shape[-2:]), ours_BCFHW.shape[2]
        usable = {name: metric for name, metric in self._metrics.items() if side >= METRICS[name][1]}
        sums = dict.fromkeys(usable, 0.0)
        for start in range(0, num_frames, _SLICE_FRAMES):
            pair = [video[:, :, start : start + _SLICE_FRAMES] for video in (ours_BCFHW, reference_BCFHW)]
            ours, reference = (part.to(self._device) for part in pair)
            for name, metric in usable.items():
                sums[name] += float(metric(ours, reference).double()) * ours.shape[2]
        return {METRICS[name][0]: sums[name] / num_frames if name in usable else None for name in self._metrics}


def build_measures(
    names: Sequence[str] | None, *, lpips: Path | None = None, device: torch.device | str = "cpu"
) -> Measures:
    """The metrics called `names`; without names all that apply, LPIPS included if its weights are given."""
    chosen = list(names) if names is not None else [*_PLAIN, *(["lpips"] if lpips is not None else [])]
    for name in chosen:
        refuse_unknown(name, METRICS, what="metric")
    metrics = {name: _PLAIN[name] for name in chosen if name in _PLAIN}
    if "lpips" in chosen:
        if lpips is None:
            raise ConfigError(
                "lpips needs its weights, which are not part of this package: VGG16 with the published linear heads in "
                "one .safetensors file; give it with --lpips FILE, or leave lpips out"
            )
        metrics["lpips"] = load_perceptual(lpips, device)
    return Measures({name: metrics[name] for name in chosen}, device)


def load_perceptual(path: Path, device: torch.device | str = "cpu") -> PairMetric:
    """LPIPS from a file; the mean over frames, one number per clip."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file; LPIPS needs VGG16 with the published linear heads")
    model = LPIPS()
    load_lpips(model, dict(read_weights(path).tensors))
    model.to(device).eval()

    def measure(ours_BCFHW: Tensor, reference_BCFHW: Tensor) -> Tensor:
        pairs = (video.float().transpose(1, 2).flatten(0, 1) for video in (ours_BCFHW, reference_BCFHW))
        first_NCHW, second_NCHW = pairs
        distance: Tensor = model(first_NCHW, second_NCHW)
        return distance.reshape(len(ours_BCFHW), -1).mean(1)

    return measure


def ssim(a_BCFHW: Tensor, b_BCFHW: Tensor) -> Tensor:
    """Structural similarity per clip: the mean over frames, 11x11 Gaussian window; 1 for equal clips."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    return _mean_over_frames("SSIM", structural_similarity_index_measure, _MIN_SSIM_PX, a_BCFHW, b_BCFHW)


def ms_ssim(a_BCFHW: Tensor, b_BCFHW: Tensor) -> Tensor:
    """Structural similarity over five scales per clip, with the published exponents; the mean over frames."""
    from torchmetrics.functional.image import multiscale_structural_similarity_index_measure

    measure = multiscale_structural_similarity_index_measure
    return _mean_over_frames("MS-SSIM", measure, _MIN_MS_SSIM_PX, a_BCFHW, b_BCFHW)


def _mean_over_frames(name: str, measure: Callable[..., Any], min_px: int, a_BCFHW: Tensor, b_BCFHW: Tensor) -> Tensor:
    if min(a_BCFHW.shape[-2:]) < min_px:
        raise ValueError(f"{name} needs at least {min_px} pixels a side, got {tuple(a_BCFHW.shape[-2:])}")
    if a_BCFHW.shape != b_BCFHW.shape or a_BCFHW.ndim != 5:
        raise ValueError(f"two videos BCFHW of one shape, got {tuple(a_BCFHW.shape)} and {tuple(b_BCFHW.shape)}")
    # float32: sums of half-precision squares would lose the small differences.
    a_NCHW, b_NCHW = (video.to(torch.float32).transpose(1, 2).flatten(0, 1) for video in (a_BCFHW, b_BCFHW))
    value_N: Tensor = measure(a_NCHW, b_NCHW, data_range=_RANGE, reduction="none")
    return value_N.reshape(len(a_BCFHW), -1).mean(dim=1)


_PLAIN: dict[str, PairMetric] = {"psnr": psnr_db, "ssim": ssim, "ms-ssim": ms_ssim}
