from __future__ import annotations

import pytest

from frameloom.core.errors import ConfigError
from frameloom.core.spelling import distance, nearest, refuse_unknown


@pytest.mark.parametrize(
    ("one", "other", "edits"),
    [
        ("", "", 0),
        ("lr", "lr", 0),
        ("lr", "rl", 1),
        ("l", "lr", 1),
        ("steps", "stpes", 1),
        ("kitten", "sitting", 3),
        ("", "abc", 3),
    ],
)
def test_distance_counts_edits_and_swaps(one: str, other: str, edits: int) -> None:
    assert distance(one, other) == distance(other, one) == edits
    for limit in range(1, 4):
        assert (
            (distance(one, other, limit=limit) == edits)
            if edits <= limit
            else distance(one, other, limit=limit) > limit
        )


def test_nearest_is_none_when_nothing_is_close() -> None:
    assert nearest("banana", ["lr", "steps", "betas"]) is None
    assert nearest("Betas", ["lr", "steps", "betas"]) == "betas"
    assert nearest("weight-decay", ["weight_decay"]) == "weight_decay"


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known() -> None:
    refuse_unknown("latte", ["latte", "sdxl"], what="denoiser family")
    with pytest.raises(ConfigError) as caught:
        refuse_unknown("late", ["sdxl", "latte"], what="denoiser family")
    assert str(caught.value) == "denoiser family: 'late' is not known; did you mean 'latte'? Known: latte, sdxl"
    with pytest.raises(ConfigError) as caught:
        refuse_unknown("zzz", ["sdxl", "latte"], what="denoiser family")
    assert str(caught.value) == "denoiser family: 'zzz' is not known; Known: latte, sdxl"
