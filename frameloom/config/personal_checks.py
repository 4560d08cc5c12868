"""Rules of textual inversion and DreamBooth."""

from __future__ import annotations

from collections.abc import Iterator

from frameloom.config.problems import Problem
from frameloom.config.schema import Recipe
from frameloom.config.yaml_values import KeyPath

_FAMILY = "sdxl"
_ENCODERS = ("clip_l", "clip_bigg")


def check_personal(recipe: Recipe) -> Iterator[Problem]:
    for name in ("inversion", "dreambooth"):
        if getattr(recipe, name) is None:
            continue
        if recipe.task != "denoiser" or recipe.model.family != _FAMILY:
            text = f"{name} is set, but it needs task denoiser and model.family {_FAMILY}"
            yield Problem((name,), f"{text}, not {recipe.task} and {recipe.model.family}; remove it", (("task",),))
    if recipe.inversion is not None:
        yield from _check_inversion(recipe)
    if recipe.dreambooth is not None:
        yield from _check_dreambooth(recipe)


def _check_inversion(recipe: Recipe) -> Iterator[Problem]:
    assert recipe.inversion is not None
    for name in ("lora", "dreambooth"):
        if getattr(recipe, name) is not None:
            text = f"inversion and {name} are both set, but inversion trains the vectors of a word and nothing else"
            yield Problem((name,), f"{text}; remove one of them", (("inversion",),))
    if any(encoder.name not in _ENCODERS for encoder in recipe.text.encoders):
        found = ", ".join(encoder.name for encoder in recipe.text.encoders)
        text = f"inversion is set, but text.encoders has {found}"
        yield Problem(("text", "encoders"), f"{text}; only {' and '.join(_ENCODERS)} learn words", (("inversion",),))
    if recipe.data.cache.text is not None or recipe.data.cache.foreign is not None:
        text = "inversion is set, but cached text states know nothing of a word that is still being learnt"
        key = "text" if recipe.data.cache.text is not None else "foreign"
        yield Problem(("data", "cache", key), f"{text}; remove data.cache.{key}", (("inversion",),))
    if recipe.text.rescale:
        text = "text.rescale is true, but with inversion the scale of the captions changes while training"
        yield Problem(("text", "rescale"), f"{text}; set it to false", (("inversion",),))
    if recipe.inversion.template_file is not None and recipe.inversion.templates != "object":
        text = f"inversion.template_file is set, and inversion.templates is {recipe.inversion.templates} too"
        yield Problem(("inversion", "templates"), f"{text}; remove one of them", (("inversion", "template_file"),))


def _check_dreambooth(recipe: Recipe) -> Iterator[Problem]:
    section = recipe.dreambooth
    assert section is not None
    path: KeyPath = ("dreambooth",)
    if not section.instance_prompt.strip():
        text = "dreambooth.instance_prompt is empty; say what the pictures show, e.g. a photo of sks dog"
        yield Problem((*path, "instance_prompt"), text)
    if (section.class_prompt is None) != (section.class_folder is None):
        missing = "class_prompt" if section.class_prompt is None else "class_folder"
        text = f"dreambooth.{missing} is null, but pictures of others of its kind need a prompt and a folder"
        yield Problem((*path, missing), f"{text}; set both, or none to train without them")
    if recipe.data.cache.latents is not None or recipe.data.cache.text is not None or recipe.data.cache.foreign:
        key = next(name for name in ("latents", "text", "foreign") if getattr(recipe.data.cache, name))
        text = f"dreambooth is set, but its pairs of pictures are drawn while training; remove data.cache.{key}"
        yield Problem(("data", "cache", key), text, (path,))
    if recipe.sample.frames != 1:
        text = f"sample.frames is {recipe.sample.frames}, but {_FAMILY} makes pictures; write 1"
        yield Problem(("sample", "frames"), text, (path,))
