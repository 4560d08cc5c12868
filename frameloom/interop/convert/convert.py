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
from collections.abc import Mapping
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

    def format_lines(self) -> list[str]:
        formats = ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
        tied = f", {self.num_tied} names tied to them" if self.num_tied else ""
        first = f"{self.out}: {self.num_tensors} tensors ({formats}){tied}, {self.num_bytes:,} bytes"
        names = (path.relative_to(self.out) if self.out in path.parents else path.name for path in self.digests)
        return [first, *(f"sha256 {digest}  {name}" for name, digest in zip(names, self.digests.values(), strict=True))]


def convert_weights(task: Conversion) -> Outcome:
    """Read, rename, cast and write, one tensor at a time."""
    family = _find_family(task.family) if task.family else None
    prefer = getattr(weights_module(family), "SECTIONS", ()) if family else ()
    if family is None and str(read_pipeline_index(task.source).get("_class_name")).startswith(_SDXL):
        source = open_pipeline(task.source)
    else:
        source = open_source(task.source, kind=_kind(family) if family else "", section=task.section, prefer=prefer)
    if family is None and source.name and task.layout:
        family = _find_family(source.name)
    form, out = _choose_form(task, source), task.out
    check_target(
        out,
        [task.source, *source.files],
        is_folder=form != "single",
        is_pipeline=form == "pipeline",
        may_replace=task.force,
    )
    model_config: Any = _read_config(task, family, source) if family else None
    tensors = strip_prefixes(source.tensors, task.prefixes, where=str(source.path))
    tensors = strip_wrappers(tensors, where=str(source.path))
    if family:
        tensors = _map_keys(family, model_config, tensors, task.layout)
    if task.dtype != "keep":
        tensors = cast_tensors(tensors, DTYPES[task.dtype])
    if task.copy_tied or form == "model":
        tensors = tensors.untied()
    pipeline = None
    if form == "pipeline":
        if task.config is not None and not task.config.is_dir():
            text = f"no such folder; name one that holds unet/{CONFIG}, tokenizer/ ..."
            raise ConfigError(f"--config {task.config}: {text}")
        config = task.source if task.config is None and task.source.is_dir() else task.config
        pipeline = split_pipeline(tensors, config=config, where=str(source.path))
    parts = [part.tensors for part in pipeline.parts] if pipeline else [tensors]
    num_tensors, num_bytes = sum(len(part.pending) for part in parts), sum(part.num_bytes for part in parts)
    check_space(out, num_bytes)
    with ProgressBar("converting tensors", total=num_tensors) as bar:

        def advance(_: int) -> None:
            bar.advance()

        try:
            if pipeline:
                with replace_folder(out) as folder:
                    written = write_pipeline_folder(folder, pipeline, max_bytes=task.shard_bytes, advance=advance)
                digests = {out / name: digest for name, digest in written.items()}
            elif form == "single":
                digests = write_single(out, tensors, advance=advance)
            elif form == "model":
                own = (_kind(family), family.name, dataclasses.asdict(model_config)) if family else None
                kind, name, fields = own or (source.kind, source.name, dict(source.config))
                digest = write_model_folder(out, kind=kind, name=name, config=fields, tensors=tensors, advance=advance)
                digests = {out / TENSORS: digest}
            else:
                stem = "diffusion_pytorch_model" if source.stem.startswith("diffusion_pytorch_model") else "model"
                # A published config describes published keys; after a change of keys it would mislead its readers.
                published = {} if family else source.published
                digests = write_sharded(
                    out, tensors, stem=stem, max_bytes=task.shard_bytes, config=published, advance=advance
                )
        except OSError as error:
            raise CheckpointError(f"{out}: could not be written ({error}); nothing is left there") from error
    dtypes = Counter(str(one.dtype).removeprefix("torch.") for part in parts for one in part.pending.values())
    return Outcome(out, num_tensors, 0 if pipeline else len(tensors.tied), num_bytes, dtypes, digests)


def _find_family(name: str) -> DenoiserSpec | VAESpec:
    refuse_unknown(name, [*DENOISERS, *VAES], what="--family")
    return get_denoiser(name) if name in DENOISERS else get_vae(name)


def _kind(family: DenoiserSpec | VAESpec) -> str:
    return "denoiser" if family.name in DENOISERS else "vae"


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


def _read_config(task: Conversion, family: DenoiserSpec | VAESpec, source: Source) -> Any:
    """The architecture of the weights."""
    if source.name and source.name != family.name:
        raise ConfigError(
            f"--family {family.name}: {source.path} holds the {source.kind} '{source.name}'; leave it out"
        )
    if source.name:
        return family.config_class(**source.config)
    if task.size:
        refuse_unknown(task.size, family.sizes, what=f"--size of {family.name}")
        return family.sizes[task.size]
    read = find_config_reader(family)
    if read is None or not source.published:
        why = "no config.json lies beside the weights" if read else f"{family.name} reads no published config.json"
        raise ConfigError(f"--size: needed, because {why}; choose one of {', '.join(sorted(family.sizes))}")
    return read(source.published)


def _map_keys(family: DenoiserSpec | VAESpec, config: Any, tensors: LazyTensors, layout: str) -> LazyTensors:
    """Through the family's own loading, which also refuses what does not fit, and out in the wanted layout."""
    with torch.device("meta"):
        model = family.build(config)
    # A model on the meta device takes the tensors themselves instead of copying their numbers.
    family.load_original(model, to_deferred(tensors))  # type: ignore[arg-type]
    if not layout:
        return to_pending(model.state_dict(), where=f"{family.name} weights")
    layouts = find_layouts(family)
    if not layouts:
        raise ConfigError(f"--layout {layout}: {family.name} has no other layout than its own; leave it out")
    refuse_unknown(layout, layouts, what=f"--layout of {family.name}")
    return to_pending(export_tensors(family, model, layout), where=f"{family.name} weights")


def find_layouts(family: DenoiserSpec | VAESpec) -> tuple[str, ...]:
    """Names of the published layouts that a family writes; none when it writes only its own keys."""
    module = weights_module(family)
    if not hasattr(module, "export_original"):
        return ()
    return get_args(getattr(module, "Layout", None)) or ("original",)


def export_tensors(family: DenoiserSpec | VAESpec, model: nn.Module, layout: str = "") -> Mapping[str, torch.Tensor]:
    """The weights under published keys, for a family that has some; `layout` counts where it has several."""
    export = weights_module(family).export_original
    takes_layout = bool(layout) and "layout" in inspect.signature(export).parameters
    result: Mapping[str, torch.Tensor] = export(model, layout) if takes_layout else export(model)
    return result
