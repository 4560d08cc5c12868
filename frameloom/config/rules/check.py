"""Rules that span several keys, checked before anything is loaded. Each yields every mistake that it finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from frameloom.config.loading.problems import Problem
from frameloom.config.loading.yaml_values import KeyPath, format_value
from frameloom.config.rules.buckets import check_buckets
from frameloom.config.rules.models import (
    TOKENIZER_FOLDERS,
    check_autoencoder,
    check_control,
    check_known,
    check_personal,
    check_text_files,
    check_text_options,
    check_text_place,
)
from frameloom.config.rules.parallel import check_parallel
from frameloom.config.rules.sampling import check_note, check_objective, check_sample
from frameloom.config.rules.training import check_optim, check_train
from frameloom.config.schema.recipe import Recipe, TextEncoderSection
from frameloom.core.errors import ConfigError
from frameloom.core.spelling import nearest, suggest
from frameloom.models.registry import DENOISERS, TEXT_ENCODERS, VAES
from frameloom.models.spec import fits_type

MAX_TIMEOUT_S = 3600
PICKLES = (".pt", ".pth", ".ckpt", ".bin")


def _check_names(recipe: Recipe) -> Iterator[Problem]:
    model, vae = recipe.model, recipe.vae
    if model.family not in DENOISERS:
        yield _unknown(("model", "family"), model.family, DENOISERS, kind="families")
    elif model.size not in DENOISERS[model.family].sizes:
        sizes = DENOISERS[model.family].sizes
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
        ("model", recipe.model.overrides, DENOISERS.get(recipe.model.family)),
        ("vae", recipe.vae.overrides, VAES.get(recipe.vae.name)),
    )
    for section, overrides, spec in sections:
        for name, value in overrides.items() if spec else ():
            path = (section, "overrides", name)
            assert spec is not None
            if name not in spec.fields:
                text = f"{section}.overrides has '{name}', which is no field of this architecture"
                yield Problem(path, f"{text}; {suggest(name, spec.fields, kind='fields')}")
            elif not fits_type(value, spec.fields[name]):
                given = f"'{value}'" if isinstance(value, str) else format_value(value)
                text = f"{'.'.join(path)} is {given}; expected {_KINDS[spec.fields[name]]}"
                yield Problem(path, text)


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
        else:
            yield from _check_window(path, encoder)
        first = seen.setdefault((encoder.name, encoder.path), index)
        if first != index:
            yield Problem(
                path, f"text.encoders.{index} is the same encoder as text.encoders.{first}; remove one of them"
            )


def _check_window(path: KeyPath, encoder: TextEncoderSection) -> Iterator[Problem]:
    """Encoders with a short window read long captions in several; packages carry only small encoders."""
    window = TEXT_ENCODERS[encoder.name].window
    where = ".".join(path)
    if window and encoder.max_length > window and (encoder.max_length - 2) % (window - 2):
        below = (encoder.max_length - 2) // (window - 2) * (window - 2) + 2
        text = f"{where}.max_length is {encoder.max_length}; {encoder.name} reads windows of {window - 2} tokens"
        yield Problem((*path, "max_length"), f"{text}; write {below} or {below + window - 2}")
    if encoder.path is None and not TEXT_ENCODERS[encoder.name].packaged:
        text = f"{where}.path is null, but no package carries {encoder.name}"
        yield Problem((*path, "path"), f"{text}; name the folder with its weights and tokenizer", ((*path, "name"),))


def _check_sources(recipe: Recipe) -> Iterator[Problem]:
    """One manifest or a list of sources; shares of an epoch by weights or by repeats."""
    data = recipe.data
    keys: tuple[KeyPath, ...] = (("data", "manifest"), ("data", "sources"))
    if data.manifest is None and not data.sources:
        text = "data needs the key 'manifest' (the clips: a table, a list or a folder), or 'sources' for several"
        yield Problem(keys[0], f"{text}; e.g. manifest: clips.parquet", (keys[1],))
    elif data.manifest is not None and data.sources:
        text = f"data.manifest is '{data.manifest}', and data.sources is given too; only one of them can be read"
        yield Problem(keys[0], f"{text}; make it one of the sources, or remove one of the keys", (keys[1],))
    if data.sources and data.root is not None:
        text = f"data.root is '{data.root}', which belongs to data.manifest; give each of data.sources its own root"
        yield Problem(("data", "root"), text, (keys[1],))
    weighted = [source for source in data.sources if source.weight is not None]
    for index, source in enumerate(data.sources):
        path = ("data", "sources", str(index))
        if not source.path:
            yield Problem(path, f"{'.'.join(path)} needs the key 'path'; e.g. path: clips.parquet")
        if weighted and source.weight is None:
            text = f"{'.'.join(path)} has no weight, but others have; give every source a weight, or none"
            yield Problem(path, text, (keys[1],))
        if source.weight is not None and source.repeat != 1:
            text = f"{'.'.join(path)} has weight {format_value(source.weight)} and repeat {format_value(source.repeat)}"
            yield Problem((*path, "repeat"), f"{text}; a weight already says how often its rows come: remove one")


def _check_recompute(recipe: Recipe) -> Iterator[Problem]:
    """Kinds of blocks are those of the family; an autoencoder's are only known once it is built."""
    family, settings = DENOISERS.get(recipe.model.family), recipe.train.recompute
    if not isinstance(settings, bool) and settings.buffer is not None and not settings.offload:
        text = f"train.recompute.buffer is {settings.buffer}, but nothing waits in host memory"
        yield Problem(("train", "recompute", "buffer"), f"{text}; set train.recompute.offload: true, or remove it")
    if recipe.task != "denoiser" or family is None or isinstance(settings, bool):
        return
    path = ("train", "recompute", "blocks")
    for kind in settings.blocks:
        if kind not in family.block_kinds:
            text = f"{'.'.join(path)} has '{kind}', which {recipe.model.family} has no blocks of"
            advice = suggest(kind, family.block_kinds, kind="blocks")
            yield Problem((*path, kind), f"{text}; {advice}", (("model", "family"),))


