"""Rules about control models: what they need of the data can be seen before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from frameloom.config.problems import Problem
from frameloom.config.schema import Recipe
from frameloom.config.yaml_values import KeyPath
from frameloom.models.registry import DENOISERS
from frameloom.models.spec import DenoiserSpec


def check_control(recipe: Recipe) -> Iterator[Problem]:
    """A control model and `data.control` belong together, and pixels are needed to take control clips from."""
    family, path = DENOISERS.get(recipe.model.family), ("data", "control")
    if family is None:
        return
    also: tuple[KeyPath, ...] = (("model", "size"), ("model", "family"), ("task",))
    if recipe.data.control:
        if recipe.task != "denoiser":
            text = f"data.control is true, but task {recipe.task} has no use for control clips"
            yield Problem(path, f"{text}; remove it", also)
        elif "control" not in family.conditions:
            text = f"data.control is true, but {recipe.model.family} has no control models"
            yield Problem(path, f"{text}; remove it, or choose cogvideox_fun", also)
        yield from _check_others(recipe)
    elif recipe.task == "denoiser" and "control" in family.conditions and _is_control(family, recipe):
        text = f"data.control is false, but {recipe.model.family} {recipe.model.size} is a control model"
        yield Problem(path, f"{text}; set it to true, and name a control clip for each row (column control)", also)


def _check_others(recipe: Recipe) -> Iterator[Problem]:
    if recipe.data.cache.latents is not None or recipe.data.cache.foreign in ("sdxl", "open_sora2"):
        text = "data.control is true, but a latent cache holds no control clips"
        yield Problem(("data", "cache", "latents"), f"{text}; remove the latent cache", (("data", "control"),))
    if recipe.validation is not None and recipe.validation.samples is not None:
        text = "validation.samples is set, but a control model needs a control clip for each sample"
        advice = "remove it, and sample with `frameloom sample --control FILE`"
        yield Problem(("validation", "samples"), f"{text}; {advice}", (("data", "control"),))


def _is_control(family: DenoiserSpec, recipe: Recipe) -> bool:
    return family.beside(family.preview(recipe.model.size, recipe.model.overrides)) == "control"
