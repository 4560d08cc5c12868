"""How a run goes on: which checkpoint, whether it fits the recipe and the data, where in the data, and how often."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from frameloom.checkpoint.reader import Checkpoint, StoredCheckpoint, find_latest
from frameloom.checkpoint.writer import clear_leftovers
from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import CheckpointError, ConfigError, RunError
from frameloom.core.files import write_json
from frameloom.core.logging import get_logger
from frameloom.data.loading.bad_clips import read_bad_clips
from frameloom.data.manifest.manifest import Manifest
from frameloom.training.feed import Feed, Position
from frameloom.training.loop import Trainer
from frameloom.training.parallel import Parallelism
from frameloom.training.run.changes import check_changes, describe_changes, find_changes, write_rows
from frameloom.training.run.folder import RunFolder

_log = get_logger(__name__)

# Groups of tensors that a checkpoint has or has not, and the keys that decide it.
_SWITCHES = {
    "ema": "train.ema",
    "master": "train.weights_precision",
    "discriminator": "autoencoder.discriminator",
    "beside": "autoencoder.learn_logvar or text.encoders.N.train",
}
MOST_RESTARTS = 3
"""automatic restarts in a row from one step"""
_RESTARTS = "restarts.json"
# Set by torchrun and by Slurm.
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class ResumeChoices:
    """What a person has agreed to for this start alone.

    `data_position` is where the data goes on, in samples of the checkpoint's epoch; None: where it was.
    """

    accept_recipe_change: bool = False
    accept_data_change: bool = False
    data_position: int | None = None


def find_checkpoint(
    recipe: Recipe, folder: RunFolder, parallel: Parallelism, choices: ResumeChoices
) -> StoredCheckpoint | None:
    """The checkpoint to go on from, the same on all processes; None for a new run."""

    def prepare() -> None:
        if recipe.run.resume == "never" and folder.checkpoints.is_dir():
            raise RunError(f"{folder.path}: holds a run already and run.resume is never; choose another --name")
        clear_leftovers(folder.checkpoints)
        read_bad_clips(folder.bad_clips, repair=True)

    parallel.context.run_on_rank0(prepare)
    found = find_latest(folder.checkpoints, parallel.saving, set_aside=True)
    step = None if found is None else found.step
    parallel.context.run_on_rank0(lambda: _look_back(recipe, folder, step, choices))
    return found


def _look_back(recipe: Recipe, folder: RunFolder, step: int | None, choices: ResumeChoices) -> None:
    """Refuse a folder that lost its checkpoints, and a recipe that changed unseen."""
    if step is None:
        if folder.has_trained:
            raise CheckpointError(
                f"{folder.path}: has trained before but holds no complete checkpoint; restore one into "
                f"{folder.checkpoints}, or move the folder away to start again"
            )
        # Weights that were trained elsewhere bring nothing else along.
        weights = recipe.model.weights if recipe.task == "denoiser" else recipe.vae.weights
        if weights is not None:
            text = "%s: a new run from the weights of %s; optimizer, step and position in the data start fresh"
            _log.info(text, folder.path, weights)
        return
    if folder.recipe.is_file():
        accept = choices.accept_recipe_change
        try:
            before = load_recipe(folder.recipe, [])
        except ConfigError as error:
            if not accept:
                raise RunError(
                    f"{folder.recipe}: cannot be compared with the recipe of this start ({error}); go on without with "
                    "--accept-recipe-change"
                ) from error
        else:
            check_changes(find_changes(before, recipe), where=str(folder.path), step=step, accept=accept)
    folder.trim_metrics(step)
    _log.info("%s: resuming from step %d", folder.path, step)


def check_data(folder: RunFolder, checkpoint: Checkpoint, feed: Feed, choices: ResumeChoices) -> None:
    """Refuse other data than the checkpoint was made on, with what changed, unless that is accepted."""
    if checkpoint.state["manifest"] == feed.manifest.fingerprint:
        return
    changes = describe_changes(folder.rows, feed.manifest)
    if not choices.accept_data_change:
        raise CheckpointError(
            f"{folder.path}: the manifest has changed since step {checkpoint.step}, so the order of the clips would "
            f"differ: {changes}. Restore the manifest and what text.note, inversion and dreambooth make of its "
            "captions, start a new run with --name, or go on with the new data with --accept-data-change"
        )
    _log.warning("%s: going on with other data than until step %d: %s", folder.path, checkpoint.step, changes)
    feed.bad_clips.start_anew(folder.bad_clips.with_name(f"bad_clips-until-step-{checkpoint.step:08d}.jsonl"))


def keep_rows(folder: RunFolder, manifest: Manifest, checkpoint: StoredCheckpoint | None) -> None:
    """Put the rows down where they are new to the run's folder."""
    is_new = checkpoint is None or checkpoint.state["manifest"] != manifest.fingerprint
    if is_new or not folder.rows.is_file():
        write_rows(folder.rows, manifest)


