"""Checks of a recipe before anything is loaded: the list of rules between its keys, and the files that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from frameloom.config.loading.problems import Problem
from frameloom.config.loading.yaml_values import KeyPath
from frameloom.config.rules.data import check_buckets, check_cache, check_sources, check_validation
from frameloom.config.rules.models import (
    TOKENIZER_FOLDERS,
    check_conditions,
    check_names,
    check_overrides,
    check_sampling,
    check_text,
    check_text_files,
    check_trained_text,
)
from frameloom.config.rules.parallel import check_parallel
from frameloom.config.rules.table import check_table
from frameloom.config.rules.training import (
    check_objective,
    check_optim,
    check_scaled_rate,
    check_schedule,
    check_train,
)
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError
from frameloom.core.spelling import nearest

PICKLES = (".pt", ".pth", ".ckpt", ".bin")

RULES: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    *(check_names, check_overrides, check_text, check_trained_text, check_conditions, check_sampling),
    *(check_sources, check_buckets, check_cache, check_validation),
    *(check_table, check_optim, check_schedule, check_scaled_rate, check_train, check_objective, check_parallel),
)


def check_rules(recipe: Recipe) -> list[Problem]:
    """Everything that is wrong between the keys of a recipe whose types are right."""
    return [problem for rule in RULES for problem in rule(recipe)]


def check_files(recipe: Recipe, *, skip_caches: bool = False, places: Mapping[KeyPath, str] | None = None) -> None:
    """Refuse a recipe whose files are not there; `skip_caches` for the step that makes the caches.

    `places` puts the file and line of each key into the message.
    """
    problems = [_check_path(("data", "manifest"), recipe.data.manifest, _source_kind(recipe.data.manifest))]
    for index, source in enumerate(recipe.data.sources):
        path = ("data", "sources", str(index))
        problems.append(_check_path((*path, "path"), source.path, _source_kind(source.path)))
        problems.append(_check_path((*path, "root"), source.root, "folder"))
    problems.append(_check_path(("data", "root"), recipe.data.root, "folder"))
    problems.append(_check_weights(("vae", "weights"), recipe.vae.weights))
    if recipe.task == "autoencoder":
        problems += _check_loss_files(recipe)
    if recipe.task == "denoiser":
        problems.append(_check_weights(("model", "weights"), recipe.model.weights))
        lora = recipe.lora.weights if recipe.lora else None
        problems.append(_check_path(("lora", "weights"), lora, "file or folder"))
        for index, encoder in enumerate(recipe.text.encoders):
            place = ("text", "encoders", str(index))
            kind = "file or folder" if encoder.name in TOKENIZER_FOLDERS else "folder"
            problems.append(_check_path((*place, "path"), encoder.path, kind))
            problems.append(_check_path((*place, "tokenizer"), encoder.tokenizer, "folder"))
        problems += check_text_files(recipe)
        problems += _check_sample_files(recipe)
        pictures = recipe.dreambooth.class_folder if recipe.dreambooth else None
        if pictures is not None and Path(pictures).exists():
            problems.append(_check_path(("dreambooth", "class_folder"), pictures, "folder"))
        if recipe.inversion is not None:
            problems.append(_check_path(("inversion", "weights"), recipe.inversion.weights, "file or folder"))
            problems.append(_check_path(("inversion", "template_file"), recipe.inversion.template_file, "file"))
    if recipe.task == "denoiser":
        for index, folder in enumerate(recipe.data.cache.external_folders):
            problems.append(_check_path(("data", "cache", "external_folders", str(index)), folder, "folder"))
    if recipe.task == "denoiser" and not skip_caches and not recipe.data.cache.on_demand:
        for name in ("latents", "text"):
            folder = getattr(recipe.data.cache, name)
            problems.append(_check_path(("data", "cache", name), folder, "folder", made_by="frameloom data cache"))
    found = [problem for problem in problems if problem]
    if found:
        raise ConfigError([place_problem(problem, places or {}, "recipe") for problem in found])


def _check_loss_files(recipe: Recipe) -> list[Problem | None]:
    """Weights of the networks that only train or judge an autoencoder."""
    lpips, judge = recipe.autoencoder.lpips, recipe.autoencoder.discriminator
    named: list[tuple[KeyPath, str | None]] = [(("discriminator", "weights"), judge.weights if judge else None)]
    if lpips is not None:
        named += [(("lpips", "weights"), lpips.weights), (("lpips", "heads"), lpips.heads)]
    return [_check_path(("autoencoder", *path), name, "file or folder") for path, name in named]


def _check_sample_files(recipe: Recipe) -> list[Problem | None]:
    samples = recipe.validation.samples if recipe.validation else None
    if samples is None:
        return []
    section = ("validation", "samples")
    pictures = [_check_path((*section, "images", str(i)), name, "file") for i, name in enumerate(samples.images)]
    return [_check_path((*section, "prompts_file"), samples.prompts_file, "file"), *pictures]


def _check_weights(path: KeyPath, name: str | None) -> Problem | None:
    if name is None or Path(name).suffix not in PICKLES or not Path(name).is_file():
        return _check_path(path, name, "file or folder")
    text = f"{'.'.join(path)} is '{name}', a pickle by its name, which can run code when opened"
    return Problem(path, f"{text}; convert it first: frameloom convert {name} {Path(name).with_suffix('.safetensors')}")


def _source_kind(name: str | None) -> str:
    """A name with an ending that is not there was meant to be a file."""
    return "file" if name and Path(name).suffix and not Path(name).exists() else "file or folder"


def _check_path(path: KeyPath, name: str | None, expected: str, *, made_by: str | None = None) -> Problem | None:
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
    if made_by and not near:
        hint = f"make it with: {made_by} RECIPE"
    return Problem(path, f"{dotted} is '{name}', which does not exist; expected a {expected}; {hint}")


def place_problem(problem: Problem, places: Mapping[KeyPath, str], name: str) -> str:
    """The message with its place in front: the file and line of the key, or of the nearest section around it."""
    for length in range(len(problem.path), 0, -1):
        if problem.path[:length] in places:
            return f"{places[problem.path[:length]]}: {problem.text}"
    return f"{name}: {problem.text}"
