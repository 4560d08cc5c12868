"""Classifier-free guidance: combinations of predictions with and without conditions, and scales that vary by step.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Oscillation leaves the first steps, which fix the layout, at full strength.
FIRST_OSCILLATING_STEP = 10


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Ho & Salimans 2022 in the form where scale 1 is the conditional prediction itself."""
    return unconditional + scale * (conditional - unconditional)


def rescale_guided(guided_BCFHW: Tensor, conditional_BCFHW: Tensor, share: float) -> Tensor:
    """Pull the spread of a guided prediction back to that of the conditional one (Lin et al. 2023, eq. 15-16).

    Zero-terminal-SNR models need it at high scales, or the result is over-exposed. Share 0 changes nothing.
    """
    dims = tuple(range(1, guided_BCFHW.ndim))
    spread = conditional_BCFHW.std(dim=dims, keepdim=True) / guided_BCFHW.std(dim=dims, keepdim=True)
    return guided_BCFHW * (share * spread + (1 - share))


def oscillate(scale: float, step: int) -> float:
    """`scale` in the first steps and every even step after them, else 1: less saturation at the same strength."""
    return scale if step < FIRST_OSCILLATING_STEP or step % 2 == 0 else 1.0


def dynamic_scale(scale: float, step: int, num_steps: int) -> float:
    """From 1 to 1 + `scale`, most of it late: CogVideoX's dynamic guidance, with `step` counted from 0.

    Its published formula puts the noise index, up to 999, where the number of the step belongs, so that its value jumps
    about unless there are 1000 steps; with 1000 both are the same.
    """
    share = (step + 1) / num_steps
    return 1 + scale * (1 - math.cos(math.pi * share**5)) / 2


def guided_by_image(
    full: Tensor, image_only: Tensor, neither: Tensor, *, text_scale: float, image_scale_F: Tensor
) -> Tensor:
    """One prediction (..., F, H, W) from three: with text and image, with the image (or clip) only, with neither."""
    image_F11 = image_scale_F.to(full.device, full.dtype)[:, None, None]
    return neither + image_F11 * (image_only - neither) + text_scale * (full - image_only)


def scale_by_frame(scale: float, step: int, num_steps: int, num_frames: int) -> Tensor:
    """Image guidance per latent frame that grows along the frames and fades over the steps, counted from 0.

    Far frames need the most help to stay with the image, and late steps the least. Scales up to 1 stay as they are.
    """
    top = scale + (1 - scale) * step / num_steps
    return torch.full((num_frames,), scale) if scale <= 1 else torch.linspace(1, top, num_frames)