def _check_units(recipe: Recipe) -> Iterator[Problem]:
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
    yield from _check_cache_keys(recipe)
    if data.cache.latents is None:
        return
    also: tuple[KeyPath, ...] = (("data", "cache", "latents"),)
    if data.frame_start == "random":
        text = "data.frame_start is random, which the latent cache data.cache.latents cannot honour"
        yield Problem(("data", "frame_start"), f"{text}; use first or center, or encode while training", also)
    if data.flip > 0:
        text = f"data.flip is {format_value(data.flip)}, which the latent cache data.cache.latents cannot honour"
        yield Problem(("data", "flip"), f"{text}; use 0, or encode while training", also)


_NUM_FOREIGN_FOLDERS = {None: (0,), "open_sora_plan": (1, 2), "sdxl": (1,), "open_sora2": (0,)}


def _check_cache_keys(recipe: Recipe) -> Iterator[Problem]:
    """Keys of data.cache that need or exclude each other."""
    cache, section = recipe.data.cache, ("data", "cache")
    if cache.on_demand and cache.latents is None:
        if cache.text is None:
            text = "data.cache.on_demand is true, but no cache is named; set data.cache.latents or data.cache.text"
            yield Problem((*section, "on_demand"), text)
        elif recipe.data.workers:
            text = f"data.cache.on_demand with a text cache alone needs data.workers: 0, not {recipe.data.workers}"
            advice = "captions are encoded in the training process; set it, or name data.cache.latents too"
            yield Problem((*section, "on_demand"), f"{text}; {advice}", (("data", "workers"),))
    allowed, found = _NUM_FOREIGN_FOLDERS[cache.foreign], len(cache.foreign_folders)
    if found not in allowed:
        wanted = " or ".join(str(number) for number in allowed)
        text = f"data.cache.foreign_folders names {found}, but data.cache.foreign {format_value(cache.foreign)} has"
        yield Problem((*section, "foreign_folders"), f"{text} {wanted}", ((*section, "foreign"),))
    if cache.foreign_name is not None and cache.foreign != "open_sora_plan":
        text = "data.cache.foreign_name is set, which only data.cache.foreign: open_sora_plan uses; remove it"
        yield Problem((*section, "foreign_name"), text, ((*section, "foreign"),))
    if cache.foreign is not None:
        for name in ("text", *(("latents",) if cache.foreign != "open_sora_plan" else ())):
            if getattr(cache, name) is not None:
                text = f"data.cache.{name} is set, but data.cache.foreign {cache.foreign} brings its own"
                yield Problem((*section, name), f"{text}; remove one of them", ((*section, "foreign"),))


