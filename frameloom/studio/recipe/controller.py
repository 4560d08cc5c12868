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
from frameloom.data.manifest.filters import check_recipe_filters
from frameloom.studio.recipe.files import find_recipe_file, set_key
from frameloom.studio.recipe.form import build_fields, read_values
from frameloom.studio.server.context import StudioContext
from frameloom.studio.server.markup import data_table, fact_tiles, format_time, note, problem_list

if TYPE_CHECKING:
    from frameloom.planner.estimate import RunPlan


NEW = "new recipe"


@dataclass(frozen=True)
class Checked:
    """What the checks found. `values` is None while the text cannot be read at all."""

    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    recipe: Recipe | None = None
    values: dict[KeyPath, Any] | None = None


class RecipeController:
    """Event handlers; existing files are never overwritten."""

    def __init__(self, context: StudioContext) -> None:
        self.context = context
        self.fields = build_fields()

    def open(self, name: str) -> tuple[str, str]:
        """(text, a name to save it under): a file as it stands, or a new recipe on top of a shipped one."""
        file = find_recipe_file(self.context, name)
        if file.is_relative_to(SHIPPED):
            base = file.relative_to(SHIPPED).with_suffix("").as_posix()
            title = f"# Based on {base}; keys in this file override it.\n"
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
            file = self._file(name)
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
            check_files(recipe, locations=draft.locations)
        except ConfigError as error:
            return Checked([], error.problems, recipe, values)
        return Checked([], [], recipe, values)

    def _file(self, name: str) -> Path:
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
            raise ConfigError([f"not saved, {len(found.problems)} to fix first:", *found.problems[:3]])
        file = self._file(name)
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
    recipe = found.recipe
    part: Any = recipe.vae if recipe.task == "autoencoder" else recipe.model
    name = recipe.vae.name if recipe.task == "autoencoder" else recipe.model.family
    length = f"{recipe.train.epochs} epoch(s)" if recipe.train.steps is None else f"{recipe.train.steps:,} steps"
    answer = note(f"The recipe is valid. Trains {recipe.task} {name} {part.size} for {length}.", kind="good")
    if found.missing:
        answer += note("Missing, and needed before a run:")
        answer += "".join(note(f"· {problem}") for problem in found.missing)
    return answer


_GB = 1e9
_MAX_ROWS = 60


def show_plan(context: StudioContext, recipe: Recipe, device: str, num_devices: int, memory: str) -> str:
    """Estimate memory and time (from shapes, without weights) and show them."""
    # The planner imports the models; the page starts faster without them.
    from frameloom.planner.devices import choose_device
    from frameloom.planner.estimate import measure_recipe, plan_run
    from frameloom.planner.suggest import balance_tokens, format_balance, suggest_change

    chosen = choose_device(device, memory.strip() or None)
    measured = measure_recipe(recipe)
    named = [recipe.data.manifest, *(source.path for source in recipe.data.sources)]
    paths = [(context.root / name).resolve() for name in named if name]
    reads_data = bool(paths) and all(path.is_relative_to(context.root) and path.exists() for path in paths)
    plan = plan_run(recipe, chosen, num_devices, with_data=reads_data, measured=measured)
    parts = [fact_tiles(_summarize(plan))]
    if plan.breaking:
        change = suggest_change(recipe, plan, num_devices, measured)
        helps = (
            f"the smallest change that helps: {change.format()}" if change else "no sharding, recompute or batch helps"
        )
        worst = plan.breaking[0].bucket.name
        parts.append(note(f"{len(plan.breaking)} bucket(s) do not fit, the worst is {worst}; {helps}.", kind="bad"))
    else:
        parts.append(note("Every bucket fits.", kind="good"))
    header = ["bucket", "tokens", "batch", "activations", "total", "fits", "largest batch", "seconds"]
    rows = [
        [
            item.bucket.name,
            f"{item.tokens:,}",
            str(item.bucket.batch_size),
            f"{'' if item.is_measured else '~'}{item.activations / _GB:,.2f} GB",
            f"{item.total / _GB:,.2f} GB",
            "yes" if item.total <= plan.device.memory else "no",
            str(item.largest_batch),
            f"{item.seconds:,.3g}",
        ]
        for item in plan.buckets[:_MAX_ROWS]
    ]
    parts.append(data_table(header, rows, numbers=range(1, 8)))
    if len(plan.buckets) > _MAX_ROWS:
        parts.append(note(f"And {len(plan.buckets) - _MAX_ROWS} more."))
    if balance := balance_tokens(recipe, plan, num_devices, measured):
        parts.append(note(f"Better: {format_balance(balance)}."))
    if not reads_data:
        parts.append(note("No times of an epoch: the manifest is missing, or outside the folder."))
    return "".join(parts)


def _summarize(plan: RunPlan) -> dict[str, str]:
    worst = max(plan.buckets, key=lambda item: item.total)
    facts = {
        "weights": f"{plan.size.weights / 1e6:,.1f} M",
        "trained": f"{plan.size.trained / 1e6:,.1f} M",
        f"largest bucket, of {plan.device.format_memory()}": f"{worst.total / _GB:,.2f} GB",
        "slowest micro-batch": f"{max(item.seconds for item in plan.buckets):,.3g} s",
        "a checkpoint": f"{plan.checkpoint / _GB:,.2f} GB",
    }
    if plan.epoch is not None:
        seconds = plan.epoch.seconds
        facts["steps in an epoch"] = f"{plan.epoch.steps:,}"
        facts["an epoch"] = f"{seconds:,.3g} s" if seconds < 120 else format_time(seconds)
    return facts
