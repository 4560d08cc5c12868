"""Export a trained run: in the layout of diffusers, in one file, as a LoRA, or in the layout of the original system.

    OUT/README.md  frameloom.json  samples/
    diffusers      a whole pipeline where diffusers has one for the family; else transformer/
    single-file    <run>.safetensors: all parts of an SDXL model in Stability's layout; else the denoiser
    lora           pytorch_lora_weights.safetensors (diffusers), lora-kohya.safetensors
    original       transformer/ or unet/ under the keys of the original system

The folder is complete or absent; one that is there is replaced only with `force`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.builders.lora import DIFFUSERS_FILE, KOHYA_FILE, write_lora
from frameloom.builders.published import weights_module
from frameloom.builders.run_weights import RunWeights, open_run
from frameloom.builders.vae import LoadedVAE
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import replace_folder
from frameloom.core.logging import get_logger
from frameloom.core.paths import clean_name
from frameloom.interop.convert.files import check_space, write_sharded
from frameloom.interop.convert.pipeline import PartFolder, write_pipeline_folder
from frameloom.interop.export.model_card import CARD, NOTE, Card, collect_samples, read_metrics, write_card
from frameloom.interop.export.pipeline_parts import build_pipeline, describe_vae_of, find_obstacle
from frameloom.models.precision import DTYPES
from frameloom.models.registry import get_vae
from frameloom.weights.lazy_tensors import LazyTensors, cast_tensors, defer_tensors, to_deferred, to_pending
from frameloom.weights.safetensors_file import write_safetensors

To = Literal["diffusers", "single-file", "lora", "original"]
_log = get_logger(__name__)


@dataclass(frozen=True)
class Export:
    """What to take away; `out` None: `exports/<to>` in the run's folder. `draw` makes samples for the card."""

    run: Path
    to: To
    out: Path | None = None
    weights: Literal["ema", "raw"] | None = None
    step: int | None = None
    dtype: str = "keep"
    shard_bytes: int = 5 * 10**9
    force: bool = False
    draw: Callable[[Path], object] | None = None


@dataclass(frozen=True)
class Exported:
    """What was written: SHA-256 of each file of weights by its name below `out`."""

    out: Path
    files: Mapping[str, str]


@dataclass(frozen=True)
class _Content:
    """What to write besides the card: a function that fills a folder and gives digests, and how to open the result."""

    write: Callable[[Path, str], dict[str, str]]
    num_bytes: int
    kind: str
    name: str
    how: list[str]


def export_run(task: Export) -> Exported:
    """Write the export with its card; nothing is left of one that fails."""
    run = open_run(task.run, step=task.step, weights=task.weights)
    out = task.out or task.run / "exports" / task.to
    _check_out(out, task)
    content = _choose_content(task, run)
    check_space(out, content.num_bytes)
    card = Card(
        run=run.recipe.name,
        recipe=run.recipe,
        step=run.step,
        kind=content.kind,
        name=content.name,
        form=task.to,
        weights=run.weights,
        manifest=str(run.state.get("manifest", "")),
        versions=run.state.get("versions", {}),
        metrics=read_metrics(task.run / "metrics.jsonl", run.step),
        how=content.how,
    )
    try:
        with replace_folder(out) as folder:
            files = content.write(folder, json.dumps(card.table()))
            write_card(folder, card, files=files, samples=_find_samples(task, folder))
    except OSError as error:
        raise CheckpointError(f"{out}: could not be written ({error}); nothing is left there") from error
    return Exported(out, files)


def _find_samples(task: Export, folder: Path) -> list[str]:
    if task.draw is None:
        return collect_samples(task.run / "samples", folder)
    with TemporaryDirectory() as made:
        task.draw(Path(made))
        return collect_samples(Path(made), folder)


