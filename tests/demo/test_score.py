"""Scores of held-out prompts, from text alone and from a given first frame."""

from __future__ import annotations

import pytest

from frameloom.core.errors import ConfigError
from frameloom.demo.shapes import heldout_prompts
from frameloom.demo.shapes_score import score_clip, score_from_first_frames, score_run
from tests.sampling.conftest import Load

SIZE = {"height": 64, "width": 64, "steps": 2}


def test_first_frames_are_those_of_clips_that_the_prompts_describe(load: Load) -> None:
    """Frames put back as they were given are alike to the bit, and show background and colour of their prompts."""
    scored = score_from_first_frames(load("opensora2", keep="pixels", **SIZE), num_prompts=6, seed=1)
    assert [result.request.prompt for result in scored.results] == heldout_prompts(6, seed=1)
    assert scored.first_frame_db is not None and scored.first_frame_db > 90
    for result in scored.results:
        found = score_clip(result.frames_FHWC[:1])
        assert found.background in result.request.prompt and found.colour in result.request.prompt
    assert scored.to_json()["first_frame_db"] == scored.first_frame_db


def test_a_model_that_goes_on_from_nothing_scores_by_chance(load: Load) -> None:
    sampler = load("opensora2", keep="latent", **SIZE)
    scored = score_from_first_frames(sampler, num_prompts=6, seed=1)
    assert scored.first_frame_db is not None and scored.first_frame_db < 40
    assert scored.report.all_right < 1
    assert score_run(sampler, num_prompts=2, seed=1).first_frame_db is None


def test_a_model_of_text_alone_takes_no_first_frame(load: Load) -> None:
    with pytest.raises(ConfigError, match="image"):
        score_from_first_frames(load("latte", **SIZE), num_prompts=1, seed=1)
