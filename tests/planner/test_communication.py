"""Time for sending: the rings' arithmetic, what hides behind the passes, and what does not."""

from __future__ import annotations

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.rules.parallel import fit_mesh
from frameloom.distributed.sequence_parallel import Exchange, exchanged_bytes
from frameloom.planner.devices import DEVICES, LINK_SHARE
from frameloom.planner.parallel import ModelSize, SendPlan, plan_tokens, plan_weights

SIZE = ModelSize(
    weights=10**9,
    trained=10**9,
    largest_block=10**7,
    weight_bytes=4e9,
    master_bytes=0,
    saved_bytes=4e9,
    vae_bytes=0,
    text_bytes=0,
)
H100 = DEVICES["h100"]
HALF = ("--parallel.gather", "bf16", "--train.precision", "bf16")
LINK = LINK_SHARE * H100.link


def send(num_devices: int, *overrides: str) -> SendPlan:
    recipe = load_recipe("shapes/demo", list(overrides))
    return plan_weights(recipe, SIZE, fit_mesh(recipe.parallel, num_devices), H100)


def test_one_device_sends_nothing() -> None:
    assert send(1) == SendPlan() == send(1, "--parallel.zero", "3")


def test_rings_send_their_bytes() -> None:
    whole = 4e9 * 7 / 8 / LINK
    assert send(8).exposed == pytest.approx(2 * whole) and not send(8).hidden
    assert send(8, "--parallel.zero", "1").exposed == pytest.approx(3 * whole)
    assert send(8, "--parallel.zero", "2").hidden == pytest.approx(2 * whole)
    assert send(8, "--parallel.zero", "3").hidden == pytest.approx(3 * whole)
    assert send(8, "--parallel.zero", "3", *HALF).hidden == pytest.approx(2 * whole)


def test_micro_batches_share_what_is_sent_once_a_step() -> None:
    assert send(8, "--train.accumulate", "4").exposed == pytest.approx(send(8).exposed / 4)
    whole = 4e9 * 7 / 8 / LINK
    assert send(8, "--parallel.zero", "3", "--train.accumulate", "4").hidden == pytest.approx(2.25 * whole)


def test_between_boxes_the_network_is_the_limit() -> None:
    assert send(16).exposed == pytest.approx(2 * 4e9 * 15 / 16 / (LINK_SHARE * H100.network))
    # Copies of parts: eight rings leave a box, each with an eighth of the gradients.
    copies = send(16, "--parallel.zero", "3", "--parallel.shard", "8").hidden
    inside = 3 * 4e9 * 7 / 8 / LINK
    assert copies == pytest.approx(inside + 8 * 2 * 5e8 / 2 / (LINK_SHARE * H100.network))


def test_only_what_is_longer_than_the_passes_is_waited_for() -> None:
    plan = SendPlan(hidden=2.0, exposed=0.5)
    assert plan.waited(5.0) == 0.5 and plan.waited(1.5) == 1.0


def test_exchanged_tokens_follow_the_formula_and_are_always_waited_for() -> None:
    exchanges = [Exchange(1200, 96)] * 3
    sent = 3 * exchanged_bytes(1200, 96, 4, batch=2)
    for recomputes, passes in ((False, 2), (True, 3)):
        plan = plan_tokens(exchanges, 2, 4, H100, number_bytes=2, recomputes=recomputes)
        assert plan == SendPlan(exposed=pytest.approx(passes * sent / LINK))
