"""Export a trained run: in the layout of diffusers, in one file, as a LoRA, or in the layout of the original system.

    OUT/README.md  frameloom.json  samples/
    diffusers      a whole pipeline where diffusers has one for the family; else transformer/
    single-file    <run>.safetensors: all parts of an SDXL model in Stability's layout; else the denoiser
    lora           pytorch_lora_weights.safetensors (diffusers), lora-kohya.safetensors
    original       transformer/ or unet/ under the keys of the original system

The folder is complete or absent; one that is there is replaced only with `force`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.builders.lora import DIFFUSERS_FILE, KOHYA_FILE, write_lora
from frameloom.builders.run_weights import RunWeights, open_run
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import replace_folder
from frameloom.core.logging import get_logger
from frameloom.core.paths import clean_name
from frameloom.core.version import VERSION
from frameloom.interop.convert.convert import export_tensors, find_layouts
from frameloom.interop.convert.files import check_space, write_sharded
from frameloom.interop.convert.pipeline import PartFolder, write_pipeline_folder
from frameloom.interop.export.model_card import CARD, FORMAT, NOTE, collect_samples, read_metrics, write_card
from frameloom.interop.export.pipeline_parts import build_pipeline, describe_vae_of, find_obstacle
from frameloom.models.lora.adapters import linear_layers
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
    """What to write besides the card: `write` fills a folder, given the card for notes in files, and gives digests;
    `how` are lines of Markdown that show how the result is opened."""

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
    if run.recipe.task == "autoencoder":
        content = _export_vae(task, run)
    elif task.to == "lora":
        content = _export_lora(run)
    else:
        content = _export_denoiser(task, run, run.load_denoiser())
    check_space(out, content.num_bytes)
    card = {
        "format": FORMAT,
        "run": run.recipe.name,
        "step": run.step,
        "kind": content.kind,
        "name": content.name,
        "form": task.to,
        "weights": run.weights,
        "data": {"manifest": run.recipe.data.manifest, "fingerprint": str(run.state.get("manifest", ""))},
        "metrics": read_metrics(task.run / "metrics.jsonl", run.step),
        "trained_with": dict(run.state.get("versions", {})),
        "exported_with": {"frameloom": VERSION},
        "recipe": run.recipe.model_dump(mode="json"),
    }
    try:
        with replace_folder(out) as folder, TemporaryDirectory() as made:
            card["files"] = files = content.write(folder, json.dumps(card))
            if task.draw is not None:
                task.draw(Path(made))
            samples = Path(made) if task.draw is not None else task.run / "samples"
            card["samples"] = collect_samples(samples, folder)
            write_card(folder, card, run.recipe, content.how)
    except OSError as error:
        raise CheckpointError(f"{out}: could not be written ({error}); nothing is left there") from error
    return Exported(out, files)


def _check_out(out: Path, task: Export) -> None:
    if not out.exists():
        return
    if not out.is_dir() or not (out / CARD).is_file():
        raise CheckpointError(f"{out}: is there already, and no export wrote it; choose another folder")
    if not task.force:
        raise CheckpointError(f"{out}: is there already; choose another folder, or replace it with --force")


def _export_denoiser(task: Export, run: RunWeights, denoiser: LoadedDenoiser) -> _Content:
    family, forms = denoiser.family, denoiser.family.export_forms
    if task.to == "diffusers":
        return _export_diffusers(task, run, denoiser)
    if task.to == "single-file":
        whole = _join_pipeline(task, run, denoiser)
        tensors = whole or defer_tensors(export_tensors(family, denoiser.model, forms.original_layout))
        keys = "`model.weights`, `vae.weights` and the paths of `text.encoders`" if whole else "`model.weights`"
        return _one_file(task, run, tensors, "denoiser", family.name, keys)
    tensors = defer_tensors(export_tensors(family, denoiser.model, forms.original_layout))
    how = [f"`model.weights: {_shown(task)}` in a recipe, or the trainer and sampler of the original system."]
    return _one_part(task, tensors, forms.part, forms.describe_original(denoiser.config), "denoiser", family.name, how)


def _export_diffusers(task: Export, run: RunWeights, denoiser: LoadedDenoiser) -> _Content:
    family, forms = denoiser.family.name, denoiser.family.export_forms
    if forms.describe_diffusers is None:
        raise ConfigError(f"{family}: diffusers has no model of this family; export it with --to original")
    config = forms.describe_diffusers(denoiser.config)
    tensors = defer_tensors(export_tensors(denoiser.family, denoiser.model, forms.diffusers_layout))
    kind, pipeline = str(config["_class_name"]), forms.pipeline(denoiser.config)
    obstacle = find_obstacle(run.recipe, pipeline) if pipeline else f"diffusers has no pipeline for this {family}"
    if obstacle:
        _log.warning("%s: no whole pipeline, only its %s: %s", task.run, forms.part, obstacle)
        how = _python(f"from diffusers import {kind}", f'model = {kind}.from_pretrained("…", subfolder="{forms.part}")')
        return _one_part(task, tensors, forms.part, config, "denoiser", family, how)
    part = PartFolder(forms.part, _cast(task, tensors), config, "diffusers", kind)
    whole = build_pipeline(run.recipe, pipeline, part)
    return _Content(
        lambda folder, card: write_pipeline_folder(folder, whole, max_bytes=task.shard_bytes),
        whole.num_bytes,
        *("denoiser", family),
        _python(f"from diffusers import {pipeline}", f'pipeline = {pipeline}.from_pretrained("…")'),
    )


def _join_pipeline(task: Export, run: RunWeights, denoiser: LoadedDenoiser) -> LazyTensors | None:
    """All parts of the model in one table, for families that have such files; None, with the reason logged, else."""
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
    denoiser, adapters = run.load_lora()
    layers, base = list(linear_layers(denoiser.model)), {"sha256": denoiser.digest, "weights": run.recipe.model.weights}

    def write(folder: Path, card: str) -> dict[str, str]:
        write_lora(folder / "lora", denoiser, adapters, layers=layers, base=base)
        for file in sorted((folder / "lora").iterdir()):
            file.rename(folder / file.name)
        (folder / "lora").rmdir()
        digests: dict[str, str] = json.loads((folder / "config.json").read_text())["sha256"]
        return {name: digests[name] for name in (DIFFUSERS_FILE, KOHYA_FILE)}

    num_bytes = 2 * sum(one.down_RI.nbytes + one.up_OR.nbytes for one in adapters.values())
    how = [*_python('pipeline.load_lora_weights("…")'), "", "or `sample.lora: …` in a recipe."]
    return _Content(write, num_bytes, "lora", denoiser.family.name, how)


def _export_vae(task: Export, run: RunWeights) -> _Content:
    if task.to == "lora":
        raise ConfigError(f"{task.run}: is a run of task autoencoder, which has no lora; choose another --to")
    vae = run.load_vae()
    config = describe_vae_of(vae)
    if task.to == "diffusers" and not config:
        raise ConfigError(f"{vae.name}: diffusers has no such autoencoder here; export it with --to original")
    spec = get_vae(vae.name)
    if task.to == "diffusers" or not find_layouts(spec):
        tensors = defer_tensors(vae.model.state_dict())
    else:
        tensors = defer_tensors(export_tensors(spec, vae.model, "bare"))
    if task.to == "single-file":
        return _one_file(task, run, tensors, "vae", vae.name, f"`vae.weights`, with `vae.name: {vae.name}`,")
    if task.to == "original" and hasattr(vae.config, "to_original"):
        config = vae.config.to_original()
    how = [f"`vae.weights: {_shown(task)}` with `vae.name: {vae.name}` in a recipe."]
    return _one_part(task, tensors, "vae", config, "vae", vae.name, how)


def _one_file(task: Export, run: RunWeights, tensors: LazyTensors, kind: str, name: str, keys: str) -> _Content:
    """`keys` of a recipe take the file."""
    file, tensors = f"{clean_name(run.recipe.name)}.safetensors", _cast(task, tensors)

    def write(folder: Path, card: str) -> dict[str, str]:
        return {file: write_safetensors(folder / file, tensors, metadata={"format": "pt", NOTE: card})}

    return _Content(write, tensors.num_bytes, kind, name, [f"{keys} in a recipe: {_shown(task)}/{file}"])


def _one_part(
    task: Export, tensors: LazyTensors, part: str, config: Mapping[str, Any], kind: str, name: str, how: list[str]
) -> _Content:
    """A folder with the weights and their config.json."""
    tensors = _cast(task, tensors)

    def write(folder: Path, card: str) -> dict[str, str]:
        stem, most = "diffusion_pytorch_model", task.shard_bytes
        written = write_sharded(folder / part, tensors, stem=stem, max_bytes=most, config=config)
        return {f"{part}/{path.name}": digest for path, digest in written.items()}

    return _Content(write, tensors.num_bytes, kind, name, how)


def _cast(task: Export, tensors: LazyTensors) -> LazyTensors:
    return tensors if task.dtype == "keep" else cast_tensors(tensors, DTYPES[task.dtype])


def _shown(task: Export) -> str:
    return (task.out or Path(task.to)).name


def _python(*lines: str) -> list[str]:
    return ["```python", *lines, "```"]
