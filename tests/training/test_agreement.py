"""One sum over all processes tells whether they do the same step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from frameloom.core.random import numpy_stream
from frameloom.data.order.rank_assignment import PlannedStep
from frameloom.training.agreement import StepFingerprint, check_words, describe_difference, describe_read, pack_words
from tests.data.order.test_rank_assignment import make_plan

STEP = StepFingerprint.of(7, PlannedStep(make_plan(1), 2, 6, ["a", "b", "c"]), "recipe")


def tally(steps: list[StepFingerprint], reads: list[list[int]] | None = None, peers: int = 1) -> tuple[bool, bool]:
    packed = [
        pack_words(step.words(), (reads or [[1, 2, 3]] * len(steps))[rank], peers, is_first=rank % peers == 0)
        for rank, step in enumerate(steps)
    ]
    return check_words(np.sum(packed, axis=0).tolist(), len(steps))


def others() -> list[StepFingerprint]:
    rows = STEP.rows.copy()
    rows[-1] += 1
    return [
        dataclasses.replace(STEP, step=8),
        dataclasses.replace(STEP, epoch=1),
        dataclasses.replace(STEP, microbatches=(2, 5)),
        dataclasses.replace(STEP, shapes={"a": 4}),
        dataclasses.replace(STEP, buckets=STEP.buckets[::-1] + 1),
        dataclasses.replace(STEP, rows=rows),
        dataclasses.replace(STEP, recipe="other"),
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4096])
def test_equal_steps_agree(world):
    assert tally([STEP] * world) == (True, True)


@pytest.mark.parametrize("other", others(), ids=lambda step: str(step.describe()))
@pytest.mark.parametrize("world", [2, 4096])
def test_one_other_step_among_many_is_found(other, world):
    assert tally([STEP] * (world - 1) + [other]) == (False, True)


def test_many_different_steps_are_found():
    words = numpy_stream(0, "words").integers(0, 2**16, (1000, 8, 3))
    for rows in words:
        total = np.sum([pack_words([int(w) for w in row], [0, 0, 0]) for row in rows], axis=0)
        assert check_words(total.tolist(), 8) == (False, True)


def test_sequence_peers_must_have_read_the_same_and_others_need_not():
    reads = [[1, 2, 3], [1, 2, 3], [9, 8, 7], [9, 8, 7]]
    assert tally([STEP] * 4, reads, peers=2) == (True, True)
    assert tally([STEP] * 4, [*reads[:3], [9, 8, 6]], peers=2) == (True, False)


def test_the_message_names_only_what_differs_and_who_has_it():
    facts = [STEP.describe()] * 3 + [dataclasses.replace(STEP, step=8).describe()]
    text = describe_difference(facts, "step 7: no")
    assert text.splitlines() == ["step 7: no; nothing was changed", "  step: ranks 0, 1, 2: 7", "  step: rank 3: 8"]
    text = describe_read([(0, "rows [1]"), (0, "rows [2]"), (1, "rows [5]"), (1, "rows [5]")], "step 7: no")
    assert text.splitlines()[1:] == ["  rank 0 read rows [1]", "  rank 1 read rows [2]"]
