"""Building a recipe's task: what the loop trains, and how it is saved and exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from frameloom.builders.denoiser import build_denoiser
from frameloom.builders.objective import build_objective
from frameloom.builders.text import PREFIX, TRAINED_TEXT, TextPipeline, build_text, start_training, write_trained
from frameloom.builders.vae import build_vae
from frameloom.config.schema.optim import GroupSection
from frameloom.config.schema.recipe import Recipe, ValidationSection
from frameloom.config.schema.training import TrainSection
from frameloom.core.logging import get_logger
from frameloom.data.loading.batch import Batch
from frameloom.models.precision import Precision
from frameloom.models.text.scaling import TextScaling, measure_scaling
from frameloom.training.compiling import apply_compile
from frameloom.training.memory.encoder_offload import park_encoders
from frameloom.training.memory.recompute import apply_recompute
from frameloom.training.step import Task
from frameloom.training.tasks.autoencoder import AutoencoderTask, build_lpips, freeze_other_half
from frameloom.training.tasks.conditions import ConditionMaker
from frameloom.training.tasks.denoiser import DenoiserTask
from frameloom.training.tasks.lora import Adapters, build_adapters
from frameloom.training.tasks.subject_tuning import Inversion, PriorTask, build_inversion

_log = get_logger(__name__)
ReadBatches = Callable[[], Sequence[Batch]]
ShareText = Callable[[TextPipeline], TextPipeline]


class TrainTask(Task, Protocol):
    """What a task offers to the loop beyond the losses of a step."""

    def validate(self, batches: Sequence[Batch]) -> dict[str, float]: ...
    def draw_pictures(self, batches: Sequence[Batch]) -> dict[str, Tensor]: ...
    def count_tokens(self, batch: Batch) -> int: ...


@dataclass(frozen=True)
class BuiltTask:
    """A task and how it is exported."""

    task: TrainTask
    kind: str
    name: str
    config: Any
    export_config: Callable[[ReadBatches], Any]
    """the exported model's config; a task that measures the trained model reads batches of pixels for it. Others must
    not: the clips of a cached run may be gone"""
    extra: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """constant tensors that a checkpoint must hold besides the weights"""
    adapters: Adapters | Inversion | None = None
    """what trains beside a frozen model (LoRA, a new word); checkpoints and exports then hold only these"""
    beside: dict[str, nn.Parameter] = field(default_factory=dict)
    """what trains with the model and is no part of it: in checkpoints, but not averaged and not exported"""
    rates: Sequence[GroupSection] = ()
    """learning rates of `beside`; what none of these names has no weight decay"""
    export_beside: Callable[[Path], None] = lambda folder: None
    """writes what of `beside` is worth keeping into the run's folder"""
    blocks: Sequence[nn.Module] = ()
    """the repeated blocks of the model, one of which is gathered at a time where several processes split it"""


def build_task(
    recipe: Recipe, captions: Sequence[str], device: torch.device, share_text: ShareText = lambda text: text
) -> BuiltTask:
    """`captions` are those of the training set, for what is measured on them.

    `share_text` puts in the place of the text encoders what several processes use of them together.
    """
    if recipe.task == "autoencoder":
        return _build_autoencoder(recipe, device)
    return _build_denoiser(recipe, captions, device, share_text)


