"""Load a sampler from a run, an exported model folder, a recipe, or a published checkpoint.

A recipe names its parts by paths relative to the folder in which `frameloom train` was called. Sampling may start in
another folder, where they would lead nowhere, or to the parts of another project, so they are resolved first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import BaseModel

from frameloom.builders.denoiser import LoadedDenoiser, build_denoiser, rebuild_denoiser
from frameloom.builders.lora import add_lora, check_base, digest_lora, use_adapters
from frameloom.builders.objective import build_objective, find_objective
from frameloom.builders.published import name_overrides
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
from frameloom.core.device import pick_device
from frameloom.core.errors import CheckpointError, ConfigError, RunError
from frameloom.core.files import digest_value
from frameloom.distributed.ranks import Ranks, read_ranks
from frameloom.models.lora.adapters import to_adapters
from frameloom.models.precision import DTYPES
from frameloom.models.text.scaling import TextScaling
from frameloom.models.vaes.base import VideoVAE
from frameloom.sampling.pipeline import Placement, Sampler, build_note

RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    `path` is a run folder, a model folder that a run exported, a recipe, or published weights: a file, a folder, a
    pipeline. The last need a `recipe`, or a `family`, whose shipped recipe is taken. `step` chooses a checkpoint of a
    run. `overrides` are dotted, as in `--sample.guidance 6`.
    """

    path: Path
    overrides: tuple[str, ...] = ()
    step: int | None = None
    family: str | None = None
    recipe: str | None = None

    def describe(self) -> dict[str, str]:
        """What a file says of its model, so that it can be found again."""
        known = {"family": self.family, "recipe_name": self.recipe}
        chosen = {name: value for name, value in known.items() if value is not None}
        return {"model": str(self.path), "overrides": json.dumps(list(self.overrides)), **chosen}


def load_sampler(run: Path, overrides: Sequence[str] = (), *, step: int | None = None) -> Sampler:
    """A checkpoint of a denoiser run: the newest complete one, or that of `step`.

    `overrides` are dotted, as in `--sample.guidance 6`.
    """
    return load_run(Source(run, tuple(overrides), step=step))


def open_sampler(source: Source) -> Sampler:
    """The model at a path, whatever it is; an error says what would be right there."""
    path = source.path
    if (path / RECIPE).is_file() and (path / "checkpoints").is_dir():
        return load_run(source)
    if source.step is not None:
        raise ConfigError(f"--step: {path} is no run folder, so it has no steps to choose from; leave it out")
    own = find_own(path) if path.is_dir() else None
    if own is not None:
        return _load_export(source, own)
    if source.family is not None or source.recipe is not None:
        return _load_published(source)
    if path.suffix in (".yaml", ".yml") or (SHIPPED / f"{path}.yaml").is_file():
        return _load_recipe(source)
    if not path.exists():
        raise RunError(f"{path}: no such run, model folder or recipe; name the folder that `frameloom train` printed")
    raise RunError(
        f"{path}: neither a run folder (it has no {RECIPE} and checkpoints), nor a model folder, nor a recipe; for "
        "published weights add --family NAME, or --recipe FILE"
    )


def load_run(source: Source) -> Sampler:
    run = source.path
    if not (run / RECIPE).is_file():
        raise RunError(
            f"{run}: not a run folder (it has no recipe.yaml); name the folder that `frameloom train` printed"
        )
    recipe = _read_recipe(run / RECIPE, source.overrides, where=run)
    step = source.step
    checkpoint = load_latest(run / "checkpoints") if step is None else load_checkpoint(find_step(run, step))
    if checkpoint is None:
        raise CheckpointError(
            f"{run}: holds no complete checkpoint yet; train it first: frameloom train {run}/recipe.yaml"
        )
    parts = place_parts(recipe, run, source.overrides)
    vae, text = _build_others(parts)
    denoiser = _load_denoiser(run, parts, checkpoint, latent_channels=vae.latent_channels, text=text)
    use_trained(text, recipe.text, checkpoint.tensors.get("beside", {}), where=f"{run}: step {checkpoint.step}")
    scaling = TextScaling.from_tensors(checkpoint.tensors.get("text_scaling"))
    origin = {"run": recipe.name, "step": str(checkpoint.step), **source.describe()}
    return _assemble(recipe, denoiser, vae, text, scaling, origin, digest_value(checkpoint.state["files"]))


