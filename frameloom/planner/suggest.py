"""Proposed changes of a recipe: the smallest that makes every bucket fit, and one that balances their times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from frameloom.config.loading.overrides import DELETE, Override, apply_override, split_path
from frameloom.config.loading.recipe import BASE, resolve
from frameloom.config.loading.yaml_values import format_value, parse_value
from frameloom.config.rules.check import check_rules
from frameloom.config.rules.models import token_patch
from frameloom.config.schema.buckets import FixedSection, RatioTokensSection
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.training import RecomputeSection
from frameloom.models.registry import VAES
from frameloom.planner.devices import Device
from frameloom.planner.estimate import Measured, RunPlan, measure_recomputed, plan_run


@dataclass(frozen=True)
class Change:
    """`settings` are dotted keys with their new values, as they would be given on the command line."""

    settings: dict[str, Any]
    plan: RunPlan

    def format(self) -> str:
        return ", ".join(f"{key}: {value}" for key, value in self.settings.items())


def suggest_change(recipe: Recipe, plan: RunPlan, num_devices: int, measured: Measured) -> Change | None:
    """The first of these that makes all fit: clips encoded one by one, more sharding, then recompute, then both, then
    (on one device) recompute and the optimizer's state on the host, then smaller batches, then devices that share
    a clip, and at last shorter clips (policy fixed).

    Sharding costs communication and changes no number; recompute costs a third more arithmetic; a smaller batch changes
    the training, so it comes late. None when all fits, and when nothing of this helps.
    """
    if not plan.breaking:
        return None
    trial = _Trial(recipe, plan.device, num_devices, {False: measured})
    # Nothing where no clip is encoded in a step, or few at a time already.
    encodes = recipe.data.cache.latents is None and recipe.vae.mini_batch is None
    sliced = {"vae.mini_batch": 1} if encodes else {}
    plain = [one for one in _candidates(recipe, num_devices, has_host=plan.device.name != "cpu") if trial.allows(one)]
    for settings in [sliced, *plain, *(one | sliced for one in plain)]:
        found = trial.plan(settings)
        if not found.breaking:
            return Change(settings, found)
    strongest = plain[-1] if plain else {}
    for shared in _sharings(recipe, num_devices, measured):
        change = _shrink_sliced(trial, strongest | shared, sliced) if trial.allows(strongest | shared) else None
        if change is not None:
            return change
    return _shorten(trial, strongest | sliced)


def _shorten(trial: _Trial, settings: dict[str, Any]) -> Change | None:
    """Shorter clips of the policy `fixed`: what one device encodes is not shared, so a long clip may be too much."""
    recipe, vae = trial.recipe, VAES[trial.recipe.vae.name]
    section = recipe.data.fixed or FixedSection()
    if recipe.data.policy != "fixed":
        return None
    settings = settings | {"data.fixed.batch": 1}
    frames, found = section.frames, trial.plan(settings)
    while found.breaking:
        share = min(0.95, trial.device.memory / found.breaking[0].total)
        frames = vae.lengths(token_patch(recipe)[0]).trim(int(share * frames))
        if not frames:
            return None
        settings["data.fixed.frames"] = frames
        # Shapes of clips change, so nothing that was measured serves.
        changed = apply_settings(recipe, settings)
        found = plan_run(changed, trial.device, trial.num_devices, with_data=False)
    return Change(settings, found)


def _shrink_sliced(trial: _Trial, settings: dict[str, Any], sliced: dict[str, Any]) -> Change | None:
    """Smaller batches, with clips encoded one by one where that leaves more of them."""
    smaller = _shrink(trial.recipe, trial.plan(settings))
    if (other := _shrink(trial.recipe, trial.plan(settings | sliced))) != smaller:
        settings, smaller = settings | sliced, other
    if smaller is None:
        return None
    return Change(settings | smaller, trial.plan(settings | smaller))


@dataclass(frozen=True)
class _Trial:
    """Plans of a recipe with other settings; what was measured serves for others too: `known` without and with more
    recompute than the recipe has."""

    recipe: Recipe
    device: Device
    num_devices: int
    known: dict[bool, Measured]

    def allows(self, settings: Mapping[str, Any]) -> bool:
        """Whether a run would take them: not all settings go together."""
        return not check_rules(apply_settings(self.recipe, settings))

    def plan(self, settings: Mapping[str, Any]) -> RunPlan:
        changed = apply_settings(self.recipe, settings)
        recomputes = "train.recompute" in settings
        if recomputes not in self.known:
            self.known[recomputes] = measure_recomputed(changed, self.known[False])
        measured = self.known[recomputes]
        if "vae.mini_batch" in settings and measured.pixels is not None:
            # The number of clips that are encoded at once needs no measuring.
            measured = replace(measured, pixels=replace(measured.pixels, most=settings["vae.mini_batch"]))
        return plan_run(changed, self.device, self.num_devices, with_data=False, measured=measured)


def _candidates(recipe: Recipe, num_devices: int, *, has_host: bool) -> Iterator[dict[str, Any]]:
    """`has_host`: whether there is other memory than the device's to move the optimizer's state to."""
    zeros = [zero for zero in (1, 2, 3) if zero > recipe.parallel.zero] if num_devices > 1 else []
    for zero in zeros:
        yield {"parallel.zero": zero}
    recomputing = _recomputing(recipe.train.recompute)
    if recomputing:
        yield recomputing
        for zero in zeros:
            yield recomputing | {"parallel.zero": zero}
    if num_devices == 1 and has_host and not recipe.optim.offload:
        yield {"optim.offload": True} | recomputing


def _recomputing(now: bool | RecomputeSection) -> dict[str, Any]:
    """All blocks, and what they are given where it is now; nothing where all are recomputed already."""
    if isinstance(now, bool):
        return {} if now else {"train.recompute": True}
    every = RecomputeSection(**now.model_dump(include={"offload", "buffer"}))
    if now == every:
        return {}
    return {"train.recompute": every.model_dump(exclude_defaults=True) or True}


def _sharings(recipe: Recipe, num_devices: int, measured: Measured) -> Iterator[dict[str, Any]]:
    """None, then more and more devices that share the tokens of a clip."""
    yield {}
    num_heads, mesh = measured.denoiser.config.heads, recipe.parallel
    if num_heads is None or mesh.shard or mesh.replicate:
        return
    for degree in (2, 4, 8):
        if degree > mesh.sequence and not num_devices % degree and not num_heads % degree:
            yield {"parallel.sequence": degree}


def _shrink(recipe: Recipe, plan: RunPlan) -> dict[str, Any] | None:
    """What makes the batches smaller under the recipe's policy: nothing if all fits, None if one clip is too much."""
    if not plan.breaking:
        return {}
    if min(item.largest_batch for item in plan.buckets) < 1:
        return None
    match recipe.data.policy:
        case "token_budget":
            return {"data.token_budget.tokens": fitting_tokens(recipe, plan)}
        case "grid":
            return {"data.buckets": fitting_batches(recipe, plan)}
        case "fixed":
            keys = ("data.fixed.batch", "data.fixed.image_batch")  # clips and images have batches of their own
            return {keys[item.bucket.index]: item.largest_batch for item in plan.breaking}
        case "ratio_tokens":
            # Batches of short and small clips are 2 or 4 times the size that is set.
            size = (recipe.data.ratio_tokens or RatioTokensSection()).train_batch_size
            fitting = min(item.largest_batch * size // item.bucket.batch_size for item in plan.buckets)
            return {"data.ratio_tokens.train_batch_size": fitting} if fitting else None
        case policy:
            return {f"data.{policy}.batch": min(item.largest_batch for item in plan.buckets)}


def fitting_tokens(recipe: Recipe, plan: RunPlan) -> int | None:
    """The largest number of tokens whose batches fit in every bucket; None if one clip is too much.

    A bucket whose own limit in data.buckets fits does not bind. Without any that binds, it is the number at which all
    of them are at their limits.
    """
    assert recipe.data.buckets is not None
    if min(item.largest_batch for item in plan.buckets) < 1:
        return None
    limits = {
        (resolution, frames): int(batch)
        for resolution, cells in recipe.data.buckets.items()
        for frames, (_, batch) in cells.items()
    }
    own = {item.bucket: limits[item.bucket.resolution, item.bucket.frames] for item in plan.buckets}
    binding = [
        (item.largest_batch + 1) * item.tokens - 1 for item in plan.buckets if item.largest_batch < own[item.bucket]
    ]
    return min(binding) if binding else max(item.tokens * own[item.bucket] for item in plan.buckets)


def fitting_batches(recipe: Recipe, plan: RunPlan) -> dict[str, dict[int, list[Any]]] | None:
    """`data.buckets` with the largest batch that fits in every cell that does not; None if one clip is too much."""
    assert recipe.data.buckets is not None
    limits: dict[tuple[str, int], int] = {}
    for item in plan.buckets:
        cell = item.bucket.resolution, item.bucket.frames
        limits[cell] = min(limits.get(cell, item.largest_batch), item.largest_batch)
    if min(limits.values()) < 1:
        return None
    return {
        resolution: {
            frames: [probability, min(batch, limits.get((resolution, frames), batch))]
            for frames, (probability, batch) in cells.items()
        }
        for resolution, cells in recipe.data.buckets.items()
    }


def apply_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with other values at dotted keys."""
    values = recipe.model_dump()
    for dotted, value in settings.items():
        *sections, key = dotted.split(".")
        target = values
        for section in sections:
            target[section] = target[section] or {}
            target = target[section]
        target[key] = value
    return Recipe.model_validate(values)


KEY = "data.token_budget.attention"
# Beyond this attention is nothing beside the rest, and a fit of it is noise.
_MOST_TOKENS = 10**8


def balance_tokens(recipe: Recipe, plan: RunPlan, num_devices: int, measured: Measured) -> Change | None:
    """What makes the batches of a token budget alike in time; None where they are, or another policy chooses them.

    Its plan has an epoch where `plan` has one.
    """
    if recipe.data.policy != "token_budget":
        return None
    attention = find_attention(plan)
    if attention is None or (recipe.data.token_budget and recipe.data.token_budget.attention == attention):
        return None
    changed = apply_settings(recipe, {KEY: attention})
    balanced = plan_run(changed, plan.device, num_devices, with_data=plan.epoch is not None, measured=measured)
    return Change({KEY: attention}, balanced)


def format_balance(change: Change) -> str:
    shown = f"with {change.format()} the devices of a step take alike"
    epoch = change.plan.epoch
    return shown if epoch is None else f"{shown}, the slowest {epoch.imbalance:.2f} times the mean"


def find_attention(plan: RunPlan) -> int | None:
    """Tokens of a clip at which attention costs as much as everything else; None where all clips have as many tokens.

    The operations of a clip of N tokens are taken as a N + b N^2, fitted to the buckets' own: that is a / b.
    """
    tokens = np.array([item.tokens for item in plan.buckets], dtype=np.float64)
    flops = np.array([item.flops / item.bucket.batch_size for item in plan.buckets])
    if len(np.unique(tokens)) < 2:
        return None
    scale = tokens.max()
    # Relative errors count, or the longest clips would decide alone.
    terms = np.stack([tokens / scale, (tokens / scale) ** 2], axis=1) / flops[:, None]
    linear, square = np.linalg.lstsq(terms, np.ones(len(flops)), rcond=None)[0]
    if square <= 0 or linear <= 0:
        return None
    tokens_alike = round(scale * linear / square)
    return tokens_alike if tokens_alike < _MOST_TOKENS else None


def render_recipe(base: str, overrides: Sequence[str], settings: Mapping[str, Any]) -> str:
    """A file that gives `base` with the `overrides` of the command line, and with `settings` at dotted keys."""
    before, after = resolve(base), resolve(base, overrides)
    for dotted, value in settings.items():
        # As a file has it: there all keys are text.
        plain = parse_value(format_value(value), where=dotted)
        apply_override(after, Override(dotted, split_path(dotted), plain))
    lines = {BASE: str(Path(base).resolve()) if Path(base).is_file() else base, **_find_overlay(before, after)}
    return "".join(f"{key}: {format_value(value)}\n" for key, value in lines.items())


def _find_overlay(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What a file has to say for `before` to become `after`: sections of files are merged, all else is replaced."""
    if before.keys() - after.keys():
        return {DELETE: True, **after}
    return {
        key: _find_overlay(before[key], value)
        if isinstance(value, dict) and isinstance(before.get(key), dict)
        else value
        for key, value in after.items()
        if key not in before or before[key] != value
    }
