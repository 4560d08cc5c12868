"""From a recipe to a trainer: a list of calls, each to the module that owns the work."""

from __future__ import annotations

from frameloom.config.schema import Recipe
from frameloom.generate.parts import pick_device
from frameloom.train.ema import EMA
from frameloom.train.feed import build_feed
from frameloom.train.loop import Trainer
from frameloom.train.optimizer import allocate_state, build_optimizer
from frameloom.train.run_folder import RunFolder
from frameloom.train.schedules import build_schedule
from frameloom.train.step import Stepper
from frameloom.train.tasks import build_task
from frameloom.train.trackers import build_trackers


def build_trainer(recipe: Recipe, folder: RunFolder, *, first_step: int) -> Trainer:
    """Everything a run needs, fresh; a checkpoint is restored into it afterwards."""
    optim, schedule, settings = recipe.optim, recipe.optim.schedule, recipe.train
    device = pick_device(settings.device)
    feed = build_feed(recipe, bad_clips=folder.bad_clips)
    built = build_task(recipe, feed.manifest.column("caption").to_list(), device)
    trainable = {name: value for name, value in built.task.model.named_parameters() if value.requires_grad}
    optimizer = build_optimizer(
        trainable.items(),
        name=optim.name,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        no_decay=not optim.decay_norms,
    )
    allocate_state(optimizer)  # so that the checkpoint of step 0 is like every other
    ema = EMA(trainable, **settings.ema.model_dump()) if settings.ema else None
    factor = build_schedule(
        "constant_with_warmup" if schedule.name == "constant" else schedule.name,
        num_steps=settings.steps,
        num_warmup_steps=schedule.warmup_steps,
        min_share=schedule.min_share,
    )

    def lr_at(step: int) -> float:
        return optim.lr * factor(step - 1)

    stepper = Stepper(built.task, optimizer, ema, lr_at, optim.clip_norm, device.type, settings.precision == "bf16")
    trackers = build_trackers(
        recipe.run.trackers, metrics=folder.metrics, tensorboard=folder.tensorboard, first_step=first_step
    )
    return Trainer(recipe, folder, built, stepper, feed, trackers)
