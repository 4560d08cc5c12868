"""Rules of sampling: samplers, sizes that the models can make, prompts of validation samples."""

from __future__ import annotations

from collections.abc import Iterator

from frameloom.config.loading.problems import Problem
from frameloom.config.loading.yaml_values import KeyPath
from frameloom.config.rules.data import frame_problem, token_patch
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.sampling import SamplesSection
from frameloom.diffusion.sampler_table import SAMPLERS
from frameloom.models.registry import DENOISERS, VAES


def check_sample(recipe: Recipe) -> Iterator[Problem]:
    """Only a denoiser samples, so an autoencoder's recipe may keep defaults that its VAE could not decode."""
    samples = recipe.validation.samples if recipe.validation else None
    if recipe.task != "denoiser":
        if samples is not None:
            text = f"validation.samples is set, but task is {recipe.task}; only a denoiser makes samples"
            yield Problem(("validation", "samples"), f"{text}; remove it", (("task",),))
        return
    known = SAMPLERS[recipe.objective.kind]
    if recipe.sample.sampler not in known:
        text = f"sample.sampler is {recipe.sample.sampler}, which a model with objective.kind {recipe.objective.kind}"
        path: KeyPath = ("sample", "sampler")
        yield Problem(path, f"{text} cannot be sampled with; choose {', '.join(known)}", (("objective", "kind"),))
    yield from _check_size(recipe, ("sample",), (recipe.sample.frames, recipe.sample.height, recipe.sample.width))
    if samples is not None:
        yield from _check_size(recipe, ("validation", "samples"), (samples.frames, samples.height, samples.width))
        yield from _check_samples(recipe, samples)


def _check_size(recipe: Recipe, section: KeyPath, size: tuple[int | None, int | None, int | None]) -> Iterator[Problem]:
    """Sizes that are null come from elsewhere and are checked there."""
    vae, family = VAES.get(recipe.vae.name), DENOISERS.get(recipe.model.family)
    if vae is None or family is None:
        return
    also: tuple[KeyPath, ...] = (("task",), ("vae", "name"), ("model", "family"))
    frames, *sides = size
    where = ".".join(section)
    if frames is not None and (advice := frame_problem(recipe, vae, frames)):
        yield Problem((*section, "frames"), f"{where}.frames is {frames}; {advice}", also)
    for axis, name, pixels in zip((1, 2), ("height", "width"), sides, strict=True):
        step = vae.strides[axis] * token_patch(recipe)[axis]
        if pixels is not None and pixels % step:
            below = pixels // step * step
            near = " or ".join(str(value) for value in (below, below + step) if value)
            text = (
                f"{where}.{name} is {pixels}; {recipe.model.family} with {recipe.vae.name} needs a multiple of {step}"
            )
            yield Problem((*section, name), f"{text}; write {near}", also)


def _check_samples(recipe: Recipe, samples: SamplesSection) -> Iterator[Problem]:
    section = ("validation", "samples")
    if not samples.prompts and samples.prompts_file is None:
        text = 'validation.samples has no prompts; write prompts: ["what to show"], or name a prompts_file'
        yield Problem((*section, "prompts"), text)
    for index, prompt in enumerate(samples.prompts):
        if not prompt.strip():
            yield Problem((*section, "prompts"), f"validation.samples.prompts.{index} is empty; say what to show")
    if not samples.images:
        return
    if recipe.known is None:
        text = "validation.samples.images is set, but this model is trained without known frames (known: null)"
        yield Problem((*section, "images"), f"{text}; remove the images, or train an inpaint model", (("known",),))
    if samples.prompts_file is not None:
        text = "validation.samples.images goes with prompts, one picture for each, but prompts_file is set too"
        yield Problem((*section, "prompts_file"), f"{text}; put its lines into prompts", ((*section, "images"),))
    elif len(samples.images) != len(samples.prompts):
        text = f"validation.samples has {len(samples.images)} images and {len(samples.prompts)} prompts"
        yield Problem((*section, "images"), f"{text}; give one picture for each prompt", ((*section, "prompts"),))
