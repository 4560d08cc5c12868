"""Rules that span several keys, checked before anything is loaded. Each yields every mistake that it finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from math import floor, log10
from pathlib import Path

from frameloom.config.facts import FAMILIES, TEXT_ENCODERS, VAES, VAEFacts
from frameloom.config.problems import Problem
from frameloom.config.schema import ObjectiveSection, Recipe
from frameloom.config.spelling import nearest, suggest
from frameloom.config.yaml_values import KeyPath, format_value
from frameloom.core.errors import ConfigError

MAX_LR = 0.1
MAX_TIMEOUT_S = 3600
RESOLUTION = re.compile(r"([1-9][0-9]*)(px|p)(_ar[0-9]+(\.[0-9]+)?:[0-9]+(\.[0-9]+)?|_max)?")

_FLOW_ONLY = ("law", "shift", "sigma_min")
_V_ONLY = ("betas", "zero_terminal_snr", "min_snr_gamma")


def _check_names(recipe: Recipe) -> Iterator[Problem]:
    model, vae = recipe.model, recipe.vae
    if model.family not in FAMILIES:
        yield _unknown(("model", "family"), model.family, FAMILIES, kind="families")
    elif model.size not in FAMILIES[model.family].sizes:
        sizes = FAMILIES[model.family].sizes
        yield _unknown(
            ("model", "size"), model.size, sizes, kind=f"sizes of {model.family}", also=(("model", "family"),)
        )
    if vae.name not in VAES:
        yield _unknown(("vae", "name"), vae.name, VAES, kind="autoencoders")
    elif vae.size not in VAES[vae.name].sizes:
        sizes = VAES[vae.name].sizes
        yield _unknown(("vae", "size"), vae.size, sizes, kind=f"sizes of {vae.name}", also=(("vae", "name"),))


def _unknown(path: KeyPath, name: str, known: Collection[str], *, kind: str, also: tuple[KeyPath, ...] = ()) -> Problem:
    return Problem(path, f"{'.'.join(path)} is '{name}', which does not exist; {suggest(name, known, kind=kind)}", also)


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list of numbers"}


def _check_overrides(recipe: Recipe) -> Iterator[Problem]:
    """Fields of an architecture, which are no keys of the recipe's own."""
    sections = (
        ("model", recipe.model.overrides, FAMILIES.get(recipe.model.family)),
        ("vae", recipe.vae.overrides, VAES.get(recipe.vae.name)),
    )
    for section, overrides, facts in sections:
        for name, value in overrides.items() if facts else ():
            path = (section, "overrides", name)
            assert facts is not None
            if name not in facts.fields:
                text = f"{section}.overrides has '{name}', which is no field of this architecture"
                yield Problem(path, f"{text}; {suggest(name, facts.fields, kind='fields')}")
            elif not _is_kind(value, facts.fields[name]):
                given = f"'{value}'" if isinstance(value, str) else format_value(value)
                text = f"{'.'.join(path)} is {given}; expected {_KINDS[facts.fields[name]]}"
                yield Problem(path, text)


def _is_kind(value: object, kind: type) -> bool:
    allowed = {float: (int, float), tuple: (list, tuple)}.get(kind, (kind,))
    return isinstance(value, allowed) and isinstance(value, bool) == (kind is bool)


def _check_text(recipe: Recipe) -> Iterator[Problem]:
    seen: dict[tuple[str, str | None], int] = {}
    for index, encoder in enumerate(recipe.text.encoders):
        path = ("text", "encoders", str(index))
        if encoder.name not in TEXT_ENCODERS:
            yield _unknown((*path, "name"), encoder.name, TEXT_ENCODERS, kind="text encoders")
        elif encoder.max_length > TEXT_ENCODERS[encoder.name].max_length:
            limit = TEXT_ENCODERS[encoder.name].max_length
            text = (
                f"text.encoders.{index}.max_length is {encoder.max_length}; {encoder.name} reads at most {limit} tokens"
            )
            yield Problem((*path, "max_length"), f"{text}; write {limit} or less")
        first = seen.setdefault((encoder.name, encoder.path), index)
        if first != index:
            yield Problem(
                path, f"text.encoders.{index} is the same encoder as text.encoders.{first}; remove one of them"
            )


