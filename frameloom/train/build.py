"""From a recipe to a trainer: a list of calls, each to the module that owns the work."""

from __future__ import annotations

from collections.abc import Callable

from frameloom.config.optim_checks import scaled_rate
from frameloom.config.schema import Recipe
from frameloom.generate.parts import pick_device
from frameloom.train.clipping import FadingLimit, SpikeGuard
from frameloom.train.ema import EMA
from frameloom.train.feed import build_feed
from frameloom.train.loop import Trainer
from frameloom.train.optimizer import allocate_state, build_optimizer
from frameloom.train.parameter_groups import RateGroup, freeze_parameters, hidden_matrices
from frameloom.train.run_folder import RunFolder
from frameloom.train.schedules import build_schedule
from frameloom.train.step import Stepper
from frameloom.train.tasks import build_task
from frameloom.train.trackers import build_trackers


def build_trainer(recipe: Recipe, folder: RunFolder, *, first_step: int) -> Trainer:
    """Everything a run needs, fresh; a checkpoint is restored into it afterwards."""
    optim, settings = recipe.optim, recipe.train
    device = pick_device(settings.device)
    feed = build_feed(recipe, bad_clips=folder.bad_clips)
    built = build_task(recipe, feed.manifest.column("caption").to_list(), device)
    freeze_parameters(built.task.model, optim.trainable, optim.frozen)
    trainable = {name: value for name, value in built.task.model.named_parameters() if value.requires_grad}
    optimizer = build_optimizer(
        trainable.items(),
        name=optim.name,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        no_decay=not optim.decay_norms,
        rates=[RateGroup(group.match, group.lr, group.weight_decay) for group in optim.groups],
        hidden=hidden_matrices(built.task.model),
    )
    allocate_state(optimizer)  # so that the checkpoint of step 0 is like every other
    ema = EMA(trainable, **settings.ema.model_dump()) if settings.ema else None
    stepper = Stepper(
        built.task,
        optimizer,
        ema,
        build_rate(recipe),
        optim.clip_norm,
        device.type,
        settings.precision == "bf16",
        fade=FadingLimit(optim.clip_norm, optim.clip_fade.ratio, optim.clip_fade.fade_steps)
        if optim.clip_fade and optim.clip_norm
        else None,
        guard=SpikeGuard(**optim.skip_spikes.model_dump()) if optim.skip_spikes else None,
    )
    trackers = build_trackers(
        recipe.run.trackers, metrics=folder.metrics, tensorboard=folder.tensorboard, first_step=first_step
    )
    return Trainer(recipe, folder, built, stepper, feed, trackers)


def build_rate(recipe: Recipe) -> Callable[[int], float]:
    """The learning rate of each step; the first step is 1."""
    schedule, rate = recipe.optim.schedule, scaled_rate(recipe)
    factor = build_schedule(
        "constant_with_warmup" if schedule.name == "constant" else schedule.name,
        num_steps=recipe.train.steps,
        num_warmup_steps=schedule.warmup_steps,
        min_share=schedule.min_share,
        first_share=schedule.start_share,
        idle_start=schedule.idle_start,
        num_decay_steps=schedule.decay_steps,
        num_cycles=schedule.num_cycles,
        power=schedule.power,
        milestones=schedule.milestones,
        gamma=schedule.gamma,
    )
    return lambda step: rate * factor(step - 1)