def _check_vae_weights(recipe: Recipe) -> Iterator[Problem]:
    if recipe.task == "denoiser" and recipe.vae.weights is None:
        text = "vae.weights is null, but task denoiser needs a trained autoencoder to encode and to sample with"
        yield Problem(
            ("vae", "weights"), f"{text}; name its file or folder, or train one with task: autoencoder", (("task",),)
        )


def _check_lora(recipe: Recipe) -> Iterator[Problem]:
    lora, sample = recipe.lora, recipe.sample
    if lora is not None and recipe.task != "denoiser":
        text = f"lora is set, but task is {recipe.task}; adapters are trained beside a denoiser"
        yield Problem(("lora",), f"{text}; remove it, or set task: denoiser", (("task",),))
    if lora is not None and lora.dropout:
        text = f"lora.dropout is {format_value(lora.dropout)}; a run that resumes could not repeat its draws"
        yield Problem(("lora", "dropout"), f"{text}; write 0, and train fewer steps against overfitting")
    if sample.lora_scale != 1 and lora is None and sample.lora is None:
        text = f"sample.lora_scale is {format_value(sample.lora_scale)}, but there is no LoRA"
        yield Problem(("sample", "lora_scale"), f"{text}; remove it, or name one in sample.lora", (("lora",),))


def _check_validation(recipe: Recipe) -> Iterator[Problem]:
    """Rows are kept apart only by a column that both selections name with different values."""
    if recipe.validation is None or not recipe.validation.batches:
        if recipe.validation is not None and recipe.validation.samples is None:
            text = "validation.batches is 0 and validation.samples is null, so nothing would be done"
            yield Problem(("validation", "batches"), f"{text}; set one of them, or remove the section (null)")
        return
    held_out, trained = recipe.validation.where, recipe.data.where
    if isinstance(held_out, str) or isinstance(trained, str):
        # What a filter leaves is only known from the rows; naming the same column is what can be seen here.
        apart = held_out != trained and bool(_words(held_out) & _words(trained))
    else:
        apart = any(column in trained and trained[column] != value for column, value in held_out.items())
    if not apart:
        text = f"validation.where is {format_value(held_out)} and data.where is {format_value(trained)}"
        advice = "keep them apart, e.g. data.where: {split: train} and validation.where: {split: val}"
        path = ("validation", "where")
        yield Problem(path, f"{text}, so validation clips would be trained on; {advice}", (("data", "where"),))


def _words(where: Mapping[str, Any] | str) -> set[str]:
    """The columns that a selection names; of a filter also its other words."""
    return set(re.findall(r"[^\W\d]\w*", where)) - _FILTER_WORDS if isinstance(where, str) else set(where)


_FILTER_WORDS = {"and", "or", "not", "in", "is", "null", "true", "false"}


RULES: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    _check_names,
    _check_overrides,
    _check_text,
    check_note,
    check_personal,
    check_text_place,
    check_text_options,
    _check_sources,
    check_buckets,
    check_sample,
    check_optim,
    check_train,
    check_parallel,
    _check_recompute,
    _check_units,
    _check_cache,
    _check_vae_weights,
    check_autoencoder,
    check_objective,
    check_known,
    check_control,
    _check_lora,
    _check_validation,
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
        for index, folder in enumerate(recipe.data.cache.foreign_folders):
            problems.append(_check_path(("data", "cache", "foreign_folders", str(index)), folder, "folder"))
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
