"""The plan of a recipe as HTML: memory and time of every bucket on the devices that were picked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frameloom.config.schema import Recipe
from frameloom.studio.context import StudioContext
from frameloom.studio.markup import data_table, fact_tiles, note

if TYPE_CHECKING:
    from frameloom.plan.estimate import BucketPlan, RunPlan

_GB = 1e9
_MAX_ROWS = 60


def show_plan(context: StudioContext, recipe: Recipe, device: str, num_devices: int, memory: str) -> str:
    """Work the plan out (shapes only, no weights) and show it."""
    # The planner brings the models along; a page that plans nothing starts without them.
    from frameloom.plan.balance import balance_tokens
    from frameloom.plan.devices import choose_device
    from frameloom.plan.estimate import measure_recipe, plan_run
    from frameloom.plan.suggest import suggest_change

    chosen = choose_device(device, memory.strip() or None)
    measured = measure_recipe(recipe)
    reads_data = _data_is_below(context, recipe)
    plan = plan_run(recipe, chosen, num_devices, with_data=reads_data, measured=measured)
    change = suggest_change(recipe, plan, num_devices, measured)
    parts = [fact_tiles(_facts(plan)), _verdict(plan, change.describe() if change else None), _table(plan)]
    if balance := balance_tokens(recipe, plan, num_devices, measured):
        parts.append(note(f"Better: {balance.describe()}."))
    if not reads_data:
        parts.append(note("No times of an epoch: the manifest is not there, or not below the folder."))
    return "".join(parts)


def _data_is_below(context: StudioContext, recipe: Recipe) -> bool:
    named = [recipe.data.manifest, *(source.path for source in recipe.data.sources)]
    paths = [(context.root / name).resolve() for name in named if name]
    return bool(paths) and all(path.is_relative_to(context.root) and path.exists() for path in paths)


def _facts(plan: RunPlan) -> dict[str, str]:
    worst = max(plan.buckets, key=lambda item: item.total)
    facts = {
        "weights": f"{plan.size.weights / 1e6:,.1f} M",
        "of them train": f"{plan.size.trained / 1e6:,.1f} M",
        f"largest bucket, of {plan.device.describe_memory()}": f"{worst.total / _GB:,.2f} GB",
        "slowest micro-batch": f"{max(item.seconds for item in plan.buckets):,.3g} s",
        "a checkpoint": f"{plan.checkpoint / _GB:,.2f} GB",
    }
    if plan.epoch is not None:
        facts["steps in an epoch"] = f"{plan.epoch.steps:,}"
        facts["an epoch"] = _spell_time(plan.epoch.seconds)
    return facts


def _spell_time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.3g} s"
    return f"{seconds / 3600:,.1f} h" if seconds >= 7200 else f"{seconds / 60:,.1f} min"


def _verdict(plan: RunPlan, change: str | None) -> str:
    if not plan.breaking:
        return note("Every bucket fits.", kind="good")
    worst = plan.breaking[0].bucket.name
    advice = f"the smallest change that helps: {change}" if change else "no sharding, recompute or batch helps"
    return note(f"{len(plan.breaking)} bucket(s) do not fit, the worst is {worst}; {advice}.", kind="bad")


def _table(plan: RunPlan) -> str:
    header = ["bucket", "tokens", "batch", "activations", "in all", "fits", "largest batch", "seconds"]
    rows = [_row(item, plan.device.memory) for item in plan.buckets[:_MAX_ROWS]]
    more = len(plan.buckets) - _MAX_ROWS
    return data_table(header, rows, numbers=range(1, 8)) + (note(f"And {more} more.") if more > 0 else "")


def _row(item: BucketPlan, memory: float) -> list[str]:
    about = "" if item.is_measured else "~"
    return [
        item.bucket.name,
        f"{item.tokens:,}",
        str(item.bucket.batch_size),
        f"{about}{item.activations / _GB:,.2f} GB",
        f"{item.total / _GB:,.2f} GB",
        "yes" if item.total <= memory else "no",
        str(item.largest_batch),
        f"{item.seconds:,.3g}",
    ]
