"""Rules of sampling and of the objective: sizes that the models can make, samplers, noise levels."""

from __future__ import annotations

from collections.abc import Iterator

from frameloom.config.loading.problems import Problem
from frameloom.config.loading.yaml_values import KeyPath, format_value
from frameloom.config.rules.buckets import frame_problem, token_patch
from frameloom.config.schema.objective import BiasSection, ObjectiveSection, beta_range
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


def check_note(recipe: Recipe) -> Iterator[Problem]:
    note = recipe.text.note
    if note is not None and not note.fps and note.motion is None:
        text = "text.note has fps: false and motion: null, so it would say nothing; set one of them, or note: null"
        yield Problem(("text", "note"), text)


_FLOW, _DDPM, _EDM = ("flow",), ("v", "epsilon", "sample"), ("edm",)
# The kinds that read a key; keys that are not here are read by all.
_READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("law", "logit_mean", "logit_std", "mode_scale", "num_levels", "sigma_min", "weighting"), _FLOW),
    **dict.fromkeys(("shift", "shift_patch", "sampling_shift_patch", "shift_tokens"), _FLOW),
    **dict.fromkeys(("betas", "beta_start", "beta_end", "zero_terminal_snr", "snr_shift", "spacing"), _DDPM),
    **dict.fromkeys(("bias", "levels"), _DDPM),
    "min_snr_gamma": (*_DDPM, *_EDM),
    "edm": _EDM,
}
# Keys that only one value of another key of the same kind reads.
_NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "logit_mean": ("law", ("logit_normal",)),
    "logit_std": ("law", ("logit_normal",)),
    "mode_scale": ("law", ("mode",)),
    "shift_tokens": ("shift", ("sd3",)),
    "shift_patch": ("shift", ("open_sora2", "sd3")),
    "sampling_shift_patch": ("shift", ("open_sora2", "sd3")),
}
_SECTION = "objective"


def check_objective(recipe: Recipe) -> Iterator[Problem]:
    section = recipe.objective
    yield from _check_unread(section)
    yield from _check_ddpm(section)
    yield from _check_bias(section)
    if section.noise_offset_per != "channel" and not section.noise_offset:
        text = f"objective.noise_offset_per is {section.noise_offset_per}, but objective.noise_offset is 0"
        yield _problem("noise_offset_per", f"{text}; set noise_offset, or remove it", "noise_offset")
    yield from _check_edm(recipe)


def _problem(name: str, text: str, *also: str) -> Problem:
    return Problem((_SECTION, *name.split(".")), text, tuple((_SECTION, other) for other in also))


def _check_unread(section: ObjectiveSection) -> Iterator[Problem]:
    """A key that nothing reads is a mistake, unless it has its default."""
    kind = section.kind
    for name, field in ObjectiveSection.model_fields.items():
        value = getattr(section, name)
        if value == field.default:
            continue
        kinds = _READ_BY.get(name)
        if kinds is not None and kind not in kinds:
            shown = "set" if name in ("bias", "edm") else format_value(value)
            text = f"objective.{name} is {shown}, which only kind {_either(kinds)} uses, but objective.kind is {kind}"
            yield _problem(name, f"{text}; remove it or set kind: {kinds[0]}", "kind")
        elif name in _NEEDS:
            key, values = _NEEDS[name]
            found = getattr(section, key)
            if found not in values:
                text = f"objective.{name} is {format_value(value)}, which only {key} {_either(values)} uses"
                text = f"{text}, but objective.{key} is {format_value(found)}"
                yield _problem(name, f"{text}; remove it or set {key}: {values[0]}", key)


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _check_ddpm(section: ObjectiveSection) -> Iterator[Problem]:
    if section.kind == "epsilon" and section.zero_terminal_snr:
        text = "objective.zero_terminal_snr is true, but at its last noise level epsilon says nothing of the picture"
        yield _problem("zero_terminal_snr", f"{text}; remove it, or set kind: v", "kind")
    is_zero = section.kind == "v" if section.zero_terminal_snr is None else section.zero_terminal_snr
    if section.kind in _DDPM and is_zero and section.spacing == "leading":
        text = "objective.spacing is leading, which never visits the last noise level, but with zero_terminal_snr"
        yield _problem("spacing", f"{text} sampling must begin there; write trailing", "zero_terminal_snr", "kind")
    start, end = beta_range(section)
    if section.kind in _DDPM and start >= end:
        text = f"objective.beta_start is {format_value(start)} and objective.beta_end {format_value(end)}"
        name = "beta_start" if section.beta_start is not None else "beta_end"
        yield _problem(name, f"{text}; noise grows, so give a smaller start", "betas")


def _check_bias(section: ObjectiveSection) -> Iterator[Problem]:
    levels, bias = section.levels, section.bias
    if levels is not None and levels[0] >= levels[1]:
        text = f"objective.levels is {format_value(list(levels))}, which is no level at all"
        yield _problem("levels", f"{text}; write the first level and the one after the last, e.g. [200, 500]")
    if bias is None:
        return
    if bias.strategy == "range" and bias.begin >= bias.end:
        text = f"objective.bias.begin is {bias.begin} and end is {bias.end}, which is no level at all"
        yield _problem("bias.begin", f"{text}; give a larger end")
    unread = {"range": ("portion",), "earlier": ("begin", "end"), "later": ("begin", "end")}
    for name in unread.get(bias.strategy, ("multiplier", "begin", "end", "portion")):
        value = getattr(bias, name)
        if value != BiasSection.model_fields[name].default:
            text = f"objective.bias.{name} is {format_value(value)}, which strategy {bias.strategy} does not use"
            yield _problem(f"bias.{name}", f"{text}; remove it, or choose another strategy")


def _check_edm(recipe: Recipe) -> Iterator[Problem]:
    section, family = recipe.objective, DENOISERS.get(recipe.model.family)
    if section.kind != "edm":
        return
    if section.edm.sigma_min >= section.edm.sigma_max:
        text = f"objective.edm.sigma_min is {format_value(section.edm.sigma_min)}"
        text = f"{text} and sigma_max {format_value(section.edm.sigma_max)}"
        yield _problem("edm.sigma_min", f"{text}; sampling goes from sigma_max down, so give a smaller sigma_min")
    if family is not None and "log_sigma" not in family.conditions:
        text = f"objective.kind is edm, but {recipe.model.family} is told a whole index and cannot be told ln(sigma)"
        also = (("model", "family"),)
        yield Problem((_SECTION, "kind"), f"{text}; choose flow, v or epsilon", also)
