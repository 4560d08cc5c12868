"""Convert weights between files, shards, model folders, pipelines and the key layouts of the model families.

Besides `load_original`, the module `weights` of a family may offer:

    export_original(model, layout)   its weights under published keys; without `layout` there is one form, "original"
    Layout                           a Literal with the names of its layouts
    read_config(published)           config of a published config.json; else `config_class.from_original(values)`
    SECTIONS                         tables of a .ckpt in order of preference, such as ("ema_state_dict", "state_dict")

All of it runs on deferred tensors and a model on the meta device, so it must not look at the numbers of a tensor.

Whole SDXL models, of several parts, are in `pipeline.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from frameloom.builders.published import find_config_reader, read_pipeline_index, weights_module
from frameloom.checkpoint.model_folder import TENSORS, write_model_folder
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import replace_folder
from frameloom.core.progress import ProgressBar
from frameloom.core.spelling import refuse_unknown
from frameloom.interop.convert.files import (
    Source,
    Target,
    check_space,
    check_target,
    open_source,
    strip_prefixes,
    strip_wrappers,
    write_sharded,
    write_single,
)
from frameloom.interop.convert.pipeline import open_pipeline, split_pipeline, write_pipeline_folder
from frameloom.models.precision import DTYPES
from frameloom.models.registry import DENOISERS, VAES, get_denoiser, get_vae
from frameloom.models.spec import DenoiserSpec, VAESpec
from frameloom.weights.files import CONFIG
from frameloom.weights.lazy_tensors import LazyTensors, cast_tensors, to_deferred, to_pending

Form = Literal["auto", "single", "sharded", "model", "pipeline"]
_SDXL = "StableDiffusionXL"  # the beginning of the class names of its pipelines


@dataclass(frozen=True)
class Conversion:
    """What to do. `to` "auto": a file for a name that ends with .safetensors, else a folder: of one of our models when
    a family is named and no layout, and of shards otherwise. `config` is a folder with what weights alone do not tell
    of a pipeline: tokenizers, the scheduler, and descriptions of parts that have no published size.
    """

    source: Path
    out: Path
    to: Form = "auto"
    shard_bytes: int = 5 * 10**9
    dtype: str = "keep"
    section: str = ""
    prefixes: tuple[str, ...] = ()
    family: str = ""
    size: str = ""
    layout: str = ""
    config: Path | None = None
    copy_tied: bool = False
    force: bool = False


@dataclass(frozen=True)
class Outcome:
    """What was written; `digests` are SHA-256 by file."""

    out: Path
    num_tensors: int
    num_tied: int
    num_bytes: int
    dtypes: Mapping[str, int]
    digests: Mapping[Path, str]

    def describe(self) -> list[str]:
        formats = ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
        tied = f", {self.num_tied} names tied to them" if self.num_tied else ""
        first = f"{self.out}: {self.num_tensors} tensors ({formats}){tied}, {self.num_bytes:,} bytes"
        return [first, *(f"sha256 {digest}  {self._name(path)}" for path, digest in self.digests.items())]

    def _name(self, path: Path) -> Path:
        return path.relative_to(self.out) if self.out in path.parents else Path(path.name)


@dataclass(frozen=True)
class _Architecture:
    """One of our models: the family's record, its shelf and the config of the weights."""

    kind: str
    family: DenoiserSpec | VAESpec
    config: Any


def convert_weights(task: Conversion) -> Outcome:
    """Read, rename, cast and write, one tensor at a time."""
    kind, family = _find_family(task.family) if task.family else ("", None)
    prefer = getattr(weights_module(family), "SECTIONS", ()) if family else ()
    if family is None and str(read_pipeline_index(task.source).get("_class_name")).startswith(_SDXL):
        source = open_pipeline(task.source)
    else:
        source = open_source(task.source, kind=kind, section=task.section, prefer=prefer)
    if family is None and source.name and task.layout:
        kind, family = _find_family(source.name)
    form = _choose_form(task, source)
    target = Target(task.out, is_folder=form != "single", force=task.force, is_pipeline=form == "pipeline")
    check_target(target, [task.source, *source.files])

    architecture = _read_architecture(task, kind, family, source) if family else None
    tensors = strip_prefixes(source.tensors, task.prefixes, where=str(source.path))
    tensors = strip_wrappers(tensors, where=str(source.path))
    if form == "pipeline":
        return _convert_pipeline(task, source, tensors)
    if architecture:
        tensors = _map_keys(architecture, tensors, task.layout)
    if task.dtype != "keep":
        tensors = cast_tensors(tensors, DTYPES[task.dtype])
    if task.copy_tied or form == "model":
        tensors = tensors.untied()
    check_space(task.out, tensors.num_bytes)
    with ProgressBar("converting tensors", total=len(tensors.pending)) as bar:
        digests = _write(task, form, source, architecture, tensors, bar)
    dtypes = Counter(str(one.dtype).removeprefix("torch.") for one in tensors.pending.values())
    return Outcome(task.out, len(tensors.pending), len(tensors.tied), tensors.num_bytes, dtypes, digests)


