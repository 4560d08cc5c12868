"""One sum over all processes tells whether they do the same step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from frameloom.core.random import numpy_stream
from frameloom.data.order.rank_assignment import PlannedStep
from frameloom.training.agreement import Ballot, Claim, claim_step, count_votes, describe_difference, describe_mates
from tests.data.order.test_rank_assignment import make_plan

CLAIM = claim_step(7, PlannedStep(make_plan(1), 2, 6, ["a", "b", "c"]), "recipe")


def tally(claims: list[Claim], reads: list[list[int]] | None = None, mates: int = 1):
    ballots = [
        Ballot(claim.words(), (reads or [[1, 2, 3]] * len(claims))[rank], mates, rank % mates == 0, {"loss": 0.25})
        for rank, claim in enumerate(claims)
    ]
    total = np.sum([ballot.pack() for ballot in ballots], axis=0)
    return count_votes(total.tolist(), len(claims), ["loss"])


def others() -> list[Claim]:
    rows = CLAIM.rows.copy()
    rows[-1] += 1
    return [
        dataclasses.replace(CLAIM, step=8),
        dataclasses.replace(CLAIM, epoch=1),
        dataclasses.replace(CLAIM, microbatches=(2, 5)),
        dataclasses.replace(CLAIM, shapes={"a": 4}),
        dataclasses.replace(CLAIM, buckets=CLAIM.buckets[::-1] + 1),
        dataclasses.replace(CLAIM, rows=rows),
        dataclasses.replace(CLAIM, recipe="other"),
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4096])
def test_equal_claims_agree_and_sums_are_exact(world):
    count = tally([CLAIM] * world)
    assert count.is_agreed and count.sums == {"loss": 0.25 * world}


@pytest.mark.parametrize("other", others(), ids=lambda claim: str(claim.facts()))
@pytest.mark.parametrize("world", [2, 4096])
def test_one_other_claim_among_many_is_found(other, world):
    assert not tally([CLAIM] * (world - 1) + [other]).claims_agree


def test_many_different_claims_are_found():
    words = numpy_stream(0, "words").integers(0, 2**16, (1000, 8, 3))
    for rows in words:
        total = np.sum([Ballot([int(w) for w in row], [0, 0, 0]).pack() for row in rows], axis=0)
        assert not count_votes(total.tolist(), 8, []).claims_agree


def test_mates_must_have_read_the_same_and_others_need_not():
    reads = [[1, 2, 3], [1, 2, 3], [9, 8, 7], [9, 8, 7]]
    assert tally([CLAIM] * 4, reads, mates=2).is_agreed
    assert not tally([CLAIM] * 4, [*reads[:3], [9, 8, 6]], mates=2).mates_agree


def test_the_message_names_only_what_differs_and_who_has_it():
    facts = [CLAIM.facts()] * 3 + [dataclasses.replace(CLAIM, step=8).facts()]
    text = describe_difference(facts, "step 7: no")
    assert text.splitlines() == ["step 7: no; nothing was changed", "  step: ranks 0, 1, 2: 7", "  step: rank 3: 8"]
    text = describe_mates([(0, "rows [1]"), (0, "rows [2]"), (1, "rows [5]"), (1, "rows [5]")], "step 7: no")
    assert text.splitlines()[1:] == ["  rank 0 read rows [1]", "  rank 1 read rows [2]"]