def _check_out(out: Path, task: Export) -> None:
    if not out.exists():
        return
    if not out.is_dir() or not (out / CARD).is_file():
        raise CheckpointError(f"{out}: is there already, and no export wrote it; choose another folder")
    if not task.force:
        raise CheckpointError(f"{out}: is there already; choose another folder, or replace it with --force")


def _choose_content(task: Export, run: RunWeights) -> _Content:
    if run.recipe.task == "autoencoder":
        return _export_vae(task, run)
    if task.to == "lora":
        return _export_lora(run)
    denoiser = run.load_denoiser()
    if task.to == "diffusers":
        return _export_diffusers(task, run, denoiser)
    if task.to == "single-file":
        return _export_single_file(task, run, denoiser)
    forms = denoiser.family.export_forms
    tensors = _cast(task, _original_tensors(denoiser, forms.original_layout))
    config = forms.describe_original(denoiser.config)
    how = [f"`model.weights: {_shown(task)}` in a recipe, or the trainer and sampler of the original system."]
    return _part_content(task, tensors, forms.part, config, "denoiser", denoiser.family.name, how)


def _export_diffusers(task: Export, run: RunWeights, denoiser: LoadedDenoiser) -> _Content:
    family, forms = denoiser.family.name, denoiser.family.export_forms
    if forms.describe_diffusers is None:
        raise ConfigError(f"{family}: diffusers has no model of this family; export it with --to original")
    config = forms.describe_diffusers(denoiser.config)
    tensors = _cast(task, _original_tensors(denoiser, forms.diffusers_layout))
    kind, pipeline = str(config["_class_name"]), forms.pipeline(denoiser.config)
    obstacle = find_obstacle(run.recipe, pipeline) if pipeline else f"diffusers has no pipeline for this {family}"
    if obstacle:
        _log.warning("%s: no whole pipeline, only its %s: %s", task.run, forms.part, obstacle)
        how = _python(f"from diffusers import {kind}", f'model = {kind}.from_pretrained("…", subfolder="{forms.part}")')
        return _part_content(task, tensors, forms.part, config, "denoiser", family, how)
    whole = build_pipeline(run.recipe, pipeline, PartFolder(forms.part, tensors, config, "diffusers", kind))
    how = _python(f"from diffusers import {pipeline}", f'pipeline = {pipeline}.from_pretrained("…")')

    def write(folder: Path, card: str) -> dict[str, str]:
        return write_pipeline_folder(folder, whole, max_bytes=task.shard_bytes)

    return _Content(write, whole.num_bytes, "denoiser", family, how)


def _export_single_file(task: Export, run: RunWeights, denoiser: LoadedDenoiser) -> _Content:
    family, forms = denoiser.family.name, denoiser.family.export_forms
    whole = _join_pipeline(task, run, denoiser)
    tensors = _cast(task, whole or _original_tensors(denoiser, forms.original_layout))
    name = f"{clean_name(run.recipe.name)}.safetensors"
    keys = "`model.weights`, `vae.weights` and the paths of `text.encoders`" if whole else "`model.weights`"
    how = [f"{keys} in a recipe: {_shown(task)}/{name}"]

    def write(folder: Path, card: str) -> dict[str, str]:
        return {name: write_safetensors(folder / name, tensors, metadata={"format": "pt", NOTE: card})}

    return _Content(write, tensors.num_bytes, "denoiser", family, how)


def _join_pipeline(task: Export, run: RunWeights, denoiser: LoadedDenoiser) -> LazyTensors | None:
    """All parts of the model in one table, for families that have such files; None, with the reason told, else."""
    forms = denoiser.family.export_forms
    if forms.join_parts is None:
        return None
    pipeline = forms.pipeline(denoiser.config)
    if obstacle := find_obstacle(run.recipe, pipeline):
        _log.warning("%s: not all parts of the model, only its %s: %s", task.run, forms.part, obstacle)
        return None
    tensors = defer_tensors(denoiser.model.state_dict())
    whole = build_pipeline(run.recipe, pipeline, PartFolder(forms.part, tensors, {}, "", ""))
    parts = {part.name: to_deferred(part.tensors) for part in whole.parts}
    return to_pending(forms.join_parts(denoiser.config, parts), where=str(task.run))


