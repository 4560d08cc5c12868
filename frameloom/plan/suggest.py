"""What to change in a recipe so that every bucket fits: the smallest change first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from frameloom.config.optim_checks import WITHOUT_OFFLOAD
from frameloom.config.schema import Recipe
from frameloom.core.errors import ConfigError
from frameloom.plan.estimate import Measured, RunPlan, measure_recipe, plan_run


@dataclass(frozen=True)
class Change:
    """`settings` are dotted keys with their new values, as they would be given on the command line."""

    settings: dict[str, Any]
    plan: RunPlan

    def describe(self) -> str:
        return ", ".join(f"{key}: {value}" for key, value in self.settings.items())


def suggest_change(recipe: Recipe, plan: RunPlan, num_devices: int, measured: Measured) -> Change | None:
    """The first of these that makes all fit: more sharding, then recompute, then both, then (on one device) recompute
    and the optimizer's state on the host, then smaller batches.

    Sharding costs communication and changes no number; recompute costs a third more arithmetic; a smaller batch changes
    the training, so it comes last. None when all fits, and when not even one clip does.
    """
    if not plan.breaking:
        return None
    known = {False: measured}

    def try_out(settings: dict[str, Any]) -> RunPlan:
        changed, recomputes = _apply(recipe, settings), "train.recompute" in settings
        if recomputes not in known:
            known[recomputes] = measure_recipe(changed)
        return plan_run(changed, plan.device, num_devices, with_data=False, measured=known[recomputes])

    strongest: dict[str, Any] = {}
    for settings in _candidates(recipe, num_devices, has_host=plan.device.name != "cpu"):
        found, strongest = try_out(settings), settings
        if not found.breaking:
            return Change(settings, found)
    smaller = _shrink(recipe, try_out(strongest))
    if smaller is None:
        return None
    settings = {**strongest, **smaller}
    return Change(settings, try_out(settings))


def _candidates(recipe: Recipe, num_devices: int, *, has_host: bool) -> Iterator[dict[str, Any]]:
    """`has_host`: whether there is other memory than the device's to move the optimizer's state to."""
    zeros = [zero for zero in (1, 2, 3) if zero > recipe.parallel.zero] if num_devices > 1 else []
    for zero in zeros:
        yield {"parallel.zero": zero}
    if not recipe.train.recompute:
        yield {"train.recompute": True}
        for zero in zeros:
            yield {"train.recompute": True, "parallel.zero": zero}
    can_offload = has_host and not recipe.optim.offload and recipe.optim.name not in WITHOUT_OFFLOAD
    if num_devices == 1 and can_offload:
        yield {"optim.offload": True} | ({} if recipe.train.recompute else {"train.recompute": True})


def _shrink(recipe: Recipe, plan: RunPlan) -> dict[str, Any] | None:
    """What makes the batches smaller under the recipe's policy; None if one clip is too much."""
    if recipe.data.policy == "token_budget":
        tokens = fitting_tokens(recipe, plan)
        return None if tokens is None else {"data.token_budget": {"tokens": tokens}}
    buckets = fitting_batches(recipe, plan)
    return None if buckets is None else {"data.buckets": buckets}


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
    return _rewrite(recipe, plan, lambda batch, largest: min(batch, largest))


def largest_batches(recipe: Recipe, plan: RunPlan) -> dict[str, dict[int, list[Any]]] | None:
    """`data.buckets` with the largest batch that fits in every cell."""
    return _rewrite(recipe, plan, lambda batch, largest: largest)


def _rewrite(
    recipe: Recipe, plan: RunPlan, choose: Callable[[int, int], int]
) -> dict[str, dict[int, list[Any]]] | None:
    if recipe.data.policy != "grid" or recipe.data.buckets is None:
        raise ConfigError(
            f"data.policy {recipe.data.policy}: batch sizes can be proposed for grid and token_budget only; lower "
            "the number of tokens or the batch size of this policy by hand"
        )
    limits: dict[tuple[str, int], int] = {}
    for item in plan.buckets:
        cell = item.bucket.resolution, item.bucket.frames
        limits[cell] = min(limits.get(cell, item.largest_batch), item.largest_batch)
    if min(limits.values()) < 1:
        return None
    return {
        resolution: {
            frames: [probability, choose(batch, limits.get((resolution, frames), batch))]
            for frames, (probability, batch) in cells.items()
        }
        for resolution, cells in recipe.data.buckets.items()
    }


def _apply(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    values = recipe.model_dump()
    for dotted, value in settings.items():
        *sections, key = dotted.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[key] = value
    return Recipe.model_validate(values)


__all__ = ["Change", "fitting_batches", "fitting_tokens", "largest_batches", "suggest_change"]