def _build_denoiser(recipe: Recipe, captions: Sequence[str], device: torch.device, share_text: ShareText) -> BuiltTask:
    vae = build_vae(recipe.vae, seed=recipe.seed).model.to(device).eval().requires_grad_(False)
    text = share_text(build_text(recipe.text, recipe.model)).to(device)
    denoiser = build_denoiser(recipe.model, latent_channels=vae.latent_channels, text=text, seed=recipe.seed)
    weights = recipe.model.weights
    adapters = build_adapters(recipe.lora, denoiser, weights=weights, seed=recipe.seed) if recipe.lora else None
    precision = Precision(recipe.train.precision, recipe.train.weights_precision, recipe.parallel.gather)
    half = None if precision.weights == "fp32" else precision.weights_dtype
    trained = [value for value in denoiser.model.parameters() if value.requires_grad]
    precision.cast_trained(denoiser.model, keep=trained if adapters else ())
    denoiser.model.to(device).train()
    _apply_settings(denoiser.model, denoiser.model.blocks(), recipe.train, device)
    conditions = ConditionMaker(
        denoiser=denoiser,
        vae=vae,
        known=recipe.known,
        takes_sizes="sizes" in denoiser.family.supported_conditions,
        has_control=recipe.data.control,
        device=device,
    )
    task = DenoiserTask(
        denoiser=denoiser,
        vae=vae,
        text=text,
        objective=build_objective(recipe.objective),
        null_text=text.encode([""]).to(device),
        scaling=_measure_text(text, captions).to(device) if recipe.text.rescale else None,
        conditions=conditions,
        caption_dropout=recipe.text.dropout,
        independent_dropout=recipe.text.independent_dropout,
        seed=recipe.seed,
        device=device,
        half=half,
        num_levels=(recipe.validation or ValidationSection()).levels,
    )
    trained_text = start_training(text, recipe.text)
    task.trains_text = bool(trained_text)
    if recipe.train.encoder_offload and device.type == "cpu":
        _log.warning("train.encoder_offload is true, which has no effect on the CPU")
    elif recipe.train.encoder_offload:
        # The vectors of a new word learn through the text encoders: they stay where they are.
        park_encoders(vae, text.encoders if recipe.inversion is None else (), device)
    extra = {"text_scaling": task.scaling.tensors()} if task.scaling is not None else {}
    config = denoiser.config
    if recipe.inversion is not None:
        word = build_inversion(recipe.inversion, task, captions, seed=recipe.seed, device=device)
        return BuiltTask(word.task, "denoiser", recipe.model.family, config, lambda read_batches: config, extra, word)
    blocks = denoiser.model.blocks()
    section = recipe.dreambooth
    has_prior = section is not None and section.class_folder is not None
    return BuiltTask(
        PriorTask(task, section.prior_weight) if section is not None and has_prior else task,
        "denoiser",
        recipe.model.family,
        config,
        lambda read_batches: config,
        extra,
        adapters,
        beside=trained_text,
        rates=[
            GroupSection(match=f"{PREFIX}.{index}", lr=item.lr)
            for index, item in enumerate(recipe.text.encoders)
            if item.train
        ],
        export_beside=lambda folder: write_trained(folder / TRAINED_TEXT, text, recipe.text),
        blocks=blocks,
    )


def _build_autoencoder(recipe: Recipe, device: torch.device) -> BuiltTask:
    section = recipe.autoencoder
    vae = build_vae(recipe.vae, seed=recipe.seed)
    freeze_other_half(vae.model, section.train_only)
    logvar = nn.Parameter(torch.tensor(section.logvar, device=device)) if section.learn_logvar else section.logvar
    lpips = build_lpips(section.lpips, device) if section.lpips is not None else None
    task = AutoencoderTask(vae.model.to(device).train(), section, recipe.seed, device, lpips, logvar)
    _apply_settings(vae.model, vae.model.blocks(), recipe.train, device)

    def config_with_scale(read_batches: ReadBatches) -> Any:
        return dataclasses.replace(vae.config, **task.measure_latents(read_batches()))

    beside = {"loss.logvar": logvar} if isinstance(logvar, nn.Parameter) else {}
    return BuiltTask(task, "vae", vae.name, vae.config, config_with_scale, beside=beside)


def _apply_settings(
    model: nn.Module, blocks: Sequence[nn.Module], settings: TrainSection, device: torch.device
) -> None:
    """In this order: what is recomputed is the compiled block."""
    apply_compile(blocks, settings.compile, device)
    apply_recompute(model, blocks, settings.recompute, device)


def _measure_text(text: TextPipeline, captions: Sequence[str], most: int = 4096) -> TextScaling:
    """The scaling of a set from its different captions, evenly picked where there are very many."""
    different = sorted(set(captions))
    return measure_scaling(text.encode(different[:: -(-len(different) // most)]))