def check_groups(folder: RunFolder, checkpoint: Checkpoint, own: Collection[str]) -> None:
    """Refuse a checkpoint with other groups of tensors than the run's `own`."""
    for group, key in _SWITCHES.items():
        if (group in checkpoint.tensors) != (group in own):
            raise CheckpointError(
                f"{folder.path}: {key} was switched since step {checkpoint.step}; switch it back, or start a "
                "new run with --name"
            )


def restore(trainer: Trainer, checkpoint: Checkpoint, choices: ResumeChoices | None = None) -> None:
    """Take up a checkpoint; refuse one that was made on other data or for another model."""
    folder, task, stepper = trainer.folder, trainer.task, trainer.stepper
    check_data(folder, checkpoint, trainer.feed, choices or ResumeChoices())
    check_groups(folder, checkpoint, {*task.tensors(), *stepper.tensors()})
    task.load(checkpoint, where=f"{folder.path}: step {checkpoint.step}")
    stepper.load(checkpoint.tensors, checkpoint.state)
    trainer.step = checkpoint.step
    trainer.epoch, trainer.position = checkpoint.state["epoch"], checkpoint.state["position"]
    trainer.nonfinite = checkpoint.state["nonfinite"]


def resolve_position(feed: Feed, position: Position, choices: ResumeChoices) -> Position:
    """Where the data goes on: as asked, else where it was; both moved to the beginning of a batch if need be."""
    epoch, sample = position
    if not (choices.accept_recipe_change or choices.accept_data_change or choices.data_position is not None):
        return position
    plan = feed.plan(epoch)
    if choices.data_position is not None:
        sample = choices.data_position
        if not 0 <= sample < max(plan.num_samples, 1):
            raise ConfigError(
                f"--data-position: {sample} is not in epoch {epoch}, which has {plan.num_samples:,} samples; choose 0 "
                f"to {plan.num_samples - 1}"
            )
    if sample >= plan.num_samples:
        place = (epoch + 1, 0)
    else:
        place = (epoch, int(plan.starts[plan.starts.searchsorted(sample, side="right") - 1]))
    if place != position:
        _log.warning(
            "data: going on at sample %d of epoch %d, not at sample %d of epoch %d", *place[::-1], *position[::-1]
        )
    return place


def count_restart(folder: Path, step: int, environment: Mapping[str, str] | None = None) -> None:
    """Note a start from `step` of a run; RunError when it is one automatic restart too many.

    A fault that comes back at the same step would otherwise burn the machines until somebody looks. A start by hand
    counts anew.
    """
    values = os.environ if environment is None else environment
    path = folder / _RESTARTS
    if all(values.get(name, "0") in ("", "0") for name in _RESTART_COUNTS):
        path.unlink(missing_ok=True)
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        step_before, num_before = int(found["step"]), int(found["restarts"])
    except (OSError, ValueError, KeyError, TypeError):
        step_before, num_before = -1, 0
    num_restarts = num_before + 1 if step_before == step else 1
    if num_restarts > MOST_RESTARTS:
        raise RunError(
            f"{folder}: {MOST_RESTARTS} restarts in a row have not come beyond step {step}, and this one would not "
            "either; look at the messages of the first of them, then start the run by hand"
        )
    write_json(path, {"step": step, "restarts": num_restarts})
