"""When batches of as many tokens do not take as long: attention goes with the square of a clip's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frameloom.config.schema import Recipe
from frameloom.plan.estimate import Measured, RunPlan, plan_run
from frameloom.plan.suggest import apply_settings

KEY = "data.token_budget.attention"
# Beyond this attention is nothing beside the rest, and a fit of it is noise.
_MOST_TOKENS = 10**8


@dataclass(frozen=True)
class Balance:
    """`attention` is the setting's value, `imbalance` what an epoch then has; None without data."""

    attention: int
    imbalance: float | None

    def describe(self) -> str:
        shown = f"with {KEY}: {self.attention} the devices of a step take alike"
        return shown if self.imbalance is None else f"{shown}, the slowest {self.imbalance:.2f} times the mean"


def balance_tokens(recipe: Recipe, plan: RunPlan, num_devices: int, measured: Measured) -> Balance | None:
    """What makes the batches of a token budget alike in time; None where they are, or another policy chooses them."""
    if recipe.data.policy != "token_budget":
        return None
    attention = find_attention(plan)
    if attention is None or (recipe.data.token_budget and recipe.data.token_budget.attention == attention):
        return None
    changed = apply_settings(recipe, {KEY: attention})
    epoch = plan_run(changed, plan.device, num_devices, measured=measured).epoch if plan.epoch else None
    return Balance(attention, None if epoch is None else epoch.imbalance)


def find_attention(plan: RunPlan) -> int | None:
    """Tokens of a clip at which attention costs as much as everything else; None where all clips have as many tokens.

    The operations of a clip of N tokens are taken as a N + b N^2, fitted to the buckets' own: the place is a / b.
    """
    tokens = np.array([item.tokens for item in plan.buckets], dtype=np.float64)
    flops = np.array([item.flops / item.bucket.batch_size for item in plan.buckets])
    if len(np.unique(tokens)) < 2:
        return None
    scale = tokens.max()
    # Relative errors count, or the longest clips would decide alone.
    terms = np.stack([tokens / scale, (tokens / scale) ** 2], axis=1) / flops[:, None]
    linear, square = np.linalg.lstsq(terms, np.ones(len(flops)), rcond=None)[0]
    if square <= 0 or linear <= 0:
        return None
    place = round(scale * linear / square)
    return place if place < _MOST_TOKENS else None