def _export_lora(run: RunWeights) -> _Content:
    lora = run.load_lora()
    family = lora.denoiser.family.name

    def write(folder: Path, card: str) -> dict[str, str]:
        write_lora(folder / "lora", lora.denoiser, lora.adapters, layers=lora.layers, base=lora.base)
        for file in sorted((folder / "lora").iterdir()):
            file.rename(folder / file.name)
        (folder / "lora").rmdir()
        digests: dict[str, str] = json.loads((folder / "config.json").read_text())["sha256"]
        return {name: digests[name] for name in (DIFFUSERS_FILE, KOHYA_FILE)}

    num_bytes = 2 * sum(one.down_RI.nbytes + one.up_OR.nbytes for one in lora.adapters.values())
    how = [*_python('pipeline.load_lora_weights("…")'), "", "or `sample.lora: …` in a recipe."]
    return _Content(write, num_bytes, "lora", family, how)


def _export_vae(task: Export, run: RunWeights) -> _Content:
    if task.to == "lora":
        raise ConfigError(f"{task.run}: is a run of task autoencoder, which has no lora; choose another --to")
    vae = run.load_vae()
    config = describe_vae_of(vae)
    if task.to == "diffusers" and not config:
        raise ConfigError(f"{vae.name}: diffusers has no such autoencoder here; export it with --to original")
    tensors = _cast(task, _vae_tensors(vae, task.to))
    how = [f"`vae.weights: {_shown(task)}` with `vae.name: {vae.name}` in a recipe."]
    if task.to == "single-file":
        name = f"{clean_name(run.recipe.name)}.safetensors"

        def write(folder: Path, card: str) -> dict[str, str]:
            return {name: write_safetensors(folder / name, tensors, metadata={"format": "pt", NOTE: card})}

        return _Content(write, tensors.num_bytes, "vae", vae.name, how)
    if task.to == "original" and hasattr(vae.config, "to_original"):
        config = vae.config.to_original()
    return _part_content(task, tensors, "vae", config, "vae", vae.name, how)


def _part_content(
    task: Export, tensors: LazyTensors, part: str, config: Mapping[str, Any], kind: str, name: str, how: list[str]
) -> _Content:
    def write(folder: Path, card: str) -> dict[str, str]:
        stem, most = "diffusion_pytorch_model", task.shard_bytes
        written = write_sharded(
            folder / part, tensors, stem=stem, max_bytes=most, config=config, advance=lambda num_bytes: None
        )
        return {f"{part}/{path.name}": digest for path, digest in written.items()}

    return _Content(write, tensors.num_bytes, kind, name, how)


def _original_tensors(denoiser: LoadedDenoiser, layout: str) -> LazyTensors:
    export = weights_module(denoiser.family).export_original
    takes_layout = bool(layout) and "layout" in inspect.signature(export).parameters
    return defer_tensors(export(denoiser.model, layout) if takes_layout else export(denoiser.model))


def _vae_tensors(vae: LoadedVAE, to: str) -> LazyTensors:
    export = getattr(weights_module(get_vae(vae.name)), "export_original", None)
    if export is None or to == "diffusers":
        return defer_tensors(vae.model.state_dict())
    takes_layout = "layout" in inspect.signature(export).parameters
    return defer_tensors(export(vae.model, "bare") if takes_layout else export(vae.model))


def _cast(task: Export, tensors: LazyTensors) -> LazyTensors:
    return tensors if task.dtype == "keep" else cast_tensors(tensors, DTYPES[task.dtype])


def _shown(task: Export) -> str:
    return (task.out or Path(task.to)).name


def _python(*lines: str) -> list[str]:
    return ["```python", *lines, "```"]
