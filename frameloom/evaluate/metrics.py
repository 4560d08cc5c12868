"""Distances between two videos of the same shape, one number per clip.

Values are in [-1, 1]. Shape letters: B batch, C channels, F frames, H height, W width.
The library is imported by the first use: it takes two seconds, and most runs that could measure do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RANGE = 2.0  # from -1 to 1
_MIN_SSIM_PX = 11  # the window of the original paper
_MIN_MS_SSIM_PX = 176  # halved four times, the picture must still hold the window


def psnr_db(a_BCFHW: Tensor, b_BCFHW: Tensor) -> Tensor:
    """Peak signal-to-noise ratio per clip in dB, the mean over its frames; a frame without difference makes it inf."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    a_NCHW, b_NCHW = _to_frames(a_BCFHW, b_BCFHW)
    psnr_N = peak_signal_noise_ratio(a_NCHW, b_NCHW, data_range=_RANGE, dim=(1, 2, 3), reduction="none")
    return psnr_N.reshape(len(a_BCFHW), -1).mean(dim=1)


def ssim(a_BCFHW: Tensor, b_BCFHW: Tensor) -> Tensor:
    """Structural similarity per clip: the mean over frames, 11x11 Gaussian window; 1 for equal clips."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    if min(a_BCFHW.shape[-2:]) < _MIN_SSIM_PX:
        raise ValueError(f"SSIM needs at least {_MIN_SSIM_PX} pixels a side, got {tuple(a_BCFHW.shape[-2:])}")
    a_NCHW, b_NCHW = _to_frames(a_BCFHW, b_BCFHW)
    ssim_N = structural_similarity_index_measure(a_NCHW, b_NCHW, data_range=_RANGE, reduction="none")
    assert isinstance(ssim_N, Tensor)
    return ssim_N.reshape(len(a_BCFHW), -1).mean(dim=1)


def ms_ssim(a_BCFHW: Tensor, b_BCFHW: Tensor) -> Tensor:
    """Structural similarity over five scales per clip, with the published exponents; the mean over frames."""
    from torchmetrics.functional.image import multiscale_structural_similarity_index_measure

    if min(a_BCFHW.shape[-2:]) < _MIN_MS_SSIM_PX:
        raise ValueError(f"MS-SSIM needs at least {_MIN_MS_SSIM_PX} pixels a side, got {tuple(a_BCFHW.shape[-2:])}")
    a_NCHW, b_NCHW = _to_frames(a_BCFHW, b_BCFHW)
    values_N = multiscale_structural_similarity_index_measure(a_NCHW, b_NCHW, data_range=_RANGE, reduction="none")
    assert isinstance(values_N, Tensor)
    return values_N.reshape(len(a_BCFHW), -1).mean(dim=1)


def _to_frames(a_BCFHW: Tensor, b_BCFHW: Tensor) -> tuple[Tensor, Tensor]:
    """Frames of all clips in one batch, float32: sums of half-precision squares would lose the small differences."""
    if a_BCFHW.shape != b_BCFHW.shape or a_BCFHW.ndim != 5:
        raise ValueError(f"two videos BCFHW of one shape, got {tuple(a_BCFHW.shape)} and {tuple(b_BCFHW.shape)}")
    frames = (video_BCFHW.to(torch.float32).transpose(1, 2).flatten(0, 1) for video_BCFHW in (a_BCFHW, b_BCFHW))
    a_NCHW, b_NCHW = frames
    return a_NCHW, b_NCHW
