"""From a length in epochs to one in steps, which follows from the data and the plan of each epoch."""

from __future__ import annotations

import numpy as np

from frameloom.config.optim_checks import check_optim
from frameloom.config.schema import Recipe
from frameloom.config.train_checks import check_train
from frameloom.core.errors import ConfigError
from frameloom.core.log import get_logger
from frameloom.data.buckets import BucketPolicy, assign
from frameloom.data.manifest import Manifest
from frameloom.train.data_parts import shown_rows

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
