"""Classifier-free guidance: predictions with and without a condition, drawn apart.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from frameloom.diffusion.objective import Predict

Branches = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(x, timestep) -> predictions with (text and image, image only, neither)."""

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


@dataclass(frozen=True)
class ThreeBranchGuidance:
    """Separate strengths for text and for the image or clip that a video continues."""

    text_scale: float = 7.5
    image_scale: float = 3.0
    oscillate_text: bool = False
    oscillate_image: bool = False
    # Image guidance that grows along the frames and fades over the steps: far frames need the most help to
    # stay with the image, and late steps the least. Only useful with an image condition.
    scale_image_by_frame: bool = False

    def scales_at(self, step: int, num_steps: int, num_frames: int) -> tuple[float, Tensor]:
        """Text scale, and image scale per latent frame, at a step counted from 0."""
        text = oscillate(self.text_scale, step) if self.oscillate_text else self.text_scale
        image = oscillate(self.image_scale, step) if self.oscillate_image else self.image_scale
        if not self.scale_image_by_frame or image <= 1:
            return text, torch.full((num_frames,), image)
        top = image + (1 - image) * step / num_steps
        return text, torch.linspace(1, top, num_frames)

    def combine(self, full: Tensor, image_only: Tensor, neither: Tensor, *, step: int, num_steps: int) -> Tensor:
        """One prediction (..., F, H, W) from three."""
        text, image_F = self.scales_at(step, num_steps, full.shape[-3])
        image_F11 = image_F.to(full.device, full.dtype)[:, None, None]
        return neither + image_F11 * (image_only - neither) + text * (full - image_only)

    def predictor(self, branches: Branches, *, num_steps: int) -> Predict:
        """A predictor for one sampling run of `num_steps`; it counts its calls, so make a new one for each run."""
        steps = count()

        def predict(x_BCFHW: Tensor, timestep_B: Tensor) -> Tensor:
            step = next(steps)
            return self.combine(*branches(x_BCFHW, timestep_B), step=step, num_steps=num_steps)

        return predict
