"""Classifier-free guidance around a denoiser: on text, or on text and given frames, with a scale per step.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens, D width of a text state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.config.schema.sampling import SampleSection
from frameloom.diffusion.guidance import ThreeBranchGuidance, dynamic_scale, guided, oscillate, rescale_guided
from frameloom.models.denoisers.conditions import Conditions
from frameloom.models.text.base import TextStates
from frameloom.sampling.conditions import Prepared


class GuidedDenoiser:
    """Predictions for a solver. `step`, counted from 0, is set by the caller, because a solver may ask twice in one.

    Guidance of both kinds at 1 is the conditional model alone, and costs one pass instead of two or three. A distilled
    model is told its scale.
    """

    def __init__(
        self,
        denoiser: LoadedDenoiser,
        text: TextStates,
        negative: TextStates,
        prepared: Prepared,
        settings: SampleSection,
    ) -> None:
        self._family, self._model = denoiser.family, denoiser.model
        self._is_told = denoiser.family.told_guidance(denoiser.config)
        self._dtype = next(denoiser.model.parameters()).dtype
        self._text, self._negative = text, negative
        self._prepared, self._settings = prepared, settings
        self.step = 0

    def __call__(self, x_BCFHW: Tensor, timestep_B: Tensor) -> Tensor:
        settings, text_scale = self._settings, self._scale(self._settings.guidance, "text")
        told = self._prepared.told
        if self._is_told:
            scale_B = torch.full((len(x_BCFHW),), settings.guidance, device=x_BCFHW.device)
            return self._predict(x_BCFHW, timestep_B, [self._text], dataclasses.replace(told, guidance_B=scale_B))[0]
        if self._prepared.untold is not None and settings.image_guidance is not None:
            return self._predict_with_image(x_BCFHW, timestep_B, self._prepared.untold)
        if text_scale == 1:
            return self._predict(x_BCFHW, timestep_B, [self._text], told)[0]
        pair = self._predict(x_BCFHW, timestep_B, [self._text, self._negative], _repeat(told, 2))
        result = guided(pair[0], pair[1], text_scale)
        return rescale_guided(result, pair[0], settings.guidance_rescale) if settings.guidance_rescale else result

    def _predict_with_image(self, x_BCFHW: Tensor, timestep_B: Tensor, untold: Conditions) -> Tensor:
        settings, told = self._settings, self._prepared.told
        assert settings.image_guidance is not None
        law = ThreeBranchGuidance(
            text_scale=self._scale(settings.guidance, "text"),
            image_scale=self._scale(settings.image_guidance, "image"),
            scale_image_by_frame=settings.image_guidance_by_frame,
        )
        texts = [self._text, self._negative, self._negative]
        full, image_only, neither = self._predict(x_BCFHW, timestep_B, texts, _concatenate([told, told, untold]))
        return law.combine(full, image_only, neither, step=self.step, num_steps=settings.steps)

    def _scale(self, scale: float, of: Literal["text", "image"]) -> float:
        if self._settings.guidance_law in ("oscillating", f"oscillating_{of}"):
            return oscillate(scale, self.step)
        if self._settings.guidance_law == "dynamic":
            return dynamic_scale(scale, self.step, self._settings.steps)
        return scale

    def _predict(
        self, x_BCFHW: Tensor, timestep_B: Tensor, texts: list[TextStates], given: Conditions
    ) -> tuple[Tensor, ...]:
        """One forward of as many batches as there are texts."""
        times = len(texts)
        text = TextStates.concatenate(texts)
        if self._dtype != torch.float32:
            text = TextStates(text.tokens_BKD.to(self._dtype), text.mask_BK, text.pooled_BD.to(self._dtype))
            if given.beside_BCFHW is not None:
                given = dataclasses.replace(given, beside_BCFHW=given.beside_BCFHW.to(self._dtype))
        x = x_BCFHW.to(self._dtype).repeat(times, 1, 1, 1, 1)
        result = self._family.denoise(self._model, x, timestep_B.repeat(times), text, given)
        return result.float().chunk(times)


def _repeat(given: Conditions, times: int) -> Conditions:
    """For a batch that holds every sample several times, one whole batch after the other."""
    repeated: dict[str, Any] = {
        name: part.repeat(times, *[1] * (part.ndim - 1))
        for name, part in vars(given).items()
        if isinstance(part, Tensor)
    }
    return dataclasses.replace(given, **repeated)


def _concatenate(parts: Sequence[Conditions]) -> Conditions:
    """The batches of all parts, in order; all have the same conditions."""
    names = [name for name, part in vars(parts[0]).items() if isinstance(part, Tensor)]
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return dataclasses.replace(parts[0], **joined)
