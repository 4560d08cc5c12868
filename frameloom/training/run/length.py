"""Lengths in epochs as steps, and starts by a scheduler that get nowhere.

A fault that comes back at the same step would otherwise burn the machines until somebody looks. A start by hand counts
anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from frameloom.builders.data import shown_rows
from frameloom.config.rules.training import check_optim, check_train
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError, RunError
from frameloom.core.files import write_json
from frameloom.core.logging import get_logger
from frameloom.data.buckets.policy import BucketPolicy, assign
from frameloom.data.manifest.manifest import Manifest

_log = get_logger(__name__)


def settle_length(recipe: Recipe, manifest: Manifest, policy: BucketPolicy, *, num_ranks: int = 1) -> Recipe:
    """The recipe with its length in steps; ConfigError when that is too short for its schedule or its profile."""
    if recipe.train.epochs is None:
        return recipe
    steps = sum(count_steps(recipe, manifest, policy, epoch, num_ranks) for epoch in range(recipe.train.epochs))
    settled = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps, "epochs": None})})
    if problems := [problem.text for rule in (check_optim, check_train) for problem in rule(settled)]:
        raise ConfigError([f"train.epochs {recipe.train.epochs} are {steps} steps: {text}" for text in problems])
    _log.info("%d epochs are %d steps", recipe.train.epochs, steps)
    return settled


def count_steps(recipe: Recipe, manifest: Manifest, policy: BucketPolicy, epoch: int, num_ranks: int = 1) -> int:
    """Steps of one epoch, as its plan has them, without the cost of putting it in order."""
    assignment = assign(manifest, policy, recipe.seed, epoch)
    shown = shown_rows(recipe, manifest, epoch)
    chosen = assignment if shown is None else assignment[shown]
    counts = np.bincount(chosen[chosen >= 0], minlength=len(policy.buckets))
    per_step, sizes = recipe.train.accumulate * num_ranks, policy.batch_sizes
    if recipe.data.drop_last:
        # The plan leaves out what fills no unit of `accumulate`; ranks share what is there.
        units = int((counts // sizes).sum()) // recipe.train.accumulate
        return -(-units // num_ranks)
    return -(-int((-(-counts // sizes)).sum()) // per_step)


MOST = 3
"""restarts in a row from one step"""
_FILE = "restarts.json"
_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def count_restart(folder: Path, step: int, environment: Mapping[str, str] | None = None) -> None:
    """Note a start from `step` of a run; RunError when it is one automatic restart too many."""
    values = os.environ if environment is None else environment
    path = folder / _FILE
    if all(values.get(name, "0") in ("", "0") for name in _VARIABLES):
        path.unlink(missing_ok=True)
        return
    step_before, num_before = _read(path)
    num_restarts = num_before + 1 if step_before == step else 1
    if num_restarts > MOST:
        raise RunError(
            f"{folder}: {MOST} restarts in a row have not come beyond step {step}, and this one would not either; look "
            "at the messages of the first of them, then start the run by hand"
        )
    write_json(path, {"step": step, "restarts": num_restarts})


def _read(path: Path) -> tuple[int, int]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return int(found["step"]), int(found["restarts"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1, 0