def _convert_pipeline(task: Conversion, source: Source, tensors: LazyTensors) -> Outcome:
    """All parts of a model, each into a folder of its own."""
    if task.dtype != "keep":
        tensors = cast_tensors(tensors, DTYPES[task.dtype])
    config = task.source if task.config is None and task.source.is_dir() else task.config
    if task.config is not None and not task.config.is_dir():
        raise ConfigError(f"--config {task.config}: no such folder; name one that holds unet/{CONFIG}, tokenizer/ ...")
    pipeline = split_pipeline(tensors, config=config, where=str(source.path))
    check_space(task.out, pipeline.num_bytes)
    with (
        ProgressBar("converting tensors", total=pipeline.num_tensors) as bar,
        _report_write_errors(task.out),
        replace_folder(task.out) as folder,
    ):
        written = write_pipeline_folder(
            folder, pipeline, max_bytes=task.shard_bytes, advance=lambda num_bytes: bar.advance()
        )
    dtypes = Counter(
        str(one.dtype).removeprefix("torch.") for part in pipeline.parts for one in part.tensors.pending.values()
    )
    digests = {task.out / name: digest for name, digest in written.items()}
    return Outcome(task.out, pipeline.num_tensors, 0, pipeline.num_bytes, dtypes, digests)


def _find_family(name: str) -> tuple[str, DenoiserSpec | VAESpec]:
    refuse_unknown(name, [*DENOISERS, *VAES], what="--family")
    return ("denoiser", get_denoiser(name)) if name in DENOISERS else ("vae", get_vae(name))


def _choose_form(task: Conversion, source: Source) -> Form:
    if task.config is not None and task.to != "pipeline":
        raise ConfigError("--config: only --to pipeline needs it; leave it out")
    is_own = bool(task.family or source.name) and not task.layout
    if task.to == "auto":
        if task.out.suffix.lower() == ".safetensors":
            return "single"
        return "model" if is_own else "sharded"
    if task.to == "pipeline" and (task.family or source.name or task.layout):
        raise ConfigError("--to pipeline: writes all parts of an SDXL model, so --family and --layout must be left out")
    if task.to == "model" and not is_own:
        raise ConfigError(
            "--to model: a model folder needs --family, and holds the model's own keys, so --layout must be left out"
        )
    return task.to


def _read_architecture(task: Conversion, kind: str, family: DenoiserSpec | VAESpec, source: Source) -> _Architecture:
    if source.name and source.name != family.name:
        raise ConfigError(
            f"--family {family.name}: {source.path} holds the {source.kind} '{source.name}'; leave it out"
        )
    if source.name:
        return _Architecture(kind, family, family.config_class(**source.config))
    if task.size:
        refuse_unknown(task.size, family.sizes, what=f"--size of {family.name}")
        return _Architecture(kind, family, family.sizes[task.size])
    read = find_config_reader(family)
    if read is None or not source.published:
        why = "no config.json lies beside the weights" if read else f"{family.name} reads no published config.json"
        raise ConfigError(f"--size: needed, because {why}; choose one of {', '.join(sorted(family.sizes))}")
    return _Architecture(kind, family, read(source.published))


def _map_keys(architecture: _Architecture, tensors: LazyTensors, layout: str) -> LazyTensors:
    """Through the family's own loading, which also refuses what does not fit, and out in the wanted layout."""
    family = architecture.family
    with torch.device("meta"):
        model = family.build(architecture.config)
    # A model on the meta device takes the tensors themselves instead of copying their numbers.
    family.load_original(model, to_deferred(tensors))  # type: ignore[arg-type]
    state = _export(family, model, layout) if layout else model.state_dict()
    return to_pending(state, where=f"{family.name} weights")


def find_layouts(family: DenoiserSpec | VAESpec) -> tuple[str, ...]:
    """Names of the published layouts that a family writes; none when it writes only its own keys."""
    module = weights_module(family)
    export = getattr(module, "export_original", None)
    if export is None:
        return ()
    return get_args(getattr(module, "Layout", None)) if _takes_layout(export) else ("original",)


def _takes_layout(export: Callable[..., Any]) -> bool:
    return "layout" in inspect.signature(export).parameters


def _export(family: DenoiserSpec | VAESpec, model: nn.Module, layout: str) -> Mapping[str, torch.Tensor]:
    layouts = find_layouts(family)
    if not layouts:
        raise ConfigError(f"--layout {layout}: {family.name} has no other layout than its own; leave it out")
    refuse_unknown(layout, layouts, what=f"--layout of {family.name}")
    export = weights_module(family).export_original
    result: Mapping[str, torch.Tensor] = export(model, layout) if _takes_layout(export) else export(model)
    return result


def _write(
    task: Conversion,
    form: Form,
    source: Source,
    architecture: _Architecture | None,
    tensors: LazyTensors,
    bar: ProgressBar,
) -> dict[Path, str]:
    def advance(num_bytes: int) -> None:
        bar.advance()

    with _report_write_errors(task.out):
        if form == "single":
            return write_single(task.out, tensors, advance=advance)
        if form == "model":
            return _write_model(task, source, architecture, tensors, advance)
        stem = "diffusion_pytorch_model" if source.stem.startswith("diffusion_pytorch_model") else "model"
        # A published config describes published keys; after a change of keys it would mislead its readers.
        config = {} if architecture else source.published
        return write_sharded(task.out, tensors, stem=stem, max_bytes=task.shard_bytes, config=config, advance=advance)


@contextmanager
def _report_write_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{out}: could not be written ({error}); nothing is left there") from error


def _write_model(
    task: Conversion, source: Source, architecture: _Architecture | None, tensors: LazyTensors, advance: Any
) -> dict[Path, str]:
    if architecture:
        kind, name, config = architecture.kind, architecture.family.name, dataclasses.asdict(architecture.config)
    else:
        kind, name, config = source.kind, source.name, dict(source.config)
    digest = write_model_folder(task.out, kind=kind, name=name, config=config, tensors=tensors, advance=advance)
    return {task.out / TENSORS: digest}