def _check_buckets(recipe: Recipe) -> Iterator[Problem]:
    facts, family = VAES.get(recipe.vae.name), FAMILIES.get(recipe.model.family)
    for name, cells in recipe.data.buckets.items():
        path = ("data", "buckets", name)
        match = RESOLUTION.fullmatch(name)
        if match is None:
            text = (
                f"data.buckets has the resolution '{name}'; expected a number with px (256px: area of 256 x 256) or p"
            )
            yield Problem(path, f"{text} (720p: 16:9 of that height), and _ar16:9 or _max behind it if wanted")
        elif facts and family and int(match[1]) < (smallest := facts.strides[1] * family.patch[1]):
            text = f"data.buckets has the resolution '{name}', smaller than one token of {recipe.model.family}"
            yield Problem(path, f"{text}; use {smallest}px or more", (("model", "family"), ("vae", "name")))
        for frames in cells:
            if facts and not facts.accepts_frames(frames):
                text = (
                    f"data.buckets.{name} has clips of {frames} frames; {_frame_advice(recipe.vae.name, facts, frames)}"
                )
                yield Problem((*path, str(frames)), text, (("vae", "name"),))
    chances = [cell[0] for cells in recipe.data.buckets.values() for cell in cells.values()]
    if not any(max(chance) if isinstance(chance, tuple) else chance for chance in chances):
        yield Problem(("data", "buckets"), "data.buckets has only probabilities of 0, so no clip is kept; use 1.0")


def _frame_advice(name: str, facts: VAEFacts, frames: int) -> str:
    span = range(max(1, frames - facts.strides[0]), frames + facts.strides[0] + 1)
    near = [str(count) for count in span if facts.accepts_frames(count)]
    return f"{name} takes {facts.frame_rule}; write {' or '.join(near)}"


def _check_sample(recipe: Recipe) -> Iterator[Problem]:
    """Only a denoiser samples, so an autoencoder's recipe may keep defaults that its VAE could not decode."""
    facts, family = VAES.get(recipe.vae.name), FAMILIES.get(recipe.model.family)
    if recipe.task != "denoiser" or facts is None or family is None:
        return
    also: tuple[KeyPath, ...] = (("task",), ("vae", "name"), ("model", "family"))
    if not facts.accepts_frames(recipe.sample.frames):
        advice = _frame_advice(recipe.vae.name, facts, recipe.sample.frames)
        yield Problem(("sample", "frames"), f"sample.frames is {recipe.sample.frames}; {advice}", also)
    for axis, name in ((1, "height"), (2, "width")):
        pixels: int = getattr(recipe.sample, name)
        step = facts.strides[axis] * family.patch[axis]
        if pixels % step:
            below = pixels // step * step
            near = " or ".join(str(size) for size in (below, below + step) if size)
            text = f"sample.{name} is {pixels}; {recipe.model.family} with {recipe.vae.name} needs a multiple of {step}"
            yield Problem(("sample", name), f"{text}; write {near}", also)


def _check_steps(recipe: Recipe) -> Iterator[Problem]:
    schedule, steps = recipe.optim.schedule, recipe.train.steps
    if schedule.warmup_steps >= steps:
        text = f"optim.schedule.warmup_steps is {schedule.warmup_steps}, but the run has only train.steps {steps}"
        advice = "make it shorter than the run"
        yield Problem(("optim", "schedule", "warmup_steps"), f"{text}; {advice}", (("train", "steps"),))
    if schedule.name == "constant" and schedule.min_share:
        text = f"optim.schedule.min_share is {format_value(schedule.min_share)}, but a constant schedule does not fall"
        path = ("optim", "schedule", "min_share")
        yield Problem(path, f"{text}; remove it, or choose cosine or linear", (("optim", "schedule", "name"),))


def _check_units(recipe: Recipe) -> Iterator[Problem]:
    if (lr := recipe.optim.lr) > MAX_LR:
        exponent = floor(log10(lr))
        flipped = lr / 10 ** (2 * exponent) if exponent >= 3 else 1e-5
        text = f"optim.lr is {format_value(lr)}; nothing trains above {MAX_LR}, usual rates are 1e-6 to 1e-3"
        yield Problem(("optim", "lr"), f"{text}; did you mean {format_value(float(f'{flipped:.3g}'))}?")
    if (timeout_s := recipe.data.timeout_s) > MAX_TIMEOUT_S:
        text = f"data.timeout_s is {format_value(timeout_s)}, more than an hour; it is in seconds"
        yield Problem(("data", "timeout_s"), f"{text}; did you mean {format_value(timeout_s / 1000)}?")


def _check_cache(recipe: Recipe) -> Iterator[Problem]:
    """A cached latent is encoded once, so nothing random may come before the encoder."""
    data = recipe.data
    if recipe.task == "autoencoder":
        for name in ("latents", "text"):
            if getattr(data.cache, name) is not None:
                text = f"data.cache.{name} is set, but task autoencoder trains on the pixels themselves; remove it"
                yield Problem(("data", "cache", name), text, (("task",),))
        return
    if data.cache.latents is None:
        return
    also: tuple[KeyPath, ...] = (("data", "cache", "latents"),)
    if data.frame_start == "random":
        text = "data.frame_start is random, which the latent cache data.cache.latents cannot honour"
        yield Problem(("data", "frame_start"), f"{text}; use first or center, or encode while training", also)
    if data.flip > 0:
        text = f"data.flip is {format_value(data.flip)}, which the latent cache data.cache.latents cannot honour"
        yield Problem(("data", "flip"), f"{text}; use 0, or encode while training", also)


