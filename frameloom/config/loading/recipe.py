"""Loading of recipes: find the file, merge its bases and overrides, check types and rules. Imports no model.

Precedence, the last wins: the schema's defaults, each `_base_` in order, the file itself, the command line.

    recipe = load_recipe("shapes/demo-vae", {"optim.lr": 1e-5})
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frameloom.config.loading.overrides import DELETE, apply_override, parse_overrides
from frameloom.config.loading.problems import MAX_EXPLAINED, parse_recipe
from frameloom.config.loading.renamed import rename_keys
from frameloom.config.loading.yaml_values import KeyPath, parse_document, read_text
from frameloom.config.rules.check import check_rules, format_problem
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError
from frameloom.core.spelling import nearest

SHIPPED = Path(__file__).parents[2] / "recipes"
BASE = "_base_"
MAX_FILES = 100


@dataclass
class Draft:
    """A recipe before its types are checked, and where each of its keys was written."""

    name: str
    value: dict[str, Any] = field(default_factory=dict)
    locations: dict[KeyPath, str] = field(default_factory=dict)
    num_files: int = 0
    # Where inherited files must lie, besides the shipped ones; None: anywhere.
    inside: Path | None = None


Source = str | Path | Mapping[str, Any] | Recipe
"""A recipe file, the name of a shipped recipe, the same keys as a dictionary, or a recipe that was loaded."""
Overrides = Sequence[str] | Mapping[str, Any]
"""The words of a command line, or values by dotted key."""


def load_recipe(source: Source, overrides: Overrides = ()) -> Recipe:
    """The checked recipe; one ConfigError lists everything that is wrong."""
    return load_with_locations(source, overrides)[0]


def load_with_locations(source: Source, overrides: Overrides = ()) -> tuple[Recipe, dict[KeyPath, str]]:
    """The checked recipe and the `file:line` or flag behind each key, for messages about it later on."""
    draft, problems = _read_draft(source, overrides)
    return _check(draft.value, draft.locations, draft.name, problems), draft.locations


def read_draft_text(text: str, *, file: Path, shown: str, inside: Path) -> Draft:
    """What `text` says if it stands in `file`, which need not exist; it inherits only from files below `inside`."""
    draft = Draft(shown, inside=inside.resolve())
    _add_text(draft, text, file, shown, ())
    return draft


def check_draft(draft: Draft) -> Recipe:
    """The checked recipe of a draft; one ConfigError lists everything that is wrong."""
    return _check(draft.value, draft.locations, draft.name, [])


def resolve(source: Source, overrides: Overrides = ()) -> dict[str, Any]:
    """The plain recipe after inheritance and overrides: no defaults filled in, types not checked."""
    draft, problems = _read_draft(source, overrides)
    if problems:
        raise ConfigError(problems)
    return draft.value


def recipe_from_dict(value: Mapping[str, Any], *, name: str = "recipe") -> Recipe:
    """The checked recipe of plain data, such as one kept with a run."""
    value = copy.deepcopy(dict(value))
    rename_keys(value, {}, name=name)
    return _check(value, {}, name, [])


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: a path, or the name of a shipped recipe with or without `.yaml`."""
    path = Path(name)
    if _exists(path) and not path.is_dir():
        return path
    shipped = _find_shipped(str(name))
    if shipped is not None or _exists(path):
        return shipped or path
    known = [known for known, _ in shipped_recipes()]
    near = nearest(str(name).removesuffix(".yaml"), known)
    hint = f"did you mean the shipped '{near}'?" if near else "`frameloom recipe list` shows the shipped recipes"
    raise ConfigError(f"{name}: no such file and no shipped recipe of that name; {hint}")


def shipped_recipes() -> list[tuple[str, str]]:
    """Name and title of each recipe in the package; the title is the file's first comment line."""
    found = []
    for file in sorted(SHIPPED.rglob("*.yaml")):
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        title = first.lstrip("# ").strip() if first.startswith("#") else ""
        found.append((file.relative_to(SHIPPED).with_suffix("").as_posix(), title))
    return found


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long for the file system, or with a null byte
        return False


def _find_shipped(name: str) -> Path | None:
    if name.startswith("/") or ".." in Path(name).parts:
        return None
    file = SHIPPED / (name if name.endswith(".yaml") else f"{name}.yaml")
    return file if _exists(file) and file.is_file() else None


def _read_draft(source: Source, overrides: Overrides) -> tuple[Draft, list[str]]:
    """Inheritance and overrides; what is wrong with the overrides is listed, not raised, so that all can be told."""
    if isinstance(source, str | Path):
        file = find_recipe(source)
        shown = str(source) if file == Path(source) else file.relative_to(SHIPPED).as_posix()
        draft = Draft(shown)
        _add_file(draft, file, shown, ())
    else:
        draft = Draft("recipe")
        value = source.model_dump(mode="json") if isinstance(source, Recipe) else dict(source)
        _add_text(draft, json.dumps(value, default=str, ensure_ascii=False), Path("recipe"), "recipe", ())
        draft.locations.clear()  # a dictionary has no lines
    good, problems = parse_overrides(to_words(overrides))
    for override in good:
        try:
            apply_override(draft.value, override)
        except ConfigError as error:
            problems.extend(error.problems)
        _forget_below(draft.locations, override.path)
        draft.locations[override.path] = override.flag
    return draft, problems


