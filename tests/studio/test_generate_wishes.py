"""What is asked for is checked before a model is opened, and told as `frameloom sample` would say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError, DataError
from frameloom.studio.generate.controller import OWN_SIZE, Form, GenerateDesk, form_values
from frameloom.studio.generate.history import keep_upload
from frameloom.studio.generate.models import ModelIndex, find_models, makes_clips, takes_image
from frameloom.studio.generate.requests import Wish, check_wish, clean_prompt, drop_defaults
from frameloom.studio.server.context import Limits, StudioContext
from tests.studio.tiny_run import PROMPT, RUN, make_root


@pytest.fixture
def models(shared_world) -> ModelIndex:
    return ModelIndex(make_root(shared_world).resolve())


def refuse(models: ModelIndex, **values: object) -> str:
    place = models.get(RUN)
    assert place is not None
    with pytest.raises(ConfigError) as refusal:
        check_wish(Wish(RUN, **{"prompt": PROMPT, **values}), place, models.facts(RUN), Limits())
    return str(refusal.value)


def test_a_run_with_a_checkpoint_is_a_model_and_an_autoencoder_is_none(models, shared_world, tmp_path):
    assert list(models.places()) == [RUN]
    facts = models.facts(RUN)
    assert (facts.settings.steps, facts.makes_clips, facts.takes_image) == (3, True, False)
    assert "heun" in facts.samplers and "ddim" not in facts.samplers
    assert find_models(tmp_path) == [] and models.get("../vae") is None


def test_an_exported_folder_with_its_recipe_is_a_model(shared_world, tmp_path):
    source = make_root(shared_world) / RUN
    folder = tmp_path / "taken" / "model"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((source / "export" / name).read_bytes())
    assert find_models(tmp_path) == []
    (folder / "recipe.yaml").write_text((source / "recipe.yaml").read_text())
    (place,) = find_models(tmp_path)
    assert (place.name, place.kind) == ("taken/model", "export")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"prompt": "x" * 10_000_000}, "Prompt: has 10,000,000 characters; at most 4,000"),
        ({"prompt": "  "}, "Prompt: is empty"),
        ({"negative": "x" * 5_000}, "Negative prompt: has 5,000 characters"),
        ({"frames": 10**6}, "Frames: 1,000,000 is out of range; choose 1 to 1,025"),
        ({"frames": 8}, "frames is 8"),
        ({"frames": 1025, "height": 1024, "width": 2048}, "too much for one request"),
        ({"height": 65, "width": 64}, "multiple of"),
        ({"height": 10**9, "width": 64}, "Height:"),
        ({"steps": 0}, "Steps: 0 is out of range"),
        ({"guidance": float("nan")}, "Guidance:"),
        ({"seed": -1}, "Seed: choose a whole number"),
        ({"num_samples": 1000}, "Samples:"),
        ({"ratio": "wide"}, "Ratio: 'wide'; write 16:9"),
        ({"head": "studio/uploads/x.png"}, "Image: this model takes text alone"),
        ({"sampler": "ddim"}, "sample.sampler is ddim"),
    ],
)
def test_what_a_model_cannot_make_is_refused_in_words(models, values, told):
    assert told in refuse(models, **values)


def test_all_problems_are_told_together(models):
    told = refuse(models, prompt="", frames=10**6, steps=10**6)
    assert all(word in told for word in ("Prompt", "Frames", "Steps"))


def test_settings_of_the_model_are_not_said_and_others_are_in_the_order_of_the_command(models):
    facts = models.facts(RUN)
    wish = Wish(RUN, PROMPT, steps=3, guidance=2.0, sampler="default", frames=9, height=64, width=64, fps=8.0)
    assert drop_defaults(wish, facts).overrides() == []
    other = drop_defaults(Wish(RUN, "a 'b'", seed=4, steps=5, guidance=2.0, height=64, width=128, negative="c"), facts)
    words = other.overrides()
    assert words[::2] == ["--sample.steps", "--sample.negative_prompt", "--sample.height", "--sample.width"]
    assert "--size 128x64" in other.command() and "--seed 4" in other.command() and "'a '\"'\"'b'" in other.command()


def test_a_form_becomes_a_wish_and_back(shared_world, tmp_path):
    desk = GenerateDesk(StudioContext(make_root(shared_world).resolve(), tmp_path))
    form = Form(RUN, "a\x1b[31m b\x00", "", 7.0, 2, 5, 2, "heun", 5, 64, 64, OWN_SIZE, 8, "gif", None, None)
    wish, facts = desk.read_form(form)
    assert wish == Wish(RUN, "a[31m b", seed=7, num_samples=2, steps=5, sampler="heun", frames=5, format="gif")
    values = form_values(wish, facts)
    assert (values["steps"], values["width"], values["guidance"], values["ratio"]) == (5, 64, 2.0, OWN_SIZE)
    for model in (None, "runs/none", "../x"):
        assert "choose one from the list" in desk.order(Form(model, *[None] * 15))
    assert clean_prompt("a\nb\tc\r") == "a\nb\tc"


def test_fields_follow_from_the_recipe(world):
    recipe: Recipe = world.recipe()
    assert not takes_image(recipe) and makes_clips(recipe)
    given = recipe.model_copy(update={"model": recipe.model.model_copy(update={"overrides": {"cond_embed": True}})})
    assert takes_image(given)
    pictures = recipe.model_copy(
        update={
            "vae": recipe.vae.model_copy(update={"name": "kl"}),
            "sample": recipe.sample.model_copy(update={"frames": 1}),
        }
    )
    assert not makes_clips(pictures)


def test_an_upload_is_decoded_bounded_and_kept_by_its_content(tmp_path):
    import numpy as np
    from PIL import Image

    sent = tmp_path / "sent.jpg"
    Image.fromarray(np.full((20, 30, 3), 90, np.uint8)).save(sent)
    name = keep_upload(sent, tmp_path, max_bytes=1 << 20)
    assert name == keep_upload(sent, tmp_path, max_bytes=1 << 20) and name.startswith("studio/uploads/")
    with Image.open(tmp_path / name) as image:
        assert image.size == (30, 20) and image.format == "PNG"
    (tmp_path / "script.png").write_text("#EXTM3U\nfile:///etc/passwd\n")
    (tmp_path / "page.svg").write_text("<svg/>")
    for path, most in ((tmp_path / "script.png", 1 << 20), (tmp_path / "page.svg", 1 << 20), (sent, 10)):
        with pytest.raises(DataError):
            keep_upload(path, tmp_path, max_bytes=most)
    assert [path.name for path in (tmp_path / "studio/uploads").iterdir()] == [Path(name).name]
