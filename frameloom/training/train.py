"""A whole run: `train(recipe)` joins the ranks, locks the folder, builds the trainer, resumes and trains."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import OutOfMemoryError

from frameloom.config.rules.training import scaled_rate
from frameloom.config.schema.optim import GroupSection
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.training import LossScaleSection, TrainSection
from frameloom.core.device import avoid_avx512_in_half_precision, pick_device
from frameloom.core.logging import get_logger
from frameloom.data.order.rank_assignment import RankAssignment
from frameloom.distributed.ranks import read_ranks
from frameloom.training.feed import build_feed, settle_length
from frameloom.training.logging.profiling import StepProfiler
from frameloom.training.logging.samples import build_samples
from frameloom.training.logging.trackers import TrackedRun, build_trackers
from frameloom.training.loop import Trainer
from frameloom.training.memory.oom_split import BatchLimits, LoneMisfit, stop_short, stop_to_halve
from frameloom.training.memory.optimizer_offload import apply_offload
from frameloom.training.optim.clipping import FadingLimit, SpikeGuard
from frameloom.training.optim.ema import EMA
from frameloom.training.optim.groups import freeze_parameters, hidden_matrices
from frameloom.training.optim.optimizer import allocate_state, build_optimizer
from frameloom.training.optim.precision import LossScale, MasterWeights
from frameloom.training.optim.schedules import build_schedule
from frameloom.training.peers import Peers, join_peers
from frameloom.training.process_settings import device_settings
from frameloom.training.run.folder import RunFolder
from frameloom.training.run.resuming import ResumeChoices, count_restart, find_checkpoint, keep_rows, place_data
from frameloom.training.step import AnyStepper, Stepper
from frameloom.training.tasks.adversarial import add_discriminator
from frameloom.training.tasks.autoencoder import AutoencoderTask
from frameloom.training.tasks.build import build_task
from frameloom.training.tasks.denoiser import unwrap
from frameloom.training.tasks.subject_tuning import make_class_images
from frameloom.training.tasks.text_table import take_text

_log = get_logger(__name__)


def train(recipe: Recipe, choices: ResumeChoices | None = None) -> Path:
    """Run a recipe to its end, from the newest complete checkpoint if there is one; gives the run's folder.

    Under torchrun every process calls this, with the same `choices`.
    """
    folder = RunFolder(Path(recipe.run.folder) / recipe.name)
    if recipe.train.precision != "fp32":
        avoid_avx512_in_half_precision()
    with join_peers(recipe, read_ranks()) as peers, ExitStack() as held:
        peers.context.run_on_rank0(lambda: held.enter_context(folder.locked()))
        held.enter_context(device_settings(recipe.train, pick_device(recipe.train.device)))
        run_recipe(recipe, folder, peers, choices or ResumeChoices())
    return folder.path


def run_recipe(recipe: Recipe, folder: RunFolder, peers: Peers, choices: ResumeChoices) -> None:
    """Build, take up the newest checkpoint, and train; the folder is held."""
    stored = find_checkpoint(recipe, folder, peers, choices)
    first_step = 1 if stored is None else stored.step + 1
    peers.context.run_on_rank0(lambda: count_restart(folder.path, first_step - 1))
    trainer = build_trainer(recipe, folder, first_step=first_step, peers=peers)
    try:
        if stored is not None:
            trainer.restore(peers.read(stored, trainer.snapshot().tensors), choices)
        if trainer.step > trainer.recipe.train.num_steps:
            steps = trainer.step, trainer.recipe.train.num_steps
            _log.warning("%s: is at step %d, beyond the %d of this recipe; nothing is trained", folder.path, *steps)
        trainer.epoch, trainer.position = place_data(trainer.feed, (trainer.epoch, trainer.position), choices)
        peers.context.run_on_rank0(lambda: keep_rows(folder, trainer.feed.manifest, stored))
        peers.context.run_on_rank0(lambda: folder.write_recipe(recipe))
        with stop_on_signals(trainer), closing(trainer.saver):
            trainer.run()
    except LoneMisfit as found:
        stop_to_halve(found, trainer.stepper.limits, folder.path, step=trainer.step + 1, rank=peers.rank)
    except OutOfMemoryError as error:
        stop_short(error, step=trainer.step + 1)
    finally:
        for tracker in trainer.trackers:
            tracker.close()


def build_trainer(recipe: Recipe, folder: RunFolder, *, first_step: int, peers: Peers | None = None) -> Trainer:
    """Everything a run needs, fresh; a checkpoint is restored into it afterwards. `peers` None: one process."""
    peers = peers or Peers(RankAssignment(num_shares=recipe.parallel.data or 1), zero=recipe.parallel.zero)
    device = pick_device(recipe.train.device)
    peers.context.run_on_rank0(lambda: make_class_images(recipe))
    feed = build_feed(recipe, bad_clips=folder.bad_clips, assignment=peers.shares, is_first=peers.is_first)
    recipe = settle_length(recipe, feed.manifest, feed.policy, num_ranks=peers.shares.num_shares)
    optim, settings = recipe.optim, recipe.train
    if settings.side_by_side is True:
        _log.warning("train.side_by_side is true, which has no effect any more; remove it from the recipe")
    built = build_task(recipe, feed.manifest.column("caption").to_list(), device, peers.share_text)
    freeze_parameters(built.task.model, optim.trainable, optim.frozen)
    if recipe.task == "denoiser":
        task = unwrap(built.task)
        peers.share_tokens(task.denoiser)
        if not task.trains_text and not task.independent_dropout and recipe.inversion is None:
            task.known = take_text(feed, task.null_text, task.scaling)
    peers.split_model(built.task.model, built.blocks)
    trainable = {name: value for name, value in built.task.model.named_parameters() if value.requires_grad}
    master = None
    if any(value.dtype != torch.float32 for value in trainable.values()):
        master = MasterWeights(trainable)
        trainable = master.params
    # Decay would pull a single number beside the model, a log-variance, to 0.
    undecayed = [GroupSection(match=name, weight_decay=0.0) for name, value in built.beside.items() if value.ndim == 0]
    groups = (*built.rates, *undecayed, *optim.groups)
    optimizer = build_optimizer(
        {**trainable, **built.beside}.items(),
        optim.model_copy(update={"groups": groups}),
        hidden_matrices(built.task.model),
    )
    peers.split_optimizer(optimizer)
    if optim.offload:
        apply_offload(optimizer, device)
    allocate_state(optimizer)  # so that the checkpoint of step 0 is like every other
    ema = EMA(trainable, settings.ema) if settings.ema else None
    lr_at = build_rate(recipe, num_shares=peers.shares.num_shares)
    plain = Stepper(
        built.task,
        optimizer,
        ema,
        lr_at,
        optim.clip_norm,
        device.type,
        settings.precision == "bf16",
        fade=FadingLimit(optim.clip_norm, optim.clip_fade) if optim.clip_fade and optim.clip_norm else None,
        guard=SpikeGuard(optim.skip_spikes) if optim.skip_spikes else None,
        fp16=settings.precision == "fp16",
        scaler=build_loss_scale(settings),
        master=master,
        peers=peers,
        limits=BatchLimits(settings.oom_split),
    )
    stepper: AnyStepper = plain
    if isinstance(built.task, AutoencoderTask) and recipe.autoencoder.discriminator is not None:
        stepper = add_discriminator(plain, recipe, built.task, lr_at, build_loss_scale(settings))
    samples = build_samples(recipe, built.task, folder.samples)
    config = recipe.model_dump(mode="json")
    tracked = TrackedRun(folder.path, recipe.name, first_step, config, recipe.run.tracking)
    names = recipe.run.trackers if peers.is_first else ()
    trackers = build_trackers(names, tracked, metrics=folder.metrics, tensorboard=folder.tensorboard)
    profile = settings.profile if peers.is_first else None
    profiler = StepProfiler(profile, folder.path / "profile", device.type == "cuda")
    return Trainer(recipe, folder, built, stepper, feed, trackers, samples, profiler=profiler, peers=peers)


def build_rate(recipe: Recipe, *, num_shares: int = 1) -> Callable[[int], float]:
    """The learning rate of each step; the first step is 1. A step has `num_shares` times train.accumulate batches."""
    rate = scaled_rate(recipe, num_processes=num_shares)
    factor = build_schedule(recipe.optim.schedule, recipe.train.num_steps)
    return lambda step: rate * factor(step - 1)


def build_loss_scale(settings: TrainSection) -> LossScale | None:
    """That of the recipe; fp16 has a dynamic one in any case."""
    section = settings.loss_scale or (LossScaleSection() if settings.precision == "fp16" else None)
    return None if section is None else LossScale(section)


@contextmanager
def stop_on_signals(trainer: Trainer) -> Iterator[None]:
    """The first SIGINT or SIGTERM lets the step finish and saves; a second one ends the process at once."""

    def request_stop(number: int, frame: FrameType | None) -> None:
        trainer.stop_signal = number
        trainer.peers.ask_to_stop(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
