"""What a model that was trained with notes behind its captions finds behind a prompt."""

from __future__ import annotations

import re
from dataclasses import dataclass

from frameloom.config.caption_settings import CaptionNoteSection
from frameloom.config.sampling_settings import SampleSection
from frameloom.config.schema import Recipe
from frameloom.data.caption_notes import join_note, spell_motion, spell_rate

_SAID_RATE = re.compile(r"\bFPS\b", re.IGNORECASE)
_SAID_MOTION = re.compile(r"\bmotion score\b", re.IGNORECASE)


@dataclass(frozen=True)
class PromptNote:
    section: CaptionNoteSection
    fps_max: float

    def add(self, prompt: str, settings: SampleSection) -> str:
        """The prompt with what it does not say itself; the empty prompt stays empty, a picture has no frame rate."""
        if not prompt:
            return prompt
        has_rate = self.section.fps and settings.frames > 1 and not _SAID_RATE.search(prompt)
        score = self.section.motion_in_sampling if settings.motion_score is None else settings.motion_score
        is_silent = self.section.motion is None or score is None or _SAID_MOTION.search(prompt)
        motion = [] if is_silent or score is None else [spell_motion(score)]
        if self.section.in_sampling == "as_trained":
            return join_note(prompt, ([spell_rate(settings.fps, self.fps_max)] if has_rate else []) + motion)
        text = prompt.strip()
        text = text if text.endswith(".") else f"{text}."
        return " ".join([text, *(f"{part}." for part in ([f"{settings.fps:g} FPS"] if has_rate else []) + motion)])


def build_note(recipe: Recipe) -> PromptNote | None:
    """What the recipe trains with; without that, a motion score that is asked for is told in the published way."""
    if recipe.text.note is not None:
        return PromptNote(recipe.text.note, recipe.data.fps_max)
    if recipe.sample.motion_score is None:
        return None
    return PromptNote(CaptionNoteSection(in_sampling="sentences"), recipe.data.fps_max)