def to_words(overrides: Overrides) -> Sequence[str]:
    """Overrides as the words of a command line; JSON is YAML, and plain text needs no quotes."""
    if not isinstance(overrides, Mapping):
        return overrides
    texts = {
        key: str(value) if isinstance(value, str | Path) else json.dumps(value, default=str)
        for key, value in overrides.items()
    }
    return [word for key, text in texts.items() for word in (f"--{key}", text)]


def _add_file(draft: Draft, file: Path, shown: str, chain: tuple[tuple[Path, str], ...]) -> None:
    """Lay the bases of `file` and then the file itself over the draft; `chain` are the files that led here."""
    resolved = file.resolve()
    names = " -> ".join([*(name for _, name in chain), shown])
    if resolved in [path for path, _ in chain]:
        raise ConfigError(f"{shown}: _base_ goes in a circle: {names}; remove one of these _base_ lines")
    draft.num_files += 1
    if draft.num_files > MAX_FILES:
        raise ConfigError(f"{shown}: more than {MAX_FILES} files are inherited ({names}); use fewer _base_ lines")
    _add_text(draft, read_text(file, shown=shown), file, shown, chain)


def _add_text(draft: Draft, text: str, file: Path, shown: str, chain: tuple[tuple[Path, str], ...]) -> None:
    names = " -> ".join([*(name for _, name in chain), shown])
    value, lines = parse_document(text, where=shown)
    if not isinstance(value, dict):
        found = "empty" if value is None else "a list" if isinstance(value, list) else "a single value"
        raise ConfigError(f"{shown}: the file is {found}; a recipe is keys and values, e.g. 'name: my-run'")
    location = f"{shown}:{lines.get((BASE,), 1)}"
    bases = value.pop(BASE, [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        raise ConfigError(f"{location}: _base_ is neither a name nor a list of names; e.g. _base_: shapes/demo-vae")
    for base in bases:
        base_file, base_shown = _find_base(base, file, shown, names, location)
        real, inside = base_file.resolve(), draft.inside
        if inside is not None and not (real.is_relative_to(inside) or real.is_relative_to(SHIPPED.resolve())):
            text = f"the _base_ '{base}' lies outside {inside}; move it below, or name a shipped recipe"
            raise ConfigError(f"{location}: {text}")
        _add_file(draft, base_file, base_shown, (*chain, (file.resolve(), shown)))
    locations = {path: f"{shown}:{line}" for path, line in lines.items()}
    rename_keys(value, locations, name=shown)
    _overlay(draft.value, value, (), draft.locations, locations)


def _find_base(base: str, file: Path, shown: str, names: str, location: str) -> tuple[Path, str]:
    beside = file.parent / base
    for candidate in (beside, beside.with_name(f"{beside.name}.yaml")):
        if _exists(candidate) and candidate.is_file():
            written = os.path.join(os.path.dirname(shown), base) + candidate.name[len(beside.name) :]
            return candidate, os.path.normpath(written)
    shipped = _find_shipped(base)
    if shipped is not None:
        return shipped, shipped.relative_to(SHIPPED).as_posix()
    near = nearest(base.removesuffix(".yaml"), [name for name, _ in shipped_recipes()])
    hint = f"did you mean '{near}'?" if near else f"a name is relative to {file.parent}, or that of a shipped recipe"
    raise ConfigError(f"{location}: the _base_ '{base}' does not exist (read so far: {names}); {hint}")


def _overlay(
    target: dict[str, Any],
    value: dict[str, Any],
    path: KeyPath,
    locations: dict[KeyPath, str],
    new: Mapping[KeyPath, str],
) -> None:
    """Merge `value` into `target`: dictionaries deeply, all else replaced; `locations` follows."""
    delete = value.get(DELETE, False)
    if not isinstance(delete, bool):
        raise ConfigError(f"{new.get((*path, DELETE), '_delete_')}: _delete_ is '{delete}'; write true or remove it")
    if delete:
        target.clear()
        _forget_below(locations, path)
    for key, item in value.items():
        here = (*path, key)
        if key == DELETE:
            continue
        if key in target and not (isinstance(item, dict) and isinstance(target[key], dict)):
            _forget_below(locations, here)
            del target[key]
        # What came in by an alias has no lines of its own; the nearest section around it then stands for it.
        locations.pop(here, None)
        if isinstance(item, dict):
            locations.update({here: new[here]} if here in new else {})
            _overlay(target.setdefault(key, {}), item, here, locations, new)
        else:
            target[key] = copy.deepcopy(item)
            locations.update({here: new[here]} if here in new else {})
            if isinstance(item, list):
                locations.update({path: location for path, location in new.items() if path[: len(here)] == here})


def _forget_below(locations: dict[KeyPath, str], path: KeyPath) -> None:
    for known in [known for known in locations if known[: len(path)] == path != known]:
        del locations[known]


def _check(value: Mapping[str, Any], locations: Mapping[KeyPath, str], name: str, problems: Sequence[str]) -> Recipe:
    recipe, wrong = parse_recipe(value)
    found = list(wrong)
    for problem in check_rules(recipe) if recipe is not None else ():
        # A finding that rests on a key that was already wrong may be an echo of that mistake.
        pairs = [(key, other.path) for key in (problem.path, *problem.also) for other in wrong]
        if not any(key[: len(path)] == path or path[: len(key)] == key for key, path in pairs):
            found.append(problem)
    messages = [*problems, *(format_problem(problem, locations, name) for problem in found)]
    if len(messages) > MAX_EXPLAINED:
        messages[MAX_EXPLAINED:] = [f"{name}: {len(messages) - MAX_EXPLAINED} more problems; is this the right file?"]
    if messages or recipe is None:
        raise ConfigError(messages)
    return recipe
