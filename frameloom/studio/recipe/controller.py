"""Event handlers of the Recipe tab: read, check, edit, save and plan a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frameloom.config.loading.recipe import SHIPPED, check_draft, read_draft_text
from frameloom.config.loading.yaml_values import KeyPath, format_value, read_text
from frameloom.config.rules.check import check_files
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError, FrameloomError
from frameloom.core.files import write_text
from frameloom.core.units import format_bytes, format_duration
from frameloom.data.manifest.filters import check_recipe_filters
from frameloom.studio.recipe.files import find_recipe_file, set_key
from frameloom.studio.recipe.form import build_fields, read_values
from frameloom.studio.server.context import StudioContext
from frameloom.studio.server.markup import data_table, fact_tiles, note, problem_list

if TYPE_CHECKING:
    from frameloom.planner.estimate import BucketPlan, RunPlan


NEW = "new recipe"


@dataclass(frozen=True)
class Checked:
    """What the checks found. `values` is None while the text cannot be read at all."""

    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    recipe: Recipe | None = None
    values: dict[KeyPath, Any] | None = None


class RecipeDesk:
    """Texts come from the page and go back to it; files are only read, and written under new names."""

    def __init__(self, context: StudioContext) -> None:
        self.context = context
        self.fields = build_fields()

    def open(self, name: str) -> tuple[str, str]:
        """(text, a name to save it under): a file as it stands, or a new recipe on top of a shipped one."""
        file = find_recipe_file(self.context, name)
        if file.is_relative_to(SHIPPED):
            base = file.relative_to(SHIPPED).with_suffix("").as_posix()
            title = f"# On top of {base}: what stands here wins over it.\n"
            return f"{title}_base_: {format_value(base)}\nname: {file.stem}\n", self.free_name(f"{file.stem}.yaml")
        return read_text(file, shown=name), self.free_name(name)

    def free_name(self, name: str) -> str:
        """A name below the root that is not taken."""
        path = Path(name)
        stem, number = path.with_suffix("").as_posix(), 2
        candidate = f"{stem}.yaml"
        while (self.context.root / candidate).exists():
            candidate, number = f"{stem}-{number}.yaml", number + 1
        return candidate

    def check(self, text: str, name: str) -> Checked:
        """Everything that `frameloom recipe check` says, and the values for the form."""
        if len(text) > self.context.limits.text_chars:
            return Checked([f"{len(text):,} characters; a recipe has at most {self.context.limits.text_chars:,}"])
        try:
            file = self._place(name)
            draft = read_draft_text(text, file=file, shown=file.name, inside=self.context.root)
        except ConfigError as error:
            return Checked(error.problems)
        values = read_values(draft.value, self.fields)
        try:
            recipe = check_draft(draft)
            check_recipe_filters(recipe)
        except FrameloomError as error:
            return Checked(getattr(error, "problems", [str(error)]), values=values)
        try:
            check_files(recipe, places=draft.places)
        except ConfigError as error:
            return Checked([], error.problems, recipe, values)
        return Checked([], [], recipe, values)

    def _place(self, name: str) -> Path:
        """Where the text would stand: relative names of `_base_` start from there."""
        wanted = name.strip() or "recipe.yaml"
        return self.context.resolve(wanted if wanted.endswith((".yaml", ".yml")) else f"{wanted}.yaml", where="save as")

    def set_field(self, text: str, name: str, path: KeyPath, value: Any) -> str | None:
        """The text with one key set; None when the recipe has that value already, by itself or from a base."""
        values = self.check(text, name).values
        if values is not None and values[path] == value and type(values[path]) is type(value):
            return None
        return set_key(text, path, value, where="recipe")

    def save(self, text: str, name: str) -> str:
        """Write a recipe without problems to a new file; its name relative to the root."""
        found = self.check(text, name)
        if found.problems:
            raise ConfigError([f"not saved, {len(found.problems)} to put right first:", *found.problems[:3]])
        file = self._place(name)
        if not name.strip():
            raise ConfigError("no name to save it under; e.g. my-run.yaml")
        if file.exists():
            raise ConfigError(f"{name}: exists already and is never overwritten; e.g. {self.free_name(name)}")
        write_text(file, text if text.endswith("\n") else f"{text}\n")
        return self.context.name_of(file)


def describe_check(found: Checked) -> str:
    """The answer of the checks as HTML."""
    if found.problems:
        return problem_list(found.problems)
    assert found.recipe is not None
    words = note(f"No mistake in it. {describe_recipe(found.recipe)}", kind="good")
    if found.missing:
        words += note("Not there yet, and needed before a run:") + problem_note(found.missing)
    return words


def problem_note(problems: list[str]) -> str:
    return "".join(note(f"· {problem}") for problem in problems)


def describe_recipe(recipe: Recipe) -> str:
    trained = f"{recipe.model.family} {recipe.model.size}"
    if recipe.task == "autoencoder":
        trained = f"{recipe.vae.name} {recipe.vae.size}"
    length = f"{recipe.train.epochs} epoch(s)" if recipe.train.steps is None else f"{recipe.train.steps:,} steps"
    return f"Trains {recipe.task} {trained} for {length}."


_MAX_ROWS = 60


def show_plan(context: StudioContext, recipe: Recipe, device: str, num_devices: int, memory: str) -> str:
    """Work the plan out (shapes only, no weights) and show it."""
    # The planner brings the models along; a page that plans nothing starts without them.
    from frameloom.planner.devices import choose_device
    from frameloom.planner.estimate import measure_recipe, plan_run
    from frameloom.planner.suggest import balance_tokens, format_balance, suggest_change

    chosen = choose_device(device, memory.strip() or None)
    measured = measure_recipe(recipe)
    reads_data = _data_is_below(context, recipe)
    plan = plan_run(recipe, chosen, num_devices, with_data=reads_data, measured=measured)
    change = suggest_change(recipe, plan, num_devices, measured)
    parts = [fact_tiles(_facts(plan)), _verdict(plan, change.describe() if change else None), _table(plan)]
    if balance := balance_tokens(recipe, plan, num_devices, measured):
        parts.append(note(f"Better: {format_balance(balance)}."))
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
        f"largest bucket, of {plan.device.describe_memory()}": format_bytes(worst.total),
        "slowest micro-batch": f"{max(item.seconds for item in plan.buckets):,.3g} s",
        "a checkpoint": format_bytes(plan.checkpoint),
    }
    if plan.epoch is not None:
        facts["steps in an epoch"] = f"{plan.epoch.steps:,}"
        facts["an epoch"] = format_duration(plan.epoch.seconds)
    return facts


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
        f"{about}{format_bytes(item.activations)}",
        format_bytes(item.total),
        "yes" if item.total <= memory else "no",
        str(item.largest_batch),
        f"{item.seconds:,.3g}",
    ]
