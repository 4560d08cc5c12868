"""The comparison of objectives runs on the demo's model and tells every feature's cost beside a bare step."""

from __future__ import annotations

from frameloom.bench.objective import FEATURES, compare_objectives


def test_every_feature_has_a_cost_beside_a_bare_step() -> None:
    found = compare_objectives(rounds=1, warmup=0, num_clips=12)
    costs = {cost.name: cost for cost in found.costs}
    assert set(FEATURES) < set(costs) and len(costs) == len(FEATURES) + 6
    assert all(cost.seconds > 0 and cost.share == cost.seconds / found.bare_step_s for cost in found.costs)
    assert found.full_step_ratio == found.full_step_s / found.bare_step_s
    assert len(found.to_json()["costs"]) == len(costs) == len(found.describe()) - 3
