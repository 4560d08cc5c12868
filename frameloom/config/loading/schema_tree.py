"""The schema as a tree: every key with its path, its type in plain words, an example, and the key that was meant."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from frameloom.config.loading.yaml_values import KeyPath, format_value, shorten
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.section import ExpectedText, Section
from frameloom.core.spelling import nearest, share_words

# Keys that had another name: the old one, and the new one in the same section.
RENAMED = {
    "autoencoder.discriminator.turns": "autoencoder.discriminator.update",
    "data.alike": "data.cost_group",
    "data.cache.foreign": "data.cache.external",
    "data.cache.foreign_folders": "data.cache.external_folders",
    "data.cache.foreign_name": "data.cache.external_name",
    "objective.law": "objective.distribution",
    "objective.strata": "objective.stratified_levels",
    "train.halve": "train.oom_split",
    "train.park_encoders": "train.encoder_offload",
    "train.rehearse": "train.preflight",
}

# Keys of other trainers, and where the same setting is in a recipe.
SYNONYMS = {
    "learning_rate": "optim.lr",
    "optimizer": "optim",
    "lr_scheduler": "optim.schedule.name",
    "lr_warmup_steps": "optim.schedule.warmup_steps",
    "scheduler": "optim.schedule.name",
    "adam_eps": "optim.eps",
    "adam_epsilon": "optim.eps",
    "adam_betas": "optim.betas",
    "optim_eps": "optim.eps",
    "adam_weight_decay": "optim.weight_decay",
    "group_strategy": "optim.decay_norms",
    "use_came": "optim.name",
    "use_8bit_adam": "optim.name",
    "trainable_modules": "optim.trainable",
    "trainable_modules_low_learning_rate": "optim.groups",
    "initial_grad_norm_ratio": "optim.clip_fade.ratio",
    "abnormal_norm_clip_start": "optim.clip_fade.fade_steps",
    "start_learning_rate": "optim.lr",
    "base_learning_rate": "optim.lr",
    "end_learning_rate": "optim.schedule.min_share",
    "lr_decay_steps": "optim.schedule.decay_steps",
    "lr_num_cycles": "optim.schedule.num_cycles",
    "lr_power": "optim.schedule.power",
    "max_grad_norm": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "gradient_clipping": "optim.clip_norm",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "max_train_steps": "train.steps",
    "gradient_accumulation_steps": "train.accumulate",
    "accumulation_steps": "train.accumulate",
    "mixed_precision": "train.precision",
    "dtype": "train.precision",
    "gradient_checkpointing": "train.recompute",
    "grad_checkpoint": "train.recompute",
    "use_recompute": "train.recompute",
    "num_no_recompute": "train.recompute.skip",
    "grad_ckpt_settings": "train.recompute.blocks",
    "grad_ckpt_setting": "train.recompute.blocks",
    "grad_ckpt_buffer_size": "train.recompute.offload",
    "torch_compile": "train.compile",
    "ema_decay": "train.ema.decay",
    "use_ema": "train.ema",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "loss_scaler_type": "train.loss_scale.mode",
    "init_loss_scale": "train.loss_scale.initial",
    "initial_scale": "train.loss_scale.initial",
    "loss_scale_factor": "train.loss_scale.factor",
    "scale_window": "train.loss_scale.window",
    "param_fp16": "train.weights_precision",
    "vae_precision": "vae.precision",
    "vae_fp32": "vae.precision",
    "disable_first_stage_amp": "vae.precision",
    "vae_keep_gn_fp32": "vae.fp32_norms",
    "text_encoder_precision": "text.encoders.0.precision",
    "val_interval": "validation.every",
    "ckpt_save_interval": "train.save_every",
    "log_interval": "train.log_every",
    "checkpointing_steps": "train.save_every",
    "ckpt_every": "train.save_every",
    "checkpoint_every": "train.save_every",
    "batch_size": "data.buckets",
    "train_batch_size": "data.buckets",
    "bucket_config": "data.buckets",
    "dataset": "data",
    "num_workers": "data.workers",
    "num_bad": "data.bad_limit",
    "output_dir": "run.folder",
    "outputs": "run.folder",
    "random_seed": "seed",
    "guidance_scale": "sample.guidance",
    "cfg_scale": "sample.guidance",
    "num_inference_steps": "sample.steps",
    "num_frames": "sample.frames",
    "text_encoder": "text.encoders",
    "caption_dropout": "text.dropout",
    "snr_gamma": "objective.min_snr_gamma",
    "loss": "objective.kind",
    "prediction_type": "objective.kind",
} | {old.rpartition(".")[2]: new for old, new in RENAMED.items()}


@dataclass(frozen=True)
class Kind:
    """The type of one place in the recipe: what pydantic calls annotation and metadata."""

    annotation: Any
    metadata: tuple[Any, ...] = ()

    @classmethod
    def of(cls, annotation: Any, metadata: Sequence[Any] = ()) -> Kind:
        """Unpack `Annotated[...]` and pydantic's `Field(...)` inside it."""
        flat: list[Any] = []
        for item in metadata:
            flat.extend(item.metadata if isinstance(item, FieldInfo) else [item])
        if get_origin(annotation) is Annotated:
            inner, *outer = get_args(annotation)
            return cls.of(inner, [*flat, *outer])
        return cls(annotation, tuple(flat))

    @property
    def options(self) -> list[Kind]:
        """The alternatives of a union; a plain type is its only one."""
        if get_origin(self.annotation) in (Union, types.UnionType):
            return [Kind.of(option) for option in get_args(self.annotation)]
        return [self]

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """The section class, also of one that may be null; several where `kind` chooses between them."""
        classes = [option.annotation for option in self.options]
        return tuple(one for one in classes if isinstance(one, type) and issubclass(one, Section))

    @property
    def fields(self) -> Mapping[str, FieldInfo]:
        """The keys of a section, of all kinds together; none for anything else."""
        return merge_fields(self.sections)

    @property
    def is_list(self) -> bool:
        return any(get_origin(option.annotation) is tuple for option in self.options)

    @property
    def item(self) -> Kind | None:
        """What every item of a list of any length, or every value of a mapping, must be."""
        for option in self.options:
            args = get_args(option.annotation)
            if get_origin(option.annotation) is dict:
                return Kind.of(args[1])
            if get_origin(option.annotation) is tuple and args[-1] is Ellipsis:
                return Kind.of(args[0])
        return None

    def child(self, key: str) -> Kind | None:
        """The type below this one at `key`; None when there can be nothing."""
        if self.fields:
            return field_kind(self.fields[key]) if key in self.fields else None
        if self.annotation is Any:
            return self
        if self.item is not None:
            return self.item if not self.is_list or key.isdecimal() else None
        for option in self.options:
            args = get_args(option.annotation)
            if get_origin(option.annotation) is tuple and key.isdecimal() and int(key) < len(args):
                return Kind.of(args[int(key)])
        return None

    def accepts(self, plain: type) -> bool:
        return any(option.annotation is plain for option in self.options)


