"""One, two and four processes learn the same: samples, losses, weights, averages and optimizer state of five steps.

The fourth step ends the epoch and is a short one, and batches are cut where clips do not fill them.
"""

from __future__ import annotations

import pytest

from tests.train.parallel.jobs import Found, largest_difference
from tests.train.parallel.settings import FAMILIES, WORLDS, ZEROS

pytestmark = pytest.mark.timeout(1800)


def is_alike(ours: Found, theirs: Found, tolerance: float = 1e-6) -> bool:
    kinds = [kind for kind in ("model", "ema", "optimizer") if (theirs.folder / f"{kind}.st").is_file()]
    assert "optimizer" in kinds
    return (
        ours.rows() == theirs.rows()
        and ours.losses() == pytest.approx(theirs.losses(), rel=tolerance)
        and ours.losses("grad_norm") == pytest.approx(theirs.losses("grad_norm"), rel=tolerance)
        and all(largest_difference(ours.tensors(kind), theirs.tensors(kind)) < tolerance for kind in kinds)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("zero", ZEROS)
def test_several_processes_learn_what_one_does(done, family, world, zero):
    ours, alone = done.found(f"{family} {world} {zero}"), done.found(f"{family} alone")
    assert is_alike(ours, alone)
    assert [rank["position"] for rank in ours.ranks] == [alone.ranks[0]["position"]] * world
    sizes = [len(rows) for rows in alone.rows()]
    assert len(set(sizes)) > 2, "no short step among them: the test would miss a wrong mean"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", [2, 4])
def test_processes_that_divide_a_clip_learn_what_one_does(done, family, world):
    ours, alone = done.found(f"{family} sequence {world}"), done.found(f"{family} alone")
    read = [rank["rows"] for rank in ours.ranks]
    assert read[0] == read[1] and (world == 2 or (read[2] == read[3] != read[0]))
    assert ours.losses() == pytest.approx(alone.losses(), rel=1e-6)
    for kind in ("model", "ema", "optimizer"):
        assert largest_difference(ours.tensors(kind), alone.tensors(kind)) < 1e-6


def test_a_wrong_scale_of_gradients_is_noticed(done):
    wrong, alone = done.found("wrong scale"), done.found("opensora2 alone")
    assert wrong.rows() == alone.rows() and wrong.losses()[0] == pytest.approx(alone.losses()[0], rel=1e-6)
    assert not is_alike(wrong, alone)
    assert wrong.losses("grad_norm")[0] == pytest.approx(alone.losses("grad_norm")[0] / 2, rel=1e-5)


@pytest.mark.parametrize("name", ["uneven", "hybrid", "hybrid optimizer"])
def test_other_meshes_learn_the_same(done, name):
    """Three processes share four micro-batches with fillers; copies of a split model or optimizer state."""
    assert is_alike(done.found(name), done.found("opensora2 alone"))


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_accumulated_micro_batches_learn_the_same(done, zero):
    assert is_alike(done.found(f"accumulated {zero}"), done.found("accumulated alone"))


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_accumulating_sends_gradients_once(done, zero):
    """A step of two micro-batches on each process reduces as often as one of a single micro-batch."""
    several, single = (done.found(name).ranks[0]["sent"] for name in (f"accumulated {zero}", f"opensora2 4 {zero}"))
    reductions = [{name: count for name, count in sent.items() if "reduce" in name} for sent in (several, single)]
    assert reductions[0] == reductions[1] and sum(reductions[0].values()) > 0


def test_weights_are_gathered_again_only_with_zero_3(done):
    sent = {zero: done.found(f"accumulated {zero}").ranks[0]["sent"] for zero in (0, 2, 3)}
    gathers = {zero: sum(count for name, count in own.items() if "gather" in name) for zero, own in sent.items()}
    assert gathers[0] == 0 < gathers[2] < gathers[3]


def test_half_precision_is_split_too(done):
    """Later losses differ by the rounding of weights that differ by the order of a sum."""
    alone, split, sent = (done.found(name).losses() for name in ("half alone", "half", "half sent"))
    assert split[0] == pytest.approx(alone[0], rel=1e-6) and split == pytest.approx(alone, rel=1e-3)
    assert sent == pytest.approx(alone, rel=1e-2) and sent != split
    assert alone != pytest.approx(done.found("opensora2 alone").losses(), rel=1e-5)


def test_adapters_learn_the_same_beside_split_weights(done):
    assert is_alike(done.found("adapters"), done.found("adapters alone"))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_each_process_holds_a_part_of_the_optimizer(done, zero):
    whole = done.found("opensora2 alone").ranks[0]["state_bytes"]
    parts = [rank["state_bytes"] for rank in done.found(f"opensora2 4 {zero}").ranks]
    assert max(parts) < 0.35 * whole
    assert [rank["state_bytes"] for rank in done.found("opensora2 4 0").ranks] == [whole] * 4
