"""Rules of the data: bucket policies, sources, caches, rows kept for validation. Each yields every mistake it finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from frameloom.config.loading.problems import Problem
from frameloom.config.loading.yaml_values import KeyPath, format_value
from frameloom.config.schema.data import DataSection
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError
from frameloom.core.resolutions import parse_resolution, size_table
from frameloom.models.registry import DENOISERS, VAES
from frameloom.models.spec import VAESpec

GRID_POLICIES = ("grid", "token_budget")
MAX_TIMEOUT_S = 3600
_SECTIONS = ("token_budget", "ratio_tokens", "grouped", "multi_aspect", "fixed")
_MODELS: tuple[KeyPath, ...] = (("model", "family"), ("vae", "name"), ("task",))


def check_buckets(recipe: Recipe) -> Iterator[Problem]:
    """The chosen policy has what it needs, nothing of another one is set, and sizes and lengths fit the models."""
    yield from _check_choice(recipe.data)
    vae = VAES.get(recipe.vae.name)
    if recipe.data.policy in GRID_POLICIES:
        yield from _check_grid(recipe)
    elif vae is not None and (recipe.task == "autoencoder" or recipe.model.family in DENOISERS):
        yield from _CHECKS[recipe.data.policy](recipe, vae, _token_side(recipe, vae))
    yield from _check_random(recipe)


def _token_side(recipe: Recipe, vae: VAESpec) -> int:
    """Pixels on a side of one token, or of one latent cell where no denoiser is trained."""
    return vae.strides[1] * (token_patch(recipe)[1] if recipe.task == "denoiser" else 1)


def token_patch(recipe: Recipe) -> tuple[int, int, int]:
    """Latent cells (frames, height, width) per token of the recipe's denoiser."""
    model = recipe.model
    return DENOISERS[model.family].patch_of(model.size, model.overrides)


def _check_choice(data: DataSection) -> Iterator[Problem]:
    also: tuple[KeyPath, ...] = (("data", "policy"),)
    if data.policy in GRID_POLICIES and data.buckets is None:
        text = f"data needs the key 'buckets' for data.policy {data.policy}"
        yield Problem(("data", "buckets"), f"{text}; e.g. buckets: {{64px: {{9: [1.0, 8]}}}}", also)
    if data.policy not in GRID_POLICIES and data.buckets is not None:
        text = f"data.buckets is set, but data.policy is {data.policy}, which has its own section"
        yield Problem(("data", "buckets"), f"{text}; remove it (buckets: null), or set policy: grid", also)
    for name in _SECTIONS:
        if name != data.policy and getattr(data, name) is not None:
            text = f"data.{name} is set, but data.policy is {data.policy}"
            yield Problem(("data", name), f"{text}; set policy: {name}, or remove the section ({name}: null)", also)


def _check_grid(recipe: Recipe) -> Iterator[Problem]:
    vae = VAES.get(recipe.vae.name)
    has_stride = vae is not None and (recipe.task == "autoencoder" or recipe.model.family in DENOISERS)
    buckets = recipe.data.buckets or {}
    for name, cells in buckets.items():
        path = ("data", "buckets", name)
        try:
            size_table(name, _token_side(recipe, vae)) if vae and has_stride else parse_resolution(name)
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


def frame_problem(recipe: Recipe, vae: VAESpec, frames: int) -> str | None:
    """What the models take, and the nearest numbers that they do; None if `frames` is one of them."""
    is_denoiser = recipe.task == "denoiser" and recipe.model.family in DENOISERS
    patch = token_patch(recipe)[0] if is_denoiser else 1
    if vae.accepts_frames(frames, patch):
        return None
    reach = vae.strides[0] * patch
    below = [n for n in range(max(1, frames - reach), frames) if vae.accepts_frames(n, patch)][-1:]
    above = [n for n in range(frames + 1, frames + reach + 1) if vae.accepts_frames(n, patch)][:1]
    near = [str(n) for n in below + above]
    name = recipe.vae.name if patch == 1 else f"{recipe.model.family} {recipe.model.size}"
    return f"{name} takes {vae.frame_rule(patch)}; write {' or '.join(near)}"


def _check_frames(recipe: Recipe, vae: VAESpec, path: KeyPath, frames: int) -> Iterator[Problem]:
    if advice := frame_problem(recipe, vae, frames):
        yield Problem(path, f"{'.'.join(path)} is {frames}; {advice}", (("vae", "name"),))