@functools.cache
def merge_fields(sections: tuple[type[Section], ...]) -> Mapping[str, FieldInfo]:
    """The keys of all these sections; one that is a choice in each, as `kind` is, takes the choices of all."""
    merged = {name: field for section in reversed(sections) for name, field in section.model_fields.items()}
    if len(sections) < 2:
        return merged
    kinds: Any = tuple(word for section in sections for word in get_args(section.model_fields["kind"].annotation))
    first = sections[0].model_fields["kind"]
    merged["kind"] = FieldInfo(
        annotation=cast(Any, Literal[kinds]), default=first.default, description=first.description
    )
    return {name: merged[name] for section in sections for name in section.model_fields}


def readers_of(sections: tuple[type[Section], ...], key: str) -> list[str]:
    """The values of `kind` whose section has the key."""
    return [
        kind
        for section in sections
        if key in section.model_fields
        for kind in get_args(section.model_fields["kind"].annotation)
    ]


ROOT = Kind(Recipe)


@dataclass(frozen=True)
class Key:
    """One key of the recipe; keys of a list of sections have "0" in their path."""

    path: KeyPath
    field: FieldInfo

    @property
    def kind(self) -> Kind:
        return field_kind(self.field)

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


def field_kind(field: FieldInfo) -> Kind:
    return Kind.of(field.annotation, field.metadata)


@functools.cache
def walk() -> tuple[Key, ...]:
    """Every key, a section before the keys inside it."""
    return tuple(_walk_fields(ROOT.fields, ()))


def _walk_fields(fields: Mapping[str, FieldInfo], prefix: KeyPath) -> Iterator[Key]:
    for name, field in fields.items():
        key = Key((*prefix, name), field)
        yield key
        if key.kind.fields:
            yield from _walk_fields(key.kind.fields, key.path)
        elif key.kind.item is not None:
            yield from _walk_fields(key.kind.item.fields, (*key.path, "0"))


def kind_at(path: KeyPath) -> Kind | None:
    """The type at a path; None when the recipe has no such place."""
    kind: Kind | None = ROOT
    for key in path:
        kind = kind.child(key) if kind is not None else None
    return kind


