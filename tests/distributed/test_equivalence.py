"""One, two and four processes learn the same: samples, losses, weights, averages and optimizer state of four steps.

The fourth step ends the epoch and is a short one, and batches are cut where clips do not fill them.
"""

from __future__ import annotations

import json

import pytest

from tests.distributed.jobs import Found, largest_difference
from tests.distributed.settings import FAMILIES, OPTIM, SEQUENCES, WORLDS, ZEROS

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


@pytest.mark.parametrize(("family", "world", "zero"), [(name, *pair) for name in FAMILIES for pair in SEQUENCES[name]])
def test_processes_that_divide_a_clip_learn_what_one_does(done, family, world, zero):
    ours, alone = done.found(f"{family} sequence {world} {zero}"), done.found(f"{family} alone")
    read = [rank["rows"] for rank in ours.ranks]
    assert read[0] == read[1] and (world == 2 or (read[2] == read[3] != read[0]))
    assert ours.losses() == pytest.approx(alone.losses(), rel=1e-6)
    assert ours.losses("grad_norm") == pytest.approx(alone.losses("grad_norm"), rel=1e-6)
    for kind in ("model", "ema", "optimizer"):
        assert largest_difference(ours.tensors(kind), alone.tensors(kind)) < 1e-6


@pytest.mark.parametrize(
    ("name", "factor"), [("wrong scale", 0.5), ("wrong scale of shards", 0.5), ("wrong scale of a clip", 2)]
)
def test_every_wrong_scale_of_gradients_is_noticed(done, name, factor):
    """Of whole weights, of split ones, and of the parts of a clip; the first loss is right in all cases."""
    wrong, alone = done.found(name), done.found("opensora2 alone")
    assert wrong.losses()[0] == pytest.approx(alone.losses()[0], rel=1e-6)
    assert wrong.losses("grad_norm")[0] == pytest.approx(alone.losses("grad_norm")[0] * factor, rel=1e-5)
    assert not is_alike(wrong, alone)


def test_gradients_are_clipped_by_the_norm_of_all_parts(done):
    """Norms are compared above; here, that they are beyond the limit: otherwise nothing would have been clipped."""
    assert max(done.found("opensora2 alone").losses("grad_norm")) > OPTIM["clip_norm"]


@pytest.mark.parametrize("zero", [0, 1])
def test_copies_of_half_precision_weights_learn_the_same(done, zero):
    """Weights round alike where their copies do, so a difference in the last bit of a sum may show as one of bf16."""
    ours, alone = done.found(f"copies {zero}"), done.found("copies alone")
    assert ours.rows() == alone.rows() and ours.losses()[0] == pytest.approx(alone.losses()[0], rel=1e-6)
    assert ours.losses() == pytest.approx(alone.losses(), rel=2e-3)
    assert largest_difference(ours.tensors("master"), alone.tensors("master")) < 2e-4
    assert largest_difference(done.found("opensora2 alone").tensors("ema"), alone.tensors("ema")) > 1e-4


@pytest.mark.parametrize("zero", [0, 3])
def test_the_loss_scale_shrinks_alike_on_all_processes(done, zero):
    ours, alone = done.found(f"scaled {zero}"), done.found("scaled alone")
    for found in (ours, alone):
        assert found.losses("overflows")[-1] > 0 and found.losses("loss_scale")[-1] < found.losses("loss_scale")[0]
    assert ours.losses("loss_scale") == alone.losses("loss_scale")
    # As text, because a norm that is not a number equals none.
    assert len({json.dumps(rank["values"]) for rank in ours.ranks}) == 1
    assert ours.losses() == pytest.approx(alone.losses(), rel=1e-3)


@pytest.mark.parametrize("zero", [0, 1])
def test_an_autoencoder_and_its_discriminator_learn_the_same(done, zero):
    """The discriminator's running statistics are those of the clips that a process saw, and nothing is made of them."""
    ours, alone = done.found(f"judged {zero}"), done.found("judged alone")
    assert ours.rows() == alone.rows()
    for name in ("loss", "generator", "discriminator_loss", "grad_norm", "discriminator_grad_norm"):
        assert ours.losses(name) == pytest.approx(alone.losses(name), rel=1e-5)
    for kind in ("model", "ema", "optimizer", "discriminator", "discriminator_optimizer"):
        mine, right = (
            {
                name: tensor
                for name, tensor in found.tensors(kind).items()
                if "running" not in name and "num_b" not in name
            }
            for found in (ours, alone)
        )
        assert largest_difference(mine, right) < 1e-6
    assert alone.losses()[0] != pytest.approx(alone.losses()[1], rel=1e-5)


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
