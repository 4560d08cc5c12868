"""Requests are checked before a model is opened, and refused as `frameloom sample` would refuse it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError, DataError
from frameloom.studio.generate.controller import GenerateController, form_values
from frameloom.studio.generate.models import StudioModel, find_models, makes_clips, takes_image
from frameloom.studio.generate.requests import (
    OWN_SIZE,
    check_values,
    format_command,
    keep_upload,
    read_form,
)
from frameloom.studio.server.context import Limits, Listing, StudioContext
from tests.studio.tiny_run import PROMPT, RUN, make_root


@pytest.fixture
def model(shared_world) -> StudioModel:
    return find_models(make_root(shared_world).resolve())[RUN]


def refuse(model: StudioModel, **values: object) -> str:
    with pytest.raises(ConfigError) as refusal:
        check_values({"prompt": PROMPT, **values}, model, Limits())
    return str(refusal.value)


def test_a_run_with_a_checkpoint_is_a_model_and_an_empty_folder_has_none(model, tmp_path):
    assert (model.settings.steps, model.makes_clips, model.takes_image) == (3, True, False)
    assert "heun" in model.samplers and "ddim" not in model.samplers
    assert find_models(tmp_path) == {}


def test_an_exported_folder_with_its_recipe_is_a_model(shared_world, tmp_path):
    source = make_root(shared_world) / RUN
    folder = tmp_path / "taken" / "model"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((source / "export" / name).read_bytes())
    assert find_models(tmp_path) == {}
    (folder / "recipe.yaml").write_text((source / "recipe.yaml").read_text())
    ((name, found),) = find_models(tmp_path).items()
    assert (name, found.is_run) == ("taken/model", False)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"prompt": "x" * 10_000_000}, "Prompt: has 10,000,000 characters; at most 4,000"),
        ({"prompt": "  "}, "Prompt: is empty"),
        ({"negative_prompt": "x" * 5_000}, "Negative prompt: has 5,000 characters"),
        ({"frames": 10**6}, "Frames: 1,000,000 is out of range; choose 1 to 1,025"),
        ({"frames": 8}, "frames is 8"),
        ({"frames": 1025, "height": 1024, "width": 2048}, "too much for one request"),
        ({"height": 65, "width": 64}, "multiple of"),
        ({"height": 10**9, "width": 64}, "Height:"),
        ({"steps": 0}, "Steps: 0 is out of range"),
        ({"guidance": float("nan")}, "Guidance:"),
        ({"seed": -1}, "Seed: choose a whole number"),
        ({"num": 1000}, "Samples:"),
        ({"ratio": "wide"}, "Ratio: 'wide'; write 16:9"),
        ({"image": "studio/uploads/x.png"}, "Image: this model takes text alone"),
        ({"sampler": "ddim"}, "sample.sampler is ddim"),
    ],
)
def test_what_a_model_cannot_make_is_refused_in_words(model, values, told):
    assert told in refuse(model, **values)


def test_all_problems_are_told_together(model):
    told = refuse(model, prompt="", frames=10**6, steps=10**6)
    assert all(word in told for word in ("Prompt", "Frames", "Steps"))


def test_a_form_says_what_differs_from_the_model_in_the_words_of_the_command(model):
    same = {"prompt": PROMPT, "steps": 3, "guidance": 2.0, "sampler": "default", "frames": 9, "height": 64, "width": 64}
    assert read_form({**same, "fps": 8.0, "ratio": OWN_SIZE}, model) == {"prompt": PROMPT}
    changed = {**same, "prompt": "a 'b'", "seed": 4, "steps": 5, "width": 128, "negative_prompt": "c"}
    request = check_values(read_form(changed, model), model, Limits())
    command = format_command(RUN, request, 2)
    for words in ("--size 128x64", "--seed 4", "'a '\"'\"'b'", "--steps 5", "--negative c", "--num 2"):
        assert words in command
    assert "--guidance" not in command and "--frames" not in command


def test_a_form_becomes_a_request_and_back(shared_world, tmp_path, model):
    controller = GenerateController(StudioContext(make_root(shared_world).resolve(), tmp_path))
    form: dict[str, Any] = {"prompt": "a\x1b[31m b\x00", "negative_prompt": "", "seed": 7.0, "num": 2, "steps": 5}
    form |= {"guidance": 2, "sampler": "heun", "frames": 5, "width": 64, "height": 64, "ratio": OWN_SIZE, "fps": 8}
    request, num = controller.read_form(RUN, {**form, "format": "gif", "image": None, "last_image": None})
    wanted = {"prompt": "a[31m b", "seed": 7, "steps": 5, "sampler": "heun", "frames": 5, "format": "gif"}
    assert num == 2 and request.model_dump(exclude_unset=True) == wanted
    values = form_values(request, model)
    assert (values["steps"], values["width"], values["guidance"], values["ratio"]) == (5, 64, 2.0, OWN_SIZE)
    for name in (None, "runs/none", "../x"):
        with pytest.raises(ConfigError, match="choose one from the list"):
            controller.submit(name, form)
    controller.models = Listing(lambda: {RUN: replace(model, takes_image=True)})
    with pytest.raises(DataError, match="Image: send it once more"):
        controller.read_form(RUN, {**form, "image": "/etc/passwd"})
    assert read_form({"prompt": "a\nb\tc\r"}, model)["prompt"] == "a\nb\tc"


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
