"""Per-row usage of a run's epochs, from its recipe, its newest checkpoint and its list of bad clips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from frameloom.builders.data import build_policy, order_epoch, read_manifest, shown_rows
from frameloom.checkpoint.reader import list_steps, read_state, step_folder
from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import CheckpointError, RunError
from frameloom.core.logging import get_logger
from frameloom.core.progress import ProgressBar
from frameloom.data.buckets.policy import assign, unused_reasons
from frameloom.data.loading.bad_clips import read_bad_clips
from frameloom.data.loading.batch import BadClip
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.order.usage import BAD, EpochUsage, account_epoch, describe_epochs
from frameloom.training.run.folder import RunFolder

_log = get_logger(__name__)


@dataclass(frozen=True)
class RunUsage:
    """Every epoch up to the checkpoint of `step`; `num_filtered` rows are left out by `data.where`."""

    run: Path
    step: int
    manifest: Manifest
    num_filtered: int
    epochs: list[EpochUsage]

    @property
    def problems(self) -> list[str]:
        return [problem for epoch in self.epochs for problem in epoch.problems]

    def describe(self) -> Iterator[str]:
        last = self.epochs[-1]
        yield f"{self.run}: step {self.step:,}, sample {last.position:,} of {last.num_planned:,} in epoch {last.epoch}"
        filtered = f", {self.num_filtered:,} more are left out by data.where" if self.num_filtered else ""
        yield f"{self.manifest.source}: {len(self.manifest):,} rows{filtered}"
        yield ""
        yield from describe_epochs(self.epochs)
        yield ""
        num_bad = sum(epoch.counts[BAD] for epoch in self.epochs)
        if num_bad:
            yield f"{num_bad:,} slots of bad files were filled by other clips of their bucket, or left empty"
        yield from self.problems or [f"every row is accounted for in {len(self.epochs):,} epochs"]


def account_run(run: Path) -> RunUsage:
    """What became of every row in every epoch that the run has begun."""
    folder = RunFolder(run)
    if not folder.recipe.is_file():
        raise RunError(f"{run}: no run, recipe.yaml is missing; name the folder that `frameloom train` wrote")
    recipe = load_recipe(folder.recipe, [])
    state: dict[str, Any] | None = None
    for step in reversed(list_steps(folder.checkpoints)):
        try:
            state = read_state(step_folder(folder.checkpoints, step))
            break
        except CheckpointError as error:
            _log.warning("%s; trying the one before, as a resume would", error)
    if state is None:
        raise CheckpointError(f"{folder.path}: no complete checkpoint, so the position is unknown; train it first")
    manifest = read_manifest(recipe)
    if manifest.fingerprint != state["manifest"]:
        raise CheckpointError(
            f"{run}: {manifest.source} has changed since step {state['step']}, so the plan cannot be worked out again; "
            "restore the manifest of the run"
        )
    bad = read_bad_clips(folder.bad_clips)
    epochs = _account_epochs(recipe, manifest, bad, int(state["epoch"]), int(state["position"]))
    num_filtered = len(read_manifest(recipe, where={})) - len(manifest) if recipe.data.where else 0
    return RunUsage(run, state["step"], manifest, num_filtered, epochs)


def _account_epochs(
    recipe: Recipe, manifest: Manifest, bad: Sequence[BadClip], last: int, position: int
) -> list[EpochUsage]:
    """All epochs before `last`, and `last` itself if a sample of it was used."""
    policy, images = build_policy(recipe), np.isnan(manifest.fps)
    num_epochs = last + 1 if position or not last else last
    found = []
    with ProgressBar("epochs", num_epochs) as bar:
        for epoch in range(num_epochs):
            assignment = assign(manifest, policy, recipe.seed, epoch)
            shown = shown_rows(recipe, manifest, epoch)
            plan = order_epoch(recipe, policy, assignment, epoch, shown)
            done = position if epoch == last else plan.num_samples
            reasons = unused_reasons(manifest, policy, assignment)
            found.append(account_epoch(plan, reasons, position=done, bad=bad, shown=shown, images=images))
            bar.advance()
    return found
