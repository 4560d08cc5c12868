"""Loading a model to sample from: a run, an exported model folder, a recipe, or published weights.

A recipe names its parts by paths relative to the folder in which `frameloom train` was called. Sampling may start in
another folder, where they would lead nowhere, or to the parts of another project, so they are resolved first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel

from frameloom.builders.denoiser import LoadedDenoiser, build_denoiser, rebuild_denoiser
from frameloom.builders.lora import add_lora, check_base, digest_lora, use_adapters
from frameloom.builders.objective import build_objective, find_objective
from frameloom.builders.published import find_family, name_overrides
from frameloom.builders.run_weights import find_step
from frameloom.builders.text import (
    TRAINED_TEXT,
    LearntWord,
    TextPipeline,
    build_text,
    read_trained,
    read_word,
    use_trained,
    use_word,
)
from frameloom.builders.vae import build_vae
from frameloom.checkpoint.model_folder import find_own
from frameloom.checkpoint.reader import Checkpoint, load_checkpoint, load_latest
from frameloom.config.loading.overrides import parse_overrides
from frameloom.config.loading.recipe import SHIPPED, load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.sampling import MODEL_SETTINGS
from frameloom.core.device import pick_device
from frameloom.core.errors import CheckpointError, ConfigError, RunError
from frameloom.core.files import digest_value
from frameloom.core.version import VERSION
from frameloom.distributed.ranks import read_ranks
from frameloom.models.lora.adapters import to_adapters
from frameloom.models.precision import DTYPES
from frameloom.models.text.scaling import TextScaling
from frameloom.models.vaes.base import VideoVAE
from frameloom.sampling.pipeline import CaptionNote, Offload, Pipeline

RECIPE = "recipe.yaml"


_Parts = tuple[Recipe, LoadedDenoiser, VideoVAE, TextPipeline, TextScaling | None]


def load_model(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    family: str | None = None,
    recipe: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
) -> Pipeline:
    """The model at a path, ready to sample.

    `path` is a run folder, a model folder that a run exported, a recipe with weights, or published weights: a diffusers
    folder, a part of one, or a file. Weights without a `config.json` that names their model need a `family`, whose
    shipped recipe is taken, or a `recipe`. `step` chooses a checkpoint of a run. `overrides` are dotted, as in
    `--sample.guidance 6`.
    `device` and `dtype` (of the denoiser) are the recipe's unless given.
    """
    path = Path(path)
    words = tuple(overrides)
    if device is not None:
        words += ("--train.device", str(device))
    if dtype is not None:
        name = next((name for name, known in DTYPES.items() if known is dtype), dtype)
        if name not in DTYPES:
            raise ConfigError(f"dtype is {dtype}; choose {', '.join(DTYPES)}")
        words += ("--sample.precision", str(name))
    known = {"family": family, "recipe_name": recipe}
    about = {"model": str(path), "overrides": json.dumps(_model_overrides(words))}
    about |= {name: value for name, value in known.items() if value is not None}
    if (path / RECIPE).is_file() and (path / "checkpoints").is_dir():
        return _load_run(path, words, step, about)
    if step is not None:
        raise ConfigError(f"--step: {path} is no run folder, so it has no steps to choose from; leave it out")
    own = find_own(path) if path.is_dir() else None
    if own is not None:
        return _load_export(own, words, recipe, about)
    is_recipe = path.suffix in (".yaml", ".yml") or (SHIPPED / f"{path}.yaml").is_file()
    if family is None and recipe is None and not is_recipe and path.exists():
        family = find_family(path)
    if family is not None or recipe is not None:
        described_by, found = name_overrides(path, family=family, recipe=recipe)
        return _load_whole(_read_recipe(described_by, (*found, *words), where=path), about, published=path)
    if is_recipe:
        loaded = _read_recipe(path, words, where=path)
        if loaded.model.weights is None:
            raise RunError(f"{path}: model.weights is null, so there is nothing trained to sample from; name a run")
        return _load_whole(loaded, about)
    if not path.exists():
        raise RunError(f"{path}: no such run, model folder or recipe; name the folder that `frameloom train` printed")
    raise RunError(
        f"{path}: neither a run folder (it has no {RECIPE} and checkpoints), nor a model folder, nor a recipe; for "
        "published weights add --family NAME, or --recipe FILE"
    )


def _model_overrides(words: Sequence[str]) -> list[str]:
    """Overrides that choose or change the model: those of single requests are in the settings of every file."""
    kept: list[str] = []
    is_kept = True
    for word in words:
        if word.startswith("--"):
            section, _, key = word.removeprefix("--").partition("=")[0].partition(".")
            is_kept = section != "sample" or key.partition(".")[0] in MODEL_SETTINGS
        if is_kept:
            kept.append(word)
    return kept


def _load_run(run: Path, overrides: Sequence[str], step: int | None, about: Mapping[str, str]) -> Pipeline:
    recipe = _read_recipe(run / RECIPE, overrides, where=run)
    checkpoint = load_latest(run / "checkpoints") if step is None else load_checkpoint(find_step(run, step))
    if checkpoint is None:
        raise CheckpointError(
            f"{run}: holds no complete checkpoint yet; train it first: frameloom train {run}/recipe.yaml"
        )
    parts = resolve_parts(recipe, run, overrides)
    vae, text = _build_others(parts)
    denoiser = _load_denoiser(run, parts, checkpoint, vae, text)
    use_trained(text, recipe.text, checkpoint.tensors.get("beside", {}), where=f"{run}: step {checkpoint.step}")
    scaling = TextScaling.from_tensors(checkpoint.tensors.get("text_scaling"))
    origin = {"run": recipe.name, "step": str(checkpoint.step), **about}
    return _assemble((recipe, denoiser, vae, text, scaling), origin, digest_value(checkpoint.state["files"]))


def _load_export(own: Path, overrides: Sequence[str], name: str | None, about: Mapping[str, str]) -> Pipeline:
    """A model folder holds a denoiser alone; the recipe, in it or in the run around it, names the other parts."""
    found = Path(name) if name else next((path for path in (own / RECIPE, own.parent / RECIPE) if path.is_file()), None)
    if found is None:
        raise RunError(
            f"{own}: a model folder does not say its autoencoder and text encoders, and there is no {RECIPE} in it or "
            "beside it; add --recipe FILE"
        )
    overrides = (*overrides, "--model.weights", str(own))
    recipe = resolve_parts(_read_recipe(found, overrides, where=own), found.parent, overrides)
    scaling = None
    if recipe.text.rescale:
        checkpoint = load_latest(own.parent / "checkpoints") if (own.parent / "checkpoints").is_dir() else None
        if checkpoint is None:
            raise CheckpointError(
                f"{own}: was trained with text.rescale, and the scale of its captions is in the run's checkpoints; "
                "sample from the run folder"
            )
        scaling = TextScaling.from_tensors(checkpoint.tensors.get("text_scaling"))
    return _load_whole(recipe, about, scaling, trained_text=own.parent / TRAINED_TEXT)


def _load_whole(
    recipe: Recipe,
    about: Mapping[str, str],
    scaling: TextScaling | None = None,
    *,
    published: Path | None = None,
    trained_text: Path | None = None,
) -> Pipeline:
    vae, text = _build_others(recipe)
    if trained_text is not None:
        read_trained(trained_text, text, recipe.text)
    denoiser = build_denoiser(recipe.model, latent_channels=vae.latent_channels, text=text, seed=recipe.seed)
    pipeline = _assemble((recipe, denoiser, vae, text, scaling), {"run": recipe.name, **about}, denoiser.digest)
    objective = find_objective(published) if published is not None and recipe.objective.kind != "flow" else None
    return pipeline if objective is None else replace(pipeline, objective=objective)


def _read_recipe(path: Path | str, overrides: Sequence[str], *, where: Path) -> Recipe:
    recipe = load_recipe(path, overrides)
    if recipe.task != "denoiser":
        raise ConfigError(f"{where}: is a run of task {recipe.task}; videos are sampled from a run of task denoiser")
    return recipe


def _build_others(recipe: Recipe) -> tuple[VideoVAE, TextPipeline]:
    vae: VideoVAE = build_vae(recipe.vae, seed=recipe.seed).model.eval()
    if recipe.sample.tile_px is not None:
        vae.use(replace(vae.policy, tile_px=recipe.sample.tile_px))
    text = build_text(recipe.text, recipe.model)
    for path in recipe.sample.words:
        use_word(text, read_word(Path(path)), where=path)
    return vae, text


def _assemble(parts: _Parts, origin: Mapping[str, str], weights: str) -> Pipeline:
    recipe, denoiser, vae, text, scaling = parts
    device = pick_device(recipe.train.device)
    ranks = read_ranks()
    if device.type == "cuda" and device.index is None and ranks.num_ranks > 1:
        device = torch.device("cuda", ranks.local_rank)
    lora, scale = recipe.sample.lora, recipe.sample.lora_scale
    loras = [(lora, scale)] if isinstance(lora, str) else [(one.path, one.scale * scale) for one in lora or ()]
    for path, strength in loras:
        add_lora(denoiser, Path(path), strength=strength, merge=recipe.sample.lora_merge)
    denoiser.model.eval().requires_grad_(False).to(DTYPES[recipe.sample.precision])
    movable: dict[str, Any] = {"text": text, "denoiser": denoiser.model, "vae": vae}
    offload = Offload(movable, device) if recipe.sample.offload else None
    if offload is None:
        for part in movable.values():
            part.to(device)
    digests = {
        # Without defaults, so that a key of a later version does not make it another recipe.
        "recipe": digest_value(recipe.model_dump(mode="json", exclude={"sample"}, exclude_defaults=True)),
        "weights": digest_value([weights, *(digest_lora(Path(path), denoiser) for path, _ in loras)]),
    }
    return Pipeline(
        denoiser,
        vae,
        text,
        None if scaling is None else scaling.to(device),
        build_objective(recipe.objective),
        recipe.sample,
        {**origin, **digests, "version": VERSION},
        device,
        note=None if recipe.text.note is None else CaptionNote(recipe.text.note, recipe.data.fps_max),
        offload=offload,
        splits_text=recipe.parallel.encoders == "tensor",
    )


def _load_denoiser(
    run: Path, recipe: Recipe, checkpoint: Checkpoint, vae: VideoVAE, text: TextPipeline
) -> LoadedDenoiser:
    """The model of a checkpoint, with the run's own adapters or learnt word."""
    tensors, lora, sample = checkpoint.tensors["model"], checkpoint.state.get("lora"), recipe.sample
    word = checkpoint.state.get("inversion")
    if sample.weights == "ema" and "ema" not in checkpoint.tensors:
        raise CheckpointError(f"{run}: was trained without averaged weights; sample with --sample.weights raw")
    if sample.weights != "raw":
        tensors = {**tensors, **checkpoint.tensors.get("ema", {})}
    if word is None and lora is None:
        return rebuild_denoiser(recipe.model.family, checkpoint.state["architecture"], tensors)
    denoiser = build_denoiser(recipe.model, latent_channels=vae.latent_channels, text=text, seed=recipe.seed)
    if word is not None:
        use_word(text, LearntWord(word["placeholder"], tensors), where=f"{run}: step {checkpoint.step}")
    elif lora is not None:
        check_base(denoiser, lora, weights=recipe.model.weights, where=f"{run}: step {checkpoint.step}")
        own = to_adapters(tensors, alpha=lora["alpha"])
        use_adapters(denoiser, own, strength=sample.lora_scale, merge=sample.lora_merge)
    return denoiser


