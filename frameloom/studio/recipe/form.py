"""Form fields for the main keys of a recipe, generated from its schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from frameloom.config.loading.schema_tree import Kind, default_of, field_at, field_kind
from frameloom.config.loading.yaml_values import KeyPath, format_value, parse_value
from frameloom.core.errors import ConfigError
from frameloom.models.registry import DENOISERS, VAES

# What most recipes set; every other key is written in the text beside the form.
MAIN_KEYS: dict[str, tuple[str, ...]] = {
    "": ("name", "task", "seed"),
    "run": ("folder", "resume"),
    "model": ("family", "size", "weights"),
    "lora": ("rank", "alpha", "weights"),
    "vae": ("name", "size", "weights", "precision"),
    "data": ("manifest", "root", "policy", "frame_start", "flip", "workers"),
    "text": ("dropout",),
    "objective": ("kind", "distribution", "shift"),
    "optim": ("name", "lr", "weight_decay", "clip_norm"),
    "train": ("steps", "epochs", "accumulate", "precision", "save_every", "log_every", "recompute", "device"),
    "parallel": ("zero", "sequence"),
    "validation": ("every", "batches"),
    "sample": ("steps", "guidance", "frames", "height", "width", "fps"),
}
_NULL = "null"
_FOLLOWS: dict[KeyPath, KeyPath] = {("model", "size"): ("model", "family"), ("vae", "size"): ("vae", "name")}
_NAMES: dict[KeyPath, tuple[str, ...]] = {("model", "family"): tuple(DENOISERS), ("vae", "name"): tuple(VAES)}


@dataclass(frozen=True)
class FormField:
    """One key on the form. `choices` is empty for free text; `is_open` lets other values be typed too."""

    path: KeyPath
    kind: Kind
    info: str
    default: Any
    choices: tuple[str, ...] = ()
    is_open: bool = False
    follows: KeyPath = ()
    """the field that the choices depend on"""

    @property
    def is_switch(self) -> bool:
        return self.kind.annotation is bool

    def show(self, value: Any) -> Any:
        """What the field displays for a value of the recipe."""
        if self.is_switch:
            return bool(value)
        if value is None:
            return _NULL if _NULL in self.choices else ""
        return value if isinstance(value, str) else format_value(value)

    def read(self, shown: Any) -> Any:
        """The value for what was typed; what cannot be a value stays text, and the checks say what is wrong."""
        if self.is_switch:
            return bool(shown)
        text = str(shown or "").strip()
        if text in ("", _NULL):
            return None
        if all(option.annotation in (str, type(None)) for option in self.kind.options):
            return text
        try:
            return parse_value(text, where=".".join(self.path))
        except ConfigError:
            return text


def build_fields() -> dict[str, list[FormField]]:
    """The fields of each section, in the order of the form."""
    return {section: [_make_field(section, name) for name in names] for section, names in MAIN_KEYS.items()}


def _make_field(section: str, name: str) -> FormField:
    path = (section, name) if section else (name,)
    field = field_at(path)
    assert field is not None, f"the recipe has no key {'.'.join(path)}"
    kind = field_kind(field)
    default = None if field.is_required() else default_of(field)
    about = field.description or ""
    if path in _NAMES:
        return FormField(path, kind, about, default, _NAMES[path], is_open=True)
    if path in _FOLLOWS or path == ("data", "manifest"):
        return FormField(path, kind, about, default, ("",), is_open=True, follows=_FOLLOWS.get(path, ()))
    literals = [option for option in kind.options if get_origin(option.annotation) is Literal]
    words = [format_value(word) for option in literals for word in get_args(option.annotation)]
    may_be_null = kind.accepts(type(None))
    is_closed = len(literals) + may_be_null == len(kind.options)
    choices = (*words, *([_NULL] if may_be_null else [])) if words and is_closed else ()
    return FormField(path, kind, about, default, choices)


def sizes_for(field: FormField, values: dict[KeyPath, Any]) -> list[str] | None:
    """The named sizes of the chosen family or autoencoder; None for a field that does not depend on another."""
    if not field.follows:
        return None
    name = str(values.get(field.follows))
    spec = DENOISERS.get(name) if field.follows[0] == "model" else VAES.get(name)
    return list(spec.sizes) if spec else []


def read_values(tree: dict[str, Any], fields: dict[str, list[FormField]]) -> dict[KeyPath, Any]:
    """The value of each field in a recipe before its types are checked; defaults where it says nothing."""
    values: dict[KeyPath, Any] = {}
    for field in (field for group in fields.values() for field in group):
        inner: Any = tree
        for name in field.path[:-1]:
            inner = inner.get(name, {}) if isinstance(inner, dict) else None
        # A section that is null as a whole has no values to show.
        is_absent = inner is None or (field.path[0] in _OPTIONAL and tree.get(field.path[0]) is None)
        known = isinstance(inner, dict) and field.path[-1] in inner
        values[field.path] = inner[field.path[-1]] if known else None if is_absent else field.default
    return values


_OPTIONAL = {
    section for section in MAIN_KEYS if section and (found := field_at((section,))) and default_of(found) is None
}