def field_at(path: KeyPath) -> FieldInfo | None:
    parent = kind_at(path[:-1]) if path else None
    return parent.fields.get(path[-1]) if parent else None


def format_type(kind: Kind) -> str:
    """The type in plain words, to be read after "expected"."""
    words = next((item.text for item in kind.metadata if isinstance(item, ExpectedText)), None)
    if words:
        return words
    if len(kind.sections) > 1:
        return f"a section with the keys {', '.join(kind.fields)}"
    if len(kind.options) > 1:
        return join_words(
            [format_type(option) for option in sorted(kind.options, key=lambda option: option.accepts(type(None)))]
        )
    if kind.fields:
        return f"a section with the keys {', '.join(kind.fields)}"
    args = get_args(kind.annotation)
    match get_origin(kind.annotation) or kind.annotation:
        case origin if origin is Literal:
            return join_words([format_value(value) for value in args])
        case origin if origin is tuple and args[-1] is Ellipsis:
            return f"a list, each item {format_type(Kind.of(args[0]))}"
        case origin if origin is tuple and len({format_type(Kind.of(item)) for item in args}) == 1:
            return f"a list of {len(args)}, each {format_type(Kind.of(args[0]))}"
        case origin if origin is tuple:
            return f"a list of {len(args)}: " + ", then ".join(format_type(Kind.of(item)) for item in args)
        case origin if origin is dict:
            return f"a mapping, each value {format_type(Kind.of(args[1]))}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(kind.annotation, "any value") + _format_bounds(kind.metadata)


def _format_bounds(metadata: Sequence[Any]) -> str:
    lower = next((item for item in metadata if isinstance(item, Ge | Gt)), None)
    upper = next((item for item in metadata if isinstance(item, Le | Lt)), None)
    if isinstance(lower, Ge) and isinstance(upper, Le):
        return f" from {lower.ge} to {upper.le}"
    parts = []
    if lower is not None:
        parts.append(f"of at least {lower.ge}" if isinstance(lower, Ge) else f"above {lower.gt}")
    if upper is not None:
        parts.append(f"at most {upper.le}" if isinstance(upper, Le) else f"below {upper.lt}")
    return f" {' and '.join(parts)}" if parts else ""


def join_words(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def default_of(field: FieldInfo) -> Any:
    """The default as plain data (lists, dictionaries); only for fields that have one."""
    default = field.default
    if isinstance(default, Section):
        return default.model_dump(mode="json")
    if isinstance(default, tuple):
        return [item.model_dump(mode="json") if isinstance(item, Section) else item for item in default]
    return default


def example_of(field: FieldInfo) -> Any:
    """A value that would be right, or None when the description must do."""
    if field.examples:
        return field.examples[0]
    default = None if field.is_required() else default_of(field)
    return None if isinstance(default, dict) else default


def explain_unknown(path: KeyPath) -> tuple[str, KeyPath | None]:
    """Why the last key of `path` is wrong and which key was meant, if that can be told."""
    parents, key = path[:-1], path[-1]
    parent = kind_at(parents)
    known = list(parent.fields) if parent else []
    text = f"{'.'.join(parents) or 'the recipe'} has no key '{shorten(key)}'; "
    meant = _find_meant(parents, key, known)
    if not meant:
        return text + f"known keys: {', '.join(known)}", None
    if meant[0][:-1] == parents:
        return text + f"did you mean '{meant[0][-1]}'?", meant[0]
    homes = join_words([".".join(place) for place in meant])
    if meant[0][-1] == key and len(meant[0]) > 1:
        return text + f"'{key}' belongs to {join_words(['.'.join(place[:-1]) for place in meant])}: {homes}", meant[0]
    return text + f"did you mean {homes}?", meant[0]


def _find_meant(parents: KeyPath, key: str, known: list[str]) -> list[KeyPath]:
    """Where the key's idea lives, the surest guess first: a slip of the pen before another trainer's name for it."""
    if near := nearest(key, known):
        return [(*parents, near)]
    places = [item.path for item in walk()]
    if exact := [place for place in places if place[-1] == key]:
        # A key of the recipe itself is meant before one of a list's sections, and the least deep one before others.
        exact = [place for place in exact if "0" not in place] or exact
        return [place for place in exact if len(place) == min(map(len, exact))]
    synonym = SYNONYMS.get(nearest(key, SYNONYMS) or "", "")
    home = tuple(synonym.split(".")) if synonym else ()
    if home and home[: len(parents)] == parents:
        return [home]
    if (part := share_words(key, known)) is not None:
        return [(*parents, part)]
    if home:
        return [home]
    near = nearest(key, {place[-1] for place in places})
    return [place for place in places if place[-1] == near]
