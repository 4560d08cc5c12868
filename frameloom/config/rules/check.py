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
    check_subject,
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
    *(check_names, check_overrides, check_text, check_subject, check_trained_text, check_conditions, check_sampling),
    *(check_sources, check_buckets, check_cache, check_validation),
    *(check_table, check_optim, check_schedule, check_scaled_rate, check_train, check_objective, check_parallel),
)


def check_rules(recipe: Recipe) -> list[Problem]:
    """Everything that is wrong between the keys of a recipe whose types are right."""
    return [problem for rule in RULES for problem in rule(recipe)]


def check_files(recipe: Recipe, *, skip_caches: bool = False, locations: Mapping[KeyPath, str] | None = None) -> None:
    """Refuse a recipe whose files are not there; `skip_caches` for the step that makes the caches.

    `locations` puts the file and line of each key into the message.
    """
    named = [(tuple(key.split(".")), name, kind) for key, name, kind in _named_files(recipe, skip_caches)]
    problems = [_check_path(path, name, kind) for path, name, kind in named if name is not None]
    if recipe.task == "denoiser":
        problems += check_text_files(recipe)
    if found := [format_problem(problem, locations or {}, "recipe") for problem in problems if problem]:
        raise ConfigError(found)


def _named_files(recipe: Recipe, skip_caches: bool) -> Iterator[tuple[str, str | None, str]]:
    """(key, the path that it names, what must be there)"""
    data, text, either = recipe.data, recipe.text, "file or folder"
    yield "data.manifest", data.manifest, "source"
    for index, source in enumerate(data.sources):
        yield f"data.sources.{index}.path", source.path, "source"
        yield f"data.sources.{index}.root", source.root, "folder"
    yield "data.root", data.root, "folder"
    yield "vae.weights", recipe.vae.weights, "weights"
    if recipe.task == "autoencoder":
        judge, lpips = recipe.autoencoder.discriminator, recipe.autoencoder.lpips
        yield "autoencoder.discriminator.weights", judge.weights if judge else None, either
        yield "autoencoder.lpips.weights", lpips.weights if lpips else None, either
        yield "autoencoder.lpips.heads", lpips.heads if lpips else None, either
        return
    yield "model.weights", recipe.model.weights, "weights"
    yield "lora.weights", recipe.lora.weights if recipe.lora else None, either
    for index, encoder in enumerate(text.encoders):
        yield f"text.encoders.{index}.path", encoder.path, either if encoder.name in TOKENIZER_FOLDERS else "folder"
        yield f"text.encoders.{index}.tokenizer", encoder.tokenizer, "folder"
    if recipe.validation is not None and (samples := recipe.validation.samples) is not None:
        yield "validation.samples.prompts_file", samples.prompts_file, "file"
        yield from ((f"validation.samples.images.{i}", name, "file") for i, name in enumerate(samples.images))
    pictures = recipe.dreambooth.class_folder if recipe.dreambooth else None
    if pictures is not None and Path(pictures).exists():
        yield "dreambooth.class_folder", pictures, "folder"
    if recipe.inversion is not None:
        yield "inversion.weights", recipe.inversion.weights, either
        yield "inversion.template_file", recipe.inversion.template_file, "file"
    yield from (
        (f"data.cache.external_folders.{i}", name, "folder") for i, name in enumerate(data.cache.external_folders)
    )
    if not skip_caches and not data.cache.on_demand:
        yield "data.cache.latents", data.cache.latents, "cache"
        yield "data.cache.text", data.cache.text, "cache"


def _check_path(path: KeyPath, name: str, kind: str) -> Problem | None:
    found, dotted = Path(name), ".".join(path)
    if kind == "weights" and found.suffix in PICKLES and found.is_file():
        text = f"{dotted} is '{name}', a pickle by its name, which can run code when opened"
        return Problem(path, f"{text}; convert it first: frameloom convert {name} {found.with_suffix('.safetensors')}")
    if kind == "source":  # a name with an ending that is not there was meant to be a file
        expected = "file" if found.suffix and not found.exists() else "file or folder"
    else:
        expected = {"weights": "file or folder", "cache": "folder"}.get(kind, kind)
    if {"file": found.is_file, "folder": found.is_dir, "file or folder": found.exists}[expected]():
        return None
    if found.exists():
        return Problem(path, f"{dotted} is '{name}', which is not a {expected}; name a {expected}")
    siblings = [entry.name for entry in found.parent.iterdir()] if found.parent.is_dir() else []
    near = nearest(found.name, siblings)
    if near:
        hint = f"did you mean '{found.parent / near}'?"
    else:
        made = "make it with: frameloom data cache RECIPE"
        hint = made if kind == "cache" else f"relative paths start from {Path.cwd()}"
    return Problem(path, f"{dotted} is '{name}', which does not exist; expected a {expected}; {hint}")


def format_problem(problem: Problem, locations: Mapping[KeyPath, str], name: str) -> str:
    """The message with its place in front: the file and line of the key, or of the nearest section around it."""
    for length in range(len(problem.path), 0, -1):
        if problem.path[:length] in locations:
            return f"{locations[problem.path[:length]]}: {problem.text}"
    return f"{name}: {problem.text}"
