"""Classifier-free guidance around a denoiser: on text, or on text and given frames, with a scale per step.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens, D width of a text state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.config.schema.sampling import SampleSection
from frameloom.diffusion.guidance import (
    dynamic_scale,
    guided,
    guided_by_image,
    oscillate,
    rescale_guided,
    scale_by_frame,
)
from frameloom.models.text.base import TextStates
from frameloom.sampling.conditions import Prepared


class GuidedDenoiser:
    """Predictions for a solver. `step`, counted from 0, is set by the caller, because a solver may ask twice in one.

    Guidance of both kinds at 1 is the conditional model alone, and costs one pass instead of two or three. A distilled
    model takes its scale as an input.
    """

    def __init__(
        self,
        denoiser: LoadedDenoiser,
        text: TextStates,
        negative: TextStates,
        prepared: Prepared,
        settings: SampleSection,
    ) -> None:
        self._model, self._has_embedding = denoiser.model, getattr(denoiser.config, "guidance_embed", False)
        self._dtype = next(denoiser.model.parameters()).dtype
        self._text, self._negative = text.conditions(), negative.conditions()
        self._prepared, self._settings = prepared, settings
        self.step = 0

    def __call__(self, x_BCFHW: Tensor, timestep_B: Tensor) -> Tensor:
        settings, text_scale = self._settings, self._scale(self._settings.guidance, "text")
        cond, uncond = self._prepared.cond, self._prepared.uncond
        full = {**self._text, **cond}
        if self._has_embedding:
            scale_B = torch.full((len(x_BCFHW),), settings.guidance, device=x_BCFHW.device)
            return self._predict(x_BCFHW, timestep_B, {**full, "guidance": scale_B})[0]
        if uncond is not None and settings.image_guidance is not None:
            num_frames, image_scale = x_BCFHW.shape[2], self._scale(settings.image_guidance, "image")
            image_scale_F = torch.full((num_frames,), image_scale)
            if settings.image_guidance_by_frame:
                image_scale_F = scale_by_frame(image_scale, self.step, settings.steps, num_frames)
            branches = full, {**self._negative, **cond}, {**self._negative, **uncond}
            parts = self._predict(x_BCFHW, timestep_B, *branches)
            return guided_by_image(*parts, text_scale=text_scale, image_scale_F=image_scale_F)
        if text_scale == 1:
            return self._predict(x_BCFHW, timestep_B, full)[0]
        conditional, unconditional = self._predict(x_BCFHW, timestep_B, full, {**self._negative, **cond})
        result = guided(conditional, unconditional, text_scale)
        return rescale_guided(result, conditional, settings.guidance_rescale) if settings.guidance_rescale else result

    def _scale(self, scale: float, of: Literal["text", "image"]) -> float:
        if self._settings.guidance_law in ("oscillating", f"oscillating_{of}"):
            return oscillate(scale, self.step)
        if self._settings.guidance_law == "dynamic":
            return dynamic_scale(scale, self.step, self._settings.steps)
        return scale

    def _predict(self, x_BCFHW: Tensor, timestep_B: Tensor, *branches: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """One forward of as many batches as there are branches, which have the same conditions."""
        times = len(branches)
        conditions = {name: torch.cat([branch[name] for branch in branches]) for name in branches[0]}
        if self._dtype != torch.float32:
            names = conditions.keys() & {"text", "pooled", "cond_latents"}
            conditions |= {name: conditions[name].to(self._dtype) for name in names}
        x = x_BCFHW.to(self._dtype).repeat(times, 1, 1, 1, 1)
        prediction: Tensor = self._model(x, timestep_B.repeat(times), conditions)
        return prediction.float().chunk(times)