def _load_export(source: Source, own: Path) -> Sampler:
    """A model folder holds a denoiser alone; the recipe, in it or in the run around it, names the other parts."""
    places = [Path(source.recipe)] if source.recipe else [own / RECIPE, own.parent / RECIPE]
    found = next((place for place in places if source.recipe or place.is_file()), None)
    if found is None:
        raise RunError(
            f"{own}: a model folder does not say its autoencoder and text encoders, and there is no {RECIPE} in it or "
            "beside it; add --recipe FILE"
        )
    overrides = (*source.overrides, "--model.weights", str(own))
    recipe = place_parts(_read_recipe(found, overrides, where=own), found.parent, overrides)
    scaling = None
    if recipe.text.rescale:
        checkpoint = load_latest(own.parent / "checkpoints") if (own.parent / "checkpoints").is_dir() else None
        if checkpoint is None:
            raise CheckpointError(
                f"{own}: was trained with text.rescale, and the scale of its captions is in the run's checkpoints; "
                "sample from the run folder"
            )
        scaling = TextScaling.from_tensors(checkpoint.tensors.get("text_scaling"))
    return _build_whole(recipe, source, scaling, trained_text=own.parent / TRAINED_TEXT)


def _load_recipe(source: Source) -> Sampler:
    recipe = _read_recipe(source.path, source.overrides, where=source.path)
    if recipe.model.weights is None:
        raise RunError(f"{source.path}: model.weights is null, so there is nothing trained to sample from; name a run")
    return _build_whole(recipe, source, None)


def _load_published(source: Source) -> Sampler:
    name, found = name_overrides(source.path, family=source.family, recipe=source.recipe)
    recipe = _read_recipe(name, (*found, *source.overrides), where=source.path)
    return _build_whole(recipe, source, None, published=source.path)


def _build_whole(
    recipe: Recipe,
    source: Source,
    scaling: TextScaling | None,
    *,
    published: Path | None = None,
    trained_text: Path | None = None,
) -> Sampler:
    vae, text = _build_others(recipe)
    if trained_text is not None:
        read_trained(trained_text, text, recipe.text)
    denoiser = build_denoiser(recipe.model, latent_channels=vae.latent_channels, text=text, seed=recipe.seed)
    digest = denoiser.digest
    _add_loras(denoiser, recipe)
    origin = {"run": recipe.name, **source.describe()}
    sampler = _assemble(recipe, denoiser, vae, text, scaling, origin, digest)
    objective = find_objective(published) if published is not None and recipe.objective.kind != "flow" else None
    return sampler if objective is None else replace(sampler, objective=objective)


def _read_recipe(place: Path | str, overrides: Sequence[str], *, where: Path) -> Recipe:
    recipe = load_recipe(place, overrides)
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


def _assemble(
    recipe: Recipe,
    denoiser: LoadedDenoiser,
    vae: VideoVAE,
    text: TextPipeline,
    scaling: TextScaling | None,
    origin: dict[str, str],
    weights: str,
) -> Sampler:
    device = _pick_device(recipe.train.device, read_ranks())
    denoiser.model.eval().requires_grad_(False).to(DTYPES[recipe.sample.precision])
    placement = Placement({"text": text, "denoiser": denoiser.model, "vae": vae}, device, offload=recipe.sample.offload)
    loras = [digest_lora(Path(path), denoiser) for path, _ in list_loras(recipe)]
    recipe_digest = digest_value(recipe.model_dump(mode="json", exclude={"sample"}))
    return Sampler(
        denoiser=denoiser,
        vae=vae,
        text=text,
        scaling=None if scaling is None else scaling.to(device),
        objective=build_objective(recipe.objective),
        settings=recipe.sample,
        origin={**origin, "recipe": recipe_digest, "weights": digest_value([weights, *loras])},
        device=device,
        note=build_note(recipe),
        placement=placement,
        splits_text=recipe.parallel.encoders == "tensor",
    )


