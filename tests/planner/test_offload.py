"""A plan knows what optimizer state on the host saves, and proposes it where nothing smaller helps."""

from __future__ import annotations

from frameloom.config.loading.recipe import load_recipe
from frameloom.planner.devices import choose_device
from frameloom.planner.estimate import measure_recipe, plan_run
from frameloom.planner.suggest import suggest_change

WORDS = ["--data.buckets", "{64px: {9: [1.0, 2]}}"]
FULL = {"optim.offload": True, "train.recompute": True}


def test_state_on_the_host_is_proposed_on_one_gpu_before_smaller_batches() -> None:
    recipe = load_recipe("shapes/demo", WORDS)
    measured = measure_recipe(recipe)
    plain = plan_run(recipe, choose_device("a100", None), 1, with_data=False, measured=measured)
    offloaded = load_recipe("shapes/demo", [*WORDS, "--optim.offload", "true", "--train.recompute", "true"])
    least = plan_run(offloaded, plain.device, 1, with_data=False)
    assert least.resident.optimizer == 0 < plain.resident.optimizer and least.resident.weights == plain.resident.weights
    budget = f"{1.01 * max(item.total for item in least.buckets) / 1e6}MB"
    tight = plan_run(recipe, choose_device("a100", budget), 1, with_data=False, measured=measured)
    change = suggest_change(recipe, tight, 1, measured)
    assert tight.breaking and change is not None and change.settings == FULL and not change.plan.breaking
    # The control: a CPU has no other memory, and the batch has to shrink.
    bare = plan_run(recipe, choose_device("cpu", budget), 1, with_data=False, measured=measured)
    other = suggest_change(recipe, bare, 1, measured)
    assert other is None or "data.buckets" in other.settings
