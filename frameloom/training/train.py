"""A whole run: `train(recipe)` joins the ranks, holds the folder, takes up the newest checkpoint and trains."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType

from torch import OutOfMemoryError

from frameloom.config.schema.recipe import Recipe
from frameloom.core.device import avoid_avx512_in_half_precision, pick_device
from frameloom.core.logging import get_logger
from frameloom.distributed.ranks import read_ranks
from frameloom.training.build import build_trainer
from frameloom.training.loop import Trainer
from frameloom.training.memory.device import device_settings
from frameloom.training.memory.oom_split import LoneMisfit, stop_short, stop_to_halve
from frameloom.training.peers import Peers, join_peers
from frameloom.training.run.folder import RunFolder
from frameloom.training.run.length import count_restart
from frameloom.training.run.resuming import ResumeChoices, find_checkpoint, keep_rows, place_data

_log = get_logger(__name__)


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
