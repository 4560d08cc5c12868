"""A whole run: `train(recipe)` joins the ranks, locks the folder, builds the trainer, resumes and trains."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import OutOfMemoryError

from frameloom.checkpoint.writer import Saver
from frameloom.config.rules.parallel import check_world
from frameloom.config.rules.training import scaled_rate
from frameloom.config.schema.recipe import Recipe
from frameloom.core.device import avoid_avx512_in_half_precision, pick_device
from frameloom.core.files import digest_value
from frameloom.core.logging import get_logger
from frameloom.data.loading.loader import log as worker_log
from frameloom.distributed.context import Collective, build_mesh, process_group
from frameloom.distributed.ranks import Ranks, read_ranks
from frameloom.models.precision import Precision
from frameloom.training.agreement import Agreement
from frameloom.training.feed import build_feed, resolve_num_steps
from frameloom.training.logging.profiling import StepProfiler
from frameloom.training.logging.samples import build_samples
from frameloom.training.logging.trackers import build_trackers
from frameloom.training.loop import Trainer
from frameloom.training.memory.oom_split import BatchLimits, FatalOom, read_notes, stop_short, stop_to_halve
from frameloom.training.memory.preflight import run_preflight
from frameloom.training.optim.schedules import build_schedule
from frameloom.training.parallel import Parallelism
from frameloom.training.process_settings import device_settings
from frameloom.training.run.folder import RunFolder
from frameloom.training.run.resuming import (
    ResumeChoices,
    count_restart,
    find_checkpoint,
    keep_rows,
    resolve_position,
    restore,
)
from frameloom.training.step import Stepper, build_update
from frameloom.training.task import MODEL
from frameloom.training.tasks.build import build_task
from frameloom.training.tasks.denoiser import DenoiserTask
from frameloom.training.tasks.subject_tuning import make_class_images

_log = get_logger(__name__)


def train(recipe: Recipe, choices: ResumeChoices | None = None) -> Path:
    """Run a recipe to its end, from the newest complete checkpoint if there is one; gives the run's folder.

    Under torchrun every process calls this, with the same `choices`.
    """
    folder = RunFolder(Path(recipe.run.folder) / recipe.name)
    if recipe.train.precision != "fp32":
        avoid_avx512_in_half_precision()
    with join_ranks(recipe, read_ranks()) as parallel, ExitStack() as held:
        parallel.context.run_on_rank0(lambda: held.enter_context(folder.locked()))
        held.enter_context(device_settings(recipe.train, pick_device(recipe.train.device)))
        run_recipe(recipe, folder, parallel, choices or ResumeChoices())
    return folder.path


@contextmanager
def join_ranks(recipe: Recipe, ranks: Ranks) -> Iterator[Parallelism]:
    """The ranks of a run, connected inside the block; ConfigError when they cannot share the recipe."""
    section, device = recipe.parallel, pick_device(recipe.train.device)
    shape = check_world(recipe, ranks.num_ranks)
    if ranks.num_ranks == 1:
        yield Parallelism(section, device, shape)
        return
    on_gpu, timeout = device.type == "cuda", timedelta(seconds=section.timeout_s)
    if on_gpu:
        device = torch.device("cuda", ranks.local_rank)
    with process_group(ranks, on_gpu=on_gpu, timeout=timeout, keep_warnings=[worker_log]) as context:
        mesh = build_mesh(device.type, **asdict(shape))
        saving = Collective(dist.new_group(backend="gloo", timeout=timeout))
        yield Parallelism(section, device, shape, context, saving, mesh)


def run_recipe(recipe: Recipe, folder: RunFolder, parallel: Parallelism, choices: ResumeChoices) -> None:
    """Build, take up the newest checkpoint, and train; the folder is held."""
    on_first = parallel.context.run_on_rank0
    stored = find_checkpoint(recipe, folder, parallel, choices)
    first_step = 1 if stored is None else stored.step + 1
    on_first(lambda: count_restart(folder.path, first_step - 1))
    trainer = build_trainer(recipe, folder, first_step=first_step, parallel=parallel)
    try:
        if stored is not None:
            restore(trainer, parallel.read_checkpoint(stored, trainer.snapshot().tensors), choices)
        if trainer.step > trainer.recipe.train.num_steps:
            steps = trainer.step, trainer.recipe.train.num_steps
            _log.warning("%s: is at step %d, beyond the %d of this recipe; nothing is trained", folder.path, *steps)
        trainer.epoch, trainer.position = resolve_position(trainer.feed, (trainer.epoch, trainer.position), choices)
        on_first(lambda: keep_rows(folder, trainer.feed.manifest, stored))
        on_first(lambda: folder.write_recipe(recipe))
        trainer.stepper.limits.tighten(on_first(lambda: read_notes(folder.path, after_step=trainer.step)))
        with stop_on_signals(trainer.stepper.agreement), closing(trainer.saver):
            run_preflight(trainer)
            trainer.run()
    except FatalOom as found:
        rank = parallel.context.rank
        stop_to_halve(found, trainer.stepper.limits, folder.path, step=trainer.step + 1, rank=rank)
    except OutOfMemoryError as error:
        stop_short(error, step=trainer.step + 1)
    finally:
        for tracker in trainer.trackers:
            tracker.close()


def build_trainer(
    recipe: Recipe, folder: RunFolder, *, first_step: int, parallel: Parallelism | None = None
) -> Trainer:
    """Everything a run needs, fresh; a checkpoint is restored into it afterwards. `parallel` None: one process."""
    parallel = parallel or Parallelism(recipe.parallel, pick_device(recipe.train.device))
    context, device, num_shares = parallel.context, parallel.device, parallel.assignment.num_shares
    context.run_on_rank0(lambda: make_class_images(recipe))
    feed = build_feed(recipe, folder.bad_clips, parallel.assignment, context.is_first)
    recipe = resolve_num_steps(recipe, feed.manifest, feed.policy, num_ranks=num_shares)
    settings = recipe.train
    if settings.side_by_side is True:
        _log.warning("train.side_by_side is true, which has no effect any more; remove it from the recipe")
    precision = Precision(settings.precision, settings.weights_precision, recipe.parallel.gather)
    task = build_task(recipe, feed, parallel, precision)
    if isinstance(task, DenoiserTask) and task.text_table is not None:
        feed = replace(feed, reader=feed.reader.without_text())
    parallel.shard_model(task.networks[MODEL], task.blocks, precision)
    rate = build_rate(recipe, num_shares=num_shares)
    updates = [
        build_update(phase, task.networks[phase.network], settings, rate, phase.optim.lr / recipe.optim.lr, parallel)
        for phase in task.phases(recipe.optim)
    ]
    # Norms of a discriminator and the balance of its gradient are those of what is computed at once.
    remark = "the discriminator judges the pieces apart" if task.statistics else ""
    agreement = Agreement(parallel, digest_value(recipe.model_dump(mode="json"))[:12])
    limits = BatchLimits(settings.oom_split, remark=remark)
    stepper = Stepper(updates, parallel, agreement, precision, limits, task.statistics)
    names = recipe.run.trackers if context.is_first else ()
    profile = settings.profile if context.is_first else None
    return Trainer(
        recipe,
        folder,
        task,
        stepper,
        feed,
        trackers=build_trackers(names, recipe, folder, first_step),
        saver=Saver(
            folder.checkpoints,
            settings.keep,
            in_background=settings.async_save,
            collective=parallel.saving,
            # The copy of a save in the background may fail while steps go on; the next step tells all ranks.
            on_error=agreement.note_failure,
        ),
        samples=build_samples(recipe, task, folder.samples),
        profiler=StepProfiler(profile, folder.path / "profile", device.type == "cuda"),
    )


def build_rate(recipe: Recipe, *, num_shares: int = 1) -> Callable[[int], float]:
    """The learning rate of each step; the first step is 1. A step has `num_shares` times train.accumulate batches."""
    rate = scaled_rate(recipe, num_processes=num_shares)
    factor = build_schedule(recipe.optim.schedule, recipe.train.num_steps)
    return lambda step: rate * factor(step - 1)


@contextmanager
def stop_on_signals(agreement: Agreement) -> Iterator[None]:
    """The first SIGINT or SIGTERM lets the step finish and saves; a second one ends the process at once.

    Handlers are restored afterwards; off the main thread, which alone may have them, none are set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(number: int, frame: FrameType | None) -> None:
        agreement.request_stop(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