_Section = TypeVar("_Section", bound=BaseModel)


def resolve_parts(recipe: Recipe, run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run with the paths of its models made to work here; those of `overrides` lead from here anyway.

    Where a run was started is unknown once it was moved or renamed: its paths stay as they are.
    """
    folder, tail = run.resolve(), Path(recipe.run.folder, recipe.name)
    if tail.is_absolute() or len(tail.parts) > len(folder.parents):
        return recipe
    start = folder.parents[len(tail.parts) - 1]
    if start / tail != folder:
        return recipe
    given = [override.path for override in parse_overrides(overrides)[0]]

    def resolve(section: _Section, key: str, *path: str) -> _Section:
        name = getattr(section, key)
        is_given = any(path[: len(one)] == one for one in given)
        if name is None or is_given or not (start / name).exists():
            return section
        return section.model_copy(update={key: str(start / name)})

    encoders = [resolve(encoder, "path", "text", "encoders") for encoder in recipe.text.encoders]
    encoders = [resolve(encoder, "tokenizer", "text", "encoders") for encoder in encoders]
    return recipe.model_copy(
        update={
            "vae": resolve(recipe.vae, "weights", "vae", "weights"),
            "model": resolve(recipe.model, "weights", "model", "weights"),
            "text": recipe.text.model_copy(update={"encoders": tuple(encoders)}),
        }
    )
