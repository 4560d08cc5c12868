"""The planner's memory model drives the token budget: as many tokens as fit, and not one batch more."""

from __future__ import annotations

from dataclasses import replace

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.recipe import Recipe
from frameloom.planner.devices import choose_device
from frameloom.planner.estimate import Measured, RunPlan, measure_recipe, plan_run
from frameloom.planner.suggest import fitting_tokens, suggest_change

BUCKETS = "{64px: {1: [1.0, 400], 9: [1.0, 400]}}"
DEVICE = choose_device("cpu", "16GB")


def load(tokens: int) -> Recipe:
    words = ["--data.policy", "token_budget", "--data.token_budget", f"{{tokens: {tokens}}}", "--data.buckets", BUCKETS]
    return load_recipe("shapes/demo", [*words, "--train.recompute", "true"])


def plan(tokens: int, memory: float, measured: Measured) -> RunPlan:
    return plan_run(load(tokens), replace(DEVICE, memory=memory), 1, with_data=False, measured=measured)


def test_the_budget_found_fits_and_one_clip_more_does_not() -> None:
    recipe = load(10_000)
    measured = measure_recipe(recipe)
    needed = max(item.total for item in plan(10_000, 16e9, measured).buckets)
    tight = plan(10_000, 0.7 * needed, measured)
    assert tight.breaking
    tokens = fitting_tokens(recipe, tight)
    assert tokens is not None and 0 < tokens < 10_000
    assert not plan(tokens, 0.7 * needed, measured).breaking
    assert plan(tokens + 1, 0.7 * needed, measured).breaking
    change = suggest_change(recipe, tight, 1, measured)
    assert change is not None and not change.plan.breaking
    assert change.settings == {"data.token_budget.tokens": tokens}


def test_without_room_for_a_clip_there_is_no_budget_and_with_much_room_the_limits_bind() -> None:
    recipe = load(10_000)
    measured = measure_recipe(recipe)
    assert fitting_tokens(recipe, plan(10_000, 1e6, measured)) is None
    roomy = plan(10_000, 1e15, measured)
    assert fitting_tokens(recipe, roomy) == 400 * max(item.tokens for item in roomy.buckets)