def _check_multiple(path: KeyPath, value: int, step: int) -> Iterator[Problem]:
    if value % step:
        below = value // step * step
        near = " or ".join(str(size) for size in (below, below + step) if size)
        text = f"{'.'.join(path)} is {value}; the models need a multiple of {step}"
        yield Problem(path, f"{text}; write {near}", _MODELS)


def _check_ratio_tokens(recipe: Recipe, vae: VAESpec, step: int) -> Iterator[Problem]:
    section = recipe.data.ratio_tokens
    if section is None:
        return
    path = ("data", "ratio_tokens")
    yield from _check_frames(recipe, vae, (*path, "video_sample_n_frames"), section.video_sample_n_frames)
    # The longest ratios of the table have a side of half the size.
    for name in ("video_sample_size", "image_sample_size"):
        side: int = getattr(section, name)
        if side < 2 * step:
            text = f"data.ratio_tokens.{name} is {side}; its narrowest ratio is half as high and holds no token"
            yield Problem((*path, name), f"{text}; use {2 * step} or more", _MODELS)
    if not section.training_with_video_token_length and section.keep_all_node_same_token_length:
        text = "data.ratio_tokens.keep_all_node_same_token_length needs training_with_video_token_length"
        name = "keep_all_node_same_token_length"
        yield Problem((*path, name), f"{text}; set that to true too, or remove it")


def _check_grouped(recipe: Recipe, vae: VAESpec, step: int) -> Iterator[Problem]:
    section = recipe.data.grouped
    if section is None:
        return
    path = ("data", "grouped")
    yield from _check_frames(recipe, vae, (*path, "num_frames"), section.num_frames)
    if section.force_resolution:
        yield from _check_multiple((*path, "max_height"), section.max_height, step)
        yield from _check_multiple((*path, "max_width"), section.max_width, step)
    else:
        yield from _check_multiple((*path, "hw_stride"), section.hw_stride, step)
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
    latents = max(1, (section.num_frames - vae.causal) // vae.strides[0] + vae.causal)
    if section.sp_size > latents and section.num_frames > 1:
        text = f"data.grouped.sp_size is {section.sp_size}, but {section.num_frames} frames give {latents} latent ones"
        yield Problem((*path, "sp_size"), f"{text}; make it {latents} or less", ((*path, "num_frames"),))


def _check_multi_aspect(recipe: Recipe, vae: VAESpec, step: int) -> Iterator[Problem]:
    section = recipe.data.multi_aspect
    if section is None:
        return
    path = ("data", "multi_aspect")
    yield from _check_frames(recipe, vae, (*path, "frames"), section.frames)
    for index, size in enumerate(section.sizes):
        for place, side in enumerate(size):
            yield from _check_multiple((*path, "sizes", str(index), str(place)), side, step)


def _check_fixed(recipe: Recipe, vae: VAESpec, step: int) -> Iterator[Problem]:
    section = recipe.data.fixed
    if section is None:
        return
    path = ("data", "fixed")
    yield from _check_frames(recipe, vae, (*path, "frames"), section.frames)
    yield from _check_multiple((*path, "height"), section.height, step)
    yield from _check_multiple((*path, "width"), section.width, step)


_CHECKS: dict[str, Callable[[Recipe, VAESpec, int], Iterator[Problem]]] = {
    "ratio_tokens": _check_ratio_tokens,
    "grouped": _check_grouped,
    "multi_aspect": _check_multi_aspect,
    "fixed": _check_fixed,
}

# Keys that give a clip another shape in each epoch.
_RANDOM_KEYS = {
    "ratio_tokens": (
        *("random_hw_adapt", "random_frame_crop"),
        *("random_ratio_crop", "keep_all_node_same_token_length"),
    ),
    "multi_aspect": ("as_published",),
}


def _check_random(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    section = getattr(data, data.policy, None)
    if data.cache.latents is None or section is None:
        return
    for name in _RANDOM_KEYS.get(data.policy, ()):
        if getattr(section, name):
            text = f"data.{data.policy}.{name} is true, which the latent cache data.cache.latents cannot honour"
            also = (("data", "cache", "latents"),)
            yield Problem(("data", data.policy, name), f"{text}; use false, or encode while training", also)


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


def check_units(recipe: Recipe) -> Iterator[Problem]:
    if (timeout_s := recipe.data.timeout_s) > MAX_TIMEOUT_S:
        text = f"data.timeout_s is {format_value(timeout_s)}, more than an hour; it is in seconds"
        yield Problem(("data", "timeout_s"), f"{text}; did you mean {format_value(timeout_s / 1000)}?")


def check_cache(recipe: Recipe) -> Iterator[Problem]:
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


def check_validation(recipe: Recipe) -> Iterator[Problem]:
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