def _pick_device(name: str, ranks: Ranks) -> torch.device:
    device = pick_device(name)
    if device.type == "cuda" and device.index is None and ranks.num_ranks > 1:
        return torch.device("cuda", ranks.local_rank)
    return device


def _load_denoiser(
    run: Path, recipe: Recipe, checkpoint: Checkpoint, *, latent_channels: int, text: TextPipeline
) -> LoadedDenoiser:
    """The model of a checkpoint, with the run's own adapters and those of `sample.lora`."""
    tensors, lora, sample = checkpoint.tensors["model"], checkpoint.state.get("lora"), recipe.sample
    word = checkpoint.state.get("inversion")
    if sample.weights == "ema" and "ema" not in checkpoint.tensors:
        raise CheckpointError(f"{run}: was trained without averaged weights; sample with --sample.weights raw")
    if sample.weights != "raw":
        tensors = {**tensors, **checkpoint.tensors.get("ema", {})}
    if word is not None:
        denoiser = build_denoiser(recipe.model, latent_channels=latent_channels, text=text, seed=recipe.seed)
        use_word(text, LearntWord(word["placeholder"], tensors), where=f"{run}: step {checkpoint.step}")
    elif lora is None:
        denoiser = rebuild_denoiser(recipe.model.family, checkpoint.state["architecture"], tensors)
    else:
        denoiser = build_denoiser(recipe.model, latent_channels=latent_channels, text=text, seed=recipe.seed)
        check_base(denoiser, lora, weights=recipe.model.weights, where=f"{run}: step {checkpoint.step}")
        own = to_adapters(tensors, alpha=lora["alpha"])
        use_adapters(denoiser, own, strength=sample.lora_scale, merge=sample.lora_merge)
    _add_loras(denoiser, recipe)
    return denoiser


def list_loras(recipe: Recipe) -> list[tuple[str, float]]:
    """Paths and strengths of `sample.lora`."""
    sample = recipe.sample
    if sample.lora is None:
        return []
    if isinstance(sample.lora, str):
        return [(sample.lora, sample.lora_scale)]
    return [(one.path, one.scale * sample.lora_scale) for one in sample.lora]


def _add_loras(denoiser: LoadedDenoiser, recipe: Recipe) -> None:
    for path, strength in list_loras(recipe):
        add_lora(denoiser, Path(path), strength=strength, merge=recipe.sample.lora_merge)


Named = TypeVar("Named", bound=BaseModel)


def place_parts(recipe: Recipe, run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run with the paths of its models made to work here; those of `overrides` lead from here anyway.

    A run that was moved or renamed tells no longer where it was started: its paths stay as they are.
    """
    start = _find_start(run.resolve(), Path(recipe.run.folder, recipe.name))
    if start is None:
        return recipe
    given = [override.path for override in parse_overrides(overrides)[0]]

    def place(section: Named, key: str, *path: str) -> Named:
        name = getattr(section, key)
        is_given = any(path[: len(one)] == one for one in given)
        if name is None or is_given or not (start / name).exists():
            return section
        return section.model_copy(update={key: str(start / name)})

    encoders = [place(encoder, "path", "text", "encoders") for encoder in recipe.text.encoders]
    encoders = [place(encoder, "tokenizer", "text", "encoders") for encoder in encoders]
    return recipe.model_copy(
        update={
            "vae": place(recipe.vae, "weights", "vae", "weights"),
            "model": place(recipe.model, "weights", "model", "weights"),
            "text": recipe.text.model_copy(update={"encoders": tuple(encoders)}),
        }
    )


def _find_start(run: Path, tail: Path) -> Path | None:
    """The folder from which `tail` leads to the run."""
    if tail.is_absolute() or len(tail.parts) > len(run.parents):
        return None
    start = run.parents[len(tail.parts) - 1]
    return start if start / tail == run else None
