"""Notes behind prompts: as captions had them in training, or as the published program writes them."""

from __future__ import annotations

import pytest

from frameloom.config.schema.models import CaptionNoteSection
from frameloom.config.schema.sampling import SampleSection
from frameloom.sampling.pipeline import PromptNote, build_note


def add(prompt: str, *, style: str = "as_trained", default: int | None = 4, **given: object) -> str:
    said = {name: given.pop(name) for name in ("fps", "motion") if name in given}
    section = CaptionNoteSection(in_sampling=style, motion_in_sampling=default, **said)
    return PromptNote(section, 24).add(prompt, SampleSection(**{"fps": 24, **given}))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (add("raining, sea"), "raining, sea 24 FPS, 4 motion score."),
        (add("raining, sea", style="sentences"), "raining, sea. 24 FPS. 4 motion score."),
        (add(" raining, sea. ", style="sentences"), "raining, sea. 24 FPS. 4 motion score."),
        (add("sea", motion_score=9, fps=False), "sea 9 motion score."),
        (add("sea", default=None), "sea 24 FPS."),
        (add("sea", default=None, motion_score=2), "sea 24 FPS, 2 motion score."),
        (add("sea", motion=None), "sea 24 FPS."),
        (add("sea", frames=1), "sea 4 motion score."),
        (add("sea 16 FPS."), "sea 16 FPS. 4 motion score."),
        (add("sea, 2 motion score."), "sea, 2 motion score. 24 FPS."),
        (add(""), ""),
        (add("", style="sentences"), ""),
    ],
)
def test_a_prompt_gets_what_it_does_not_say_itself(found, wanted):
    assert found == wanted


def test_a_motion_score_alone_asks_for_the_published_note(world):
    assert build_note(world.recipe()) is None
    note = build_note(world.recipe("--sample.motion_score", "7"))
    assert note is not None and note.section.in_sampling == "sentences"
    assert note.add("sea", SampleSection(fps=24, motion_score=7)) == "sea. 24 FPS. 7 motion score."


def test_a_rate_is_spelled_as_clips_of_that_rate_were():
    section = SampleSection(fps=8)
    assert PromptNote(CaptionNoteSection(motion=None), 24).add("sea", section) == "sea 8.0 FPS."
    published = CaptionNoteSection(motion=None, in_sampling="sentences")
    assert PromptNote(published, 24).add("sea", section) == "sea. 8 FPS."
