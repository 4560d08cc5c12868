"""Building a recipe's task: its networks and what they are trained with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from frameloom.builders.denoiser import build_denoiser
from frameloom.builders.objective import build_objective
from frameloom.builders.text import build_text, start_training
from frameloom.builders.vae import build_vae
from frameloom.config.schema.recipe import Recipe, ValidationSection
from frameloom.core.logging import get_logger
from frameloom.distributed.sequence_parallel import join_sequence_group
from frameloom.models.denoisers.base import use_sequence_group
from frameloom.models.precision import Precision
from frameloom.models.text.scaling import measure_scaling
from frameloom.training.compiling import apply_compile
from frameloom.training.feed import Feed
from frameloom.training.memory.encoder_offload import offload_encoders
from frameloom.training.memory.recompute import apply_recompute
from frameloom.training.optim.groups import freeze_parameters
from frameloom.training.parallel import Parallelism
from frameloom.training.task import MODEL, Task
from frameloom.training.tasks.autoencoder import AutoencoderTask, build_critic, build_lpips, freeze_other_half
from frameloom.training.tasks.conditions import ConditionMaker
from frameloom.training.tasks.denoiser import DenoiserTask
from frameloom.training.tasks.lora import build_adapters
from frameloom.training.tasks.subject_tuning import build_word
from frameloom.training.tasks.text_table import preload_text
from frameloom.training.text_sharing import share_text

_log = get_logger(__name__)
_MOST_CAPTIONS = 4096


def build_task(recipe: Recipe, feed: Feed, parallel: Parallelism, precision: Precision) -> Task:
    """The task with its parameters frozen as the recipe says, not sharded yet."""
    build = _build_autoencoder if recipe.task == "autoencoder" else _build_denoiser
    task = build(recipe, feed, parallel, precision)
    freeze_parameters(task.model, recipe.optim.trainable, recipe.optim.frozen)
    return task


def _build_denoiser(recipe: Recipe, feed: Feed, parallel: Parallelism, precision: Precision) -> Task:
    seed, device, captions = recipe.seed, parallel.device, feed.manifest.column("caption").to_list()
    vae = build_vae(recipe.vae, seed=seed).model.to(device).eval().requires_grad_(False)
    text = share_text(build_text(recipe.text, recipe.model), parallel).to(device)
    denoiser = build_denoiser(recipe.model, latent_channels=vae.latent_channels, text=text, seed=seed)
    model, weights = denoiser.model, recipe.model.weights
    part = build_adapters(recipe.lora, denoiser, weights=weights, seed=seed) if recipe.lora else None
    trained = [value for value in model.parameters() if value.requires_grad]
    precision.cast_trained(model, keep=trained if part else ())
    model.to(device).train()
    _prepare_blocks(model, model.blocks(), recipe, device)
    if parallel.mesh is not None and parallel.shape.sequence > 1:
        # Gradients of all ranks are added up, those of one clip's parts among them.
        group = join_sequence_group(parallel.mesh.get_group("sequence"), reduction="sum")
        use_sequence_group(denoiser.family, model, group)
    null_text = text.encode([""]).to(device)
    scaling = None
    if recipe.text.rescale:
        # From the different captions of the set, evenly picked where there are very many.
        different = sorted(set(captions))
        scaling = measure_scaling(text.encode(different[:: -(-len(different) // _MOST_CAPTIONS)])).to(device)
    companions = start_training(text, recipe.text)
    if recipe.train.encoder_offload and device.type == "cpu":
        _log.warning("train.encoder_offload is true, which has no effect on the CPU")
    elif recipe.train.encoder_offload:
        # The vectors of a new word learn through the text encoders: they stay where they are.
        offload_encoders(vae, text.encoders if recipe.inversion is None else (), device)
    network: nn.Module = model
    blocks = model.blocks()
    if recipe.inversion is not None:
        network, part = build_word(recipe.inversion, denoiser, text, captions, seed=seed, device=device)
        blocks, companions = [], {}
    table = None
    if not companions and not recipe.text.independent_dropout and recipe.inversion is None:
        table = preload_text(feed, null_text, scaling)
    section = recipe.dreambooth
    return DenoiserTask(
        name=denoiser.family.name,
        config=denoiser.config,
        networks={MODEL: network},
        blocks=blocks,
        companions=companions,
        constants={} if scaling is None else {"text_scaling": scaling.tensors()},
        part=part,
        denoiser=denoiser,
        vae=vae,
        text=text,
        objective=build_objective(recipe.objective),
        null_text=null_text,
        scaling=scaling,
        conditions=ConditionMaker(
            denoiser=denoiser,
            vae=vae,
            known=recipe.known,
            has_control=recipe.data.control,
            device=device,
        ),
        section=recipe.text,
        seed=seed,
        device=device,
        precision=precision,
        num_levels=(recipe.validation or ValidationSection()).levels,
        text_table=table,
        prior_weight=section.prior_weight if section is not None and section.class_folder is not None else None,
    )


def _build_autoencoder(recipe: Recipe, feed: Feed, parallel: Parallelism, precision: Precision) -> Task:
    section, seed, device = recipe.autoencoder, recipe.seed, parallel.device
    vae = build_vae(recipe.vae, seed=seed)
    freeze_other_half(vae.model, section.train_only)
    networks: dict[str, nn.Module] = {MODEL: vae.model.to(device).train()}
    critic = build_critic(section.discriminator, seed, device) if section.discriminator else None
    if critic is not None:
        networks["discriminator"] = critic.model
    logvar = nn.Parameter(torch.tensor(section.logvar, device=device)) if section.learn_logvar else section.logvar
    _prepare_blocks(vae.model, vae.model.blocks(), recipe, device)
    return AutoencoderTask(
        name=vae.name,
        config=vae.config,
        networks=networks,
        companions={"loss.logvar": logvar} if isinstance(logvar, nn.Parameter) else {},
        statistics=() if critic is None else list(critic.model.buffers()),
        vae=vae.model,
        weights=section,
        seed=seed,
        device=device,
        lpips=build_lpips(section.lpips, device) if section.lpips is not None else None,
        logvar=logvar,
        critic=critic,
    )


def _prepare_blocks(model: nn.Module, blocks: Sequence[nn.Module], recipe: Recipe, device: torch.device) -> None:
    """In this order: what is recomputed is the compiled block."""
    apply_compile(blocks, recipe.train.compile, device)
    apply_recompute(model, blocks, recipe.train.recompute, device)