def _check_vae_weights(recipe: Recipe) -> Iterator[Problem]:
    if recipe.task == "denoiser" and recipe.vae.weights is None:
        text = "vae.weights is null, but task denoiser needs a trained autoencoder to encode and to sample with"
        yield Problem(
            ("vae", "weights"), f"{text}; name its file or folder, or train one with task: autoencoder", (("task",),)
        )


def _check_objective(recipe: Recipe) -> Iterator[Problem]:
    kind = recipe.objective.kind
    names, other = (_V_ONLY, "v") if kind == "flow" else (_FLOW_ONLY, "flow")
    for name in names:
        value = getattr(recipe.objective, name)
        if value != ObjectiveSection.model_fields[name].default:
            text = (
                f"objective.{name} is {format_value(value)}, which only kind {other} uses, but objective.kind is {kind}"
            )
            yield Problem(("objective", name), f"{text}; remove it or set kind: {other}", (("objective", "kind"),))


def _check_validation(recipe: Recipe) -> Iterator[Problem]:
    """Rows are kept apart only by a column that both selections name with different values."""
    if recipe.validation is None:
        return
    held_out, trained = recipe.validation.where, recipe.data.where
    if not any(column in trained and trained[column] != value for column, value in held_out.items()):
        text = f"validation.where is {format_value(held_out)} and data.where is {format_value(trained)}"
        advice = "keep them apart, e.g. data.where: {split: train} and validation.where: {split: val}"
        path = ("validation", "where")
        yield Problem(path, f"{text}, so validation clips would be trained on; {advice}", (("data", "where"),))


RULES: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    _check_names,
    _check_overrides,
    _check_text,
    _check_buckets,
    _check_sample,
    _check_steps,
    _check_units,
    _check_cache,
    _check_vae_weights,
    _check_objective,
    _check_validation,
)


def check_rules(recipe: Recipe) -> list[Problem]:
    """Everything that is wrong between the keys of a recipe whose types are right."""
    return [problem for rule in RULES for problem in rule(recipe)]


def check_files(recipe: Recipe, *, skip_caches: bool = False, places: Mapping[KeyPath, str] | None = None) -> None:
    """Refuse a recipe whose files are not there; `skip_caches` for the step that makes the caches.

    `places` puts the file and line of each key into the message.
    """
    problems = [_check_path(("data", "manifest"), recipe.data.manifest, "file")]
    problems.append(_check_path(("data", "root"), recipe.data.root, "folder"))
    problems.append(_check_path(("vae", "weights"), recipe.vae.weights, "file or folder"))
    if recipe.task == "denoiser":
        problems.append(_check_path(("model", "weights"), recipe.model.weights, "file or folder"))
        for index, encoder in enumerate(recipe.text.encoders):
            problems.append(_check_path(("text", "encoders", str(index), "path"), encoder.path, "folder"))
    if recipe.task == "denoiser" and not skip_caches:
        problems.append(_check_path(("data", "cache", "latents"), recipe.data.cache.latents, "folder"))
        problems.append(_check_path(("data", "cache", "text"), recipe.data.cache.text, "folder"))
    found = [problem for problem in problems if problem]
    if found:
        raise ConfigError([place_problem(problem, places or {}, "recipe") for problem in found])


def _check_path(path: KeyPath, name: str | None, expected: str) -> Problem | None:
    if name is None:
        return None
    place = Path(name)
    is_right = {"file": place.is_file, "folder": place.is_dir, "file or folder": place.exists}[expected]
    if is_right():
        return None
    dotted = ".".join(path)
    if place.exists():
        return Problem(path, f"{dotted} is '{name}', which is not a {expected}; name a {expected}")
    siblings = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
    near = nearest(place.name, siblings)
    hint = f"did you mean '{place.parent / near}'?" if near else f"relative paths start from {Path.cwd()}"
    return Problem(path, f"{dotted} is '{name}', which does not exist; expected a {expected}; {hint}")


def place_problem(problem: Problem, places: Mapping[KeyPath, str], name: str) -> str:
    """The message with its place in front: the file and line of the key, or of the nearest section around it."""
    for length in range(len(problem.path), 0, -1):
        if problem.path[:length] in places:
            return f"{places[problem.path[:length]]}: {problem.text}"
    return f"{name}: {problem.text}"
