"""Notes behind captions in a run: batches, text caches, the resume and sampling all know them."""

from __future__ import annotations

import polars
import pytest
import torch

from frameloom.core.errors import CacheError, CheckpointError, ConfigError
from frameloom.data.loading.loader import iterate_batches
from frameloom.sampling.load import load_sampler
from frameloom.sampling.pipeline import encode_prompts
from frameloom.training.caching import write_caches
from frameloom.training.feed import build_feed
from frameloom.training.run.resuming import ResumeChoices
from frameloom.training.train import train


@pytest.fixture
def scored(world) -> list[str]:
    """Overrides for the shared clips with motion scores."""
    table = polars.read_parquet(world.shared / "data" / "manifest.parquet")
    table.with_columns(score_vmafmotion=polars.int_range(polars.len()) / 4).write_parquet(world.folder / "m.parquet")
    return ["--data.manifest", str(world.folder / "m.parquet"), "--data.root", str(world.shared / "data")]


def captions(recipe) -> list[str]:
    feed = build_feed(recipe, bad_clips=recipe_folder(recipe))
    return [caption for batch in iterate_batches(feed.plan(0), feed.reader) for caption in batch.captions]


def recipe_folder(recipe):
    from pathlib import Path

    return Path(recipe.run.folder) / "bad_clips.jsonl"


def test_batches_carry_the_notes_with_and_without_a_text_cache(world, scored):
    text = {"note": {}}
    fresh = captions(world.recipe(*scored, text=text))
    cache = {"cache": {"text": str(world.folder / "text")}}
    recipe = world.recipe(*scored, text=text, data=cache)
    list(write_caches(recipe))
    assert captions(recipe) == fresh
    assert all(caption.endswith(" motion score.") for caption in fresh)
    assert any(" FPS, " in caption for caption in fresh)
    assert not any("FPS" in caption for caption in captions(world.recipe(*scored)))


def test_a_text_cache_made_with_another_note_is_refused(world, scored):
    cache = {"cache": {"text": str(world.folder / "text")}}
    list(write_caches(world.recipe(*scored, text={"note": {}}, data=cache)))
    for text, reason in (({}, "note.fps"), ({"note": {"motion": None}}, "note.motion")):
        with pytest.raises(CacheError, match=reason):
            train(world.recipe(*scored, text=text, data=cache))
    # How prompts are written is no matter of the cache.
    train(world.recipe(*scored, "--train.steps", "1", text={"note": {"in_sampling": "sentences"}}, data=cache))


def test_a_resumed_run_must_keep_its_notes_and_sampling_uses_them(world, scored):
    run = train(world.recipe(*scored, "--train.steps", "1", text={"note": {}}))
    with pytest.raises(CheckpointError, match=r"text\.note"):
        train(world.recipe(*scored, "--train.steps", "2"), ResumeChoices(accept_recipe_change=True))
    sampler = load_sampler(run, ["--sample.fps", "8"])
    states, null = encode_prompts(sampler, ["a red circle"])
    said = sampler.text.encode(["a red circle 8.0 FPS, 4 motion score.", "a red circle", ""]).tokens_BKD
    assert torch.allclose(states.tokens_BKD[0], said[0], atol=1e-5)
    assert not torch.allclose(states.tokens_BKD[0], said[1], atol=1e-2)
    assert torch.allclose(null.tokens_BKD[0], said[2], atol=1e-5)


def test_a_note_that_says_nothing_is_refused(world):
    with pytest.raises(ConfigError, match="would say nothing"):
        world.recipe(text={"note": {"fps": False, "motion": None}})
