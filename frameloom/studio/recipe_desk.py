"""What the place Recipe does: read, check, change, save and plan the text of a recipe; no layout in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frameloom.config.checks import check_files
from frameloom.config.load import SHIPPED, check_draft, read_draft_text
from frameloom.config.schema import Recipe
from frameloom.config.yaml_values import KeyPath, format_value, read_text
from frameloom.core.errors import ConfigError, FrameloomError
from frameloom.core.files import write_text
from frameloom.data.filters import check_recipe_filters
from frameloom.studio.context import StudioContext
from frameloom.studio.markup import note, problem_list
from frameloom.studio.recipe_form import build_fields, read_values
from frameloom.studio.recipe_list import find_recipe_file
from frameloom.studio.recipe_text import set_key

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
