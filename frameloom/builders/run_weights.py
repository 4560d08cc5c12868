"""The trained weights of a run at one of its checkpoints: a whole denoiser, LoRA adapters, or an autoencoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser, build_denoiser, rebuild_denoiser
from frameloom.builders.lora import check_base
from frameloom.builders.text import build_text
from frameloom.builders.vae import LoadedVAE, build_vae
from frameloom.checkpoint.model_folder import EXPORT
from frameloom.checkpoint.reader import list_steps, load_checkpoint, load_latest, read_state, step_folder
from frameloom.checkpoint.resharding import list_groups
from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.models import VAESection
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import CheckpointError, ConfigError, RunError
from frameloom.models.lora.adapters import Adapter, merge_adapters, to_adapters
from frameloom.weights.files import CONFIG

Which = Literal["ema", "raw"]


def open_run(path: Path, *, step: int | None = None, weights: Which | None = None) -> RunWeights:
    """A run folder at `step`, its newest undamaged one without; `weights` None: averaged where there are such."""
    if not (path / "recipe.yaml").is_file():
        raise RunError(
            f"{path}: not a run folder (it has no recipe.yaml); name the folder that `frameloom train` printed"
        )
    recipe, root = load_recipe(path / "recipe.yaml"), path / "checkpoints"
    if step is None:
        latest = load_latest(root)
        if latest is None:
            raise CheckpointError(f"{path}: holds no complete checkpoint yet; train it first")
        step, state = latest.step, latest.state
    else:
        state = read_state(find_step(path, step))
    has_ema = "ema" in list_groups(state)
    if weights == "ema" and not has_ema:
        raise CheckpointError(f"{path}: was trained without averaged weights; use --weights raw")
    return RunWeights(path, recipe, step, state, weights or ("ema" if has_ema else "raw"))


def find_step(run: Path, step: int) -> Path:
    """The checkpoint of a step that a person chose; CheckpointError with the steps that there are."""
    known = list_steps(run / "checkpoints")
    if step not in known:
        raise CheckpointError(f"{run}: has no checkpoint of step {step}; there are {json.dumps(known)}")
    return step_folder(run / "checkpoints", step)


@dataclass(frozen=True)
class RunWeights:
    """A run at one step; `weights` are the averaged ("ema") or the last ("raw") ones."""

    path: Path
    recipe: Recipe
    step: int
    state: Mapping[str, Any]
    weights: Which

    @property
    def is_lora(self) -> bool:
        return "lora" in self.state

    def load_denoiser(self) -> LoadedDenoiser:
        """The whole model on the host; adapters of a LoRA run are added into its weights."""
        if self.is_lora:
            denoiser, adapters = self.load_lora()
            merge_adapters(denoiser.model, adapters, strength=1.0)
            return denoiser
        denoiser = rebuild_denoiser(self.recipe.model.family, self.state["architecture"], self._load_tensors())
        denoiser.model.eval()
        return denoiser

    def load_lora(self) -> tuple[LoadedDenoiser, dict[str, Adapter]]:
        """The adapters of a LoRA run, and the model without them that they were trained beside."""
        if not self.is_lora:
            raise ConfigError(
                f"{self.path}: was trained without lora, so there are no adapters to write; choose --to diffusers, "
                "single-file or original"
            )
        recipe, lora = self.recipe, self.state["lora"]
        vae, text = build_vae(recipe.vae, seed=recipe.seed), build_text(recipe.text, recipe.model)
        channels = vae.model.latent_channels
        denoiser = build_denoiser(recipe.model, latent_channels=channels, text=text, seed=recipe.seed)
        check_base(denoiser, lora, weights=recipe.model.weights, where=f"{self.path}: step {self.step}")
        denoiser.model.eval()
        return denoiser, to_adapters(self._load_tensors(), alpha=lora["alpha"])

    def load_vae(self) -> LoadedVAE:
        """The exported autoencoder of a finished run, with the scale that was measured on its latents."""
        if not (self.path / EXPORT / CONFIG).is_file():
            raise CheckpointError(
                f"{self.path}: has no {EXPORT}/ yet, which a run writes at its end with the scale of its latents; "
                "let it finish first"
            )
        return build_vae(VAESection(name=self.recipe.vae.name, weights=str(self.path)), seed=self.recipe.seed)

    def _load_tensors(self) -> dict[str, Tensor]:
        tensors = load_checkpoint(step_folder(self.path / "checkpoints", self.step)).tensors
        return tensors["model"] | (tensors["ema"] if self.weights == "ema" else {})
