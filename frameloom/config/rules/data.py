"""Rules of the data: bucket policies, sources, caches, rows kept for validation. Each yields every mistake it finds."""

from __future__ import annotations

import re
from collections.abc import Iterator

from frameloom.config.loading.problems import Problem
from frameloom.config.loading.yaml_values import KeyPath, format_value
from frameloom.config.rules.models import MODEL_KEYS, check_frames, check_multiple, frame_problem, token_patch
from frameloom.config.schema.buckets import GroupedSection
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError
from frameloom.core.resolutions import parse_resolution, size_table
from frameloom.models.registry import DENOISERS, VAES
from frameloom.models.spec import VAESpec

MAX_TIMEOUT_S = 3600


def check_buckets(recipe: Recipe) -> Iterator[Problem]:
    """Sizes and lengths of the chosen policy fit the models."""
    data, vae = recipe.data, VAES.get(recipe.vae.name)
    # Pixels on a side of one token, or of one latent cell where no denoiser is trained.
    step = None
    if vae is not None and recipe.task == "autoencoder":
        step = vae.strides[1]
    elif vae is not None and recipe.model.family in DENOISERS:
        step = vae.strides[1] * token_patch(recipe)[1]
    if data.policy in ("grid", "token_budget"):
        yield from _check_grid(recipe, vae, step)
    section = getattr(data, data.policy, None)
    if section is None or vae is None or step is None:
        return
    path = ("data", data.policy)
    for name in ("video_sample_n_frames", "num_frames", "frames"):
        if (frames := getattr(section, name, None)) is not None:
            yield from check_frames(recipe, vae, (*path, name), frames)
    sides: list[tuple[KeyPath, int]] = []
    match data.policy:
        case "ratio_tokens":
            # The longest ratios of the table have a side of half the size.
            for name in ("video_sample_size", "image_sample_size"):
                if (side := getattr(section, name)) < 2 * step:
                    text = f"data.ratio_tokens.{name} is {side}; its narrowest ratio is half as high and holds no token"
                    yield Problem((*path, name), f"{text}; use {2 * step} or more", MODEL_KEYS)
        case "grouped":
            names = ("max_height", "max_width") if section.force_resolution else ("hw_stride",)
            sides = [((name,), getattr(section, name)) for name in names]
            yield from _check_grouped(section, vae)
        case "multi_aspect":
            numbered = [(f"{i}", f"{j}", side) for i, size in enumerate(section.sizes) for j, side in enumerate(size)]
            sides = [(("sizes", i, j), side) for i, j, side in numbered]
        case "fixed":
            sides = [(("height",), section.height), (("width",), section.width)]
    for name_path, side in sides:
        yield from check_multiple((*path, *name_path), side, step)


def _check_grid(recipe: Recipe, vae: VAESpec | None, step: int | None) -> Iterator[Problem]:
    buckets = recipe.data.buckets or {}
    for name, cells in buckets.items():
        path = ("data", "buckets", name)
        try:
            parse_resolution(name) if step is None else size_table(name, step)
        except ConfigError as error:
            yield Problem(path, f"data.buckets: {error}", (("model", "family"), ("vae", "name")))
        for frames, (chance, _) in cells.items():
            key = (*path, str(frames))
            if vae and (advice := frame_problem(recipe, vae, frames)):
                yield Problem(key, f"data.buckets.{name} has clips of {frames} frames; {advice}", (("vae", "name"),))
            if frames == 1 and isinstance(chance, tuple):
                text = f"{'.'.join(key)} has the probabilities {format_value(list(chance))}"
                yield Problem(key, f"{text}, but images have no shorter length to go on to; write one number")
    chances = [cell[0] for cells in buckets.values() for cell in cells.values()]
    if chances and not any(max(chance) if isinstance(chance, tuple) else chance for chance in chances):
        yield Problem(("data", "buckets"), "data.buckets has only probabilities of 0, so no clip is kept; use 1.0")


def _check_grouped(section: GroupedSection, vae: VAESpec) -> Iterator[Problem]:
    path = ("data", "grouped")
    low, high = section.ratio_limits
    if low > high:
        text = f"data.grouped.ratio_limits is {format_value(list(section.ratio_limits))}; the smallest comes first"
        yield Problem((*path, "ratio_limits"), f"{text}; write {format_value([high, low])}")
    if section.min_hxw is not None and section.min_hxw > section.max_hxw:
        text = f"data.grouped.min_hxw is {section.min_hxw}, more than max_hxw {section.max_hxw}, so no clip fits"
        yield Problem((*path, "min_hxw"), f"{text}; make it smaller", ((*path, "max_hxw"),))
    least = section.min_frames or (29 if section.as_published else 1)
    if least > section.num_frames > 1:
        text = f"data.grouped.num_frames is {section.num_frames}, but videos below {least} frames are dropped"
        yield Problem((*path, "num_frames"), f"{text}; raise it, or set min_frames", ((*path, "min_frames"),))
    latents = max(1, vae.lengths().latents(section.num_frames))
    if section.sp_size > latents and section.num_frames > 1:
        text = f"data.grouped.sp_size is {section.sp_size}, but {section.num_frames} frames give {latents} latent ones"
        yield Problem((*path, "sp_size"), f"{text}; make it {latents} or less", ((*path, "num_frames"),))


def check_sources(recipe: Recipe) -> Iterator[Problem]:
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


def check_cache(recipe: Recipe) -> Iterator[Problem]:
    cache, path = recipe.data.cache, ("data", "cache", "external_folders")
    allowed = {None: (0,), "open_sora_plan": (1, 2), "sdxl": (1,), "open_sora2": (0,)}[cache.external]
    if recipe.task == "denoiser" and len(cache.external_folders) not in allowed:
        text = f"data.cache.external_folders names {len(cache.external_folders)}"
        text = f"{text}, but data.cache.external {format_value(cache.external)} has {' or '.join(map(str, allowed))}"
        yield Problem(path, text, (("data", "cache", "external"),))
    if (timeout_s := recipe.data.timeout_s) > MAX_TIMEOUT_S:
        text = f"data.timeout_s is {format_value(timeout_s)}, more than an hour; it is in seconds"
        yield Problem(("data", "timeout_s"), f"{text}; did you mean {format_value(timeout_s / 1000)}?")


def check_validation(recipe: Recipe) -> Iterator[Problem]:
    """Rows are kept apart only by a column that both selections name with different values."""
    if recipe.validation is None or not recipe.validation.batches:
        return
    held_out, trained = recipe.validation.where, recipe.data.where
    if isinstance(held_out, str) or isinstance(trained, str):
        # What a filter leaves is only known from the rows; naming the same column is what can be seen here.
        named = [
            set(re.findall(r"[^\W\d]\w*", where)) - _FILTER_WORDS if isinstance(where, str) else set(where)
            for where in (held_out, trained)
        ]
        apart = held_out != trained and bool(named[0] & named[1])
    else:
        apart = any(column in trained and trained[column] != value for column, value in held_out.items())
    if not apart:
        text = f"validation.where is {format_value(held_out)} and data.where is {format_value(trained)}"
        advice = "keep them apart, e.g. data.where: {split: train} and validation.where: {split: val}"
        path = ("validation", "where")
        yield Problem(path, f"{text}, so validation clips would be trained on; {advice}", (("data", "where"),))


_FILTER_WORDS = {"and", "or", "not", "in", "is", "null", "true", "false"}
