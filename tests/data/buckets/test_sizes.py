from __future__ import annotations

import numpy as np

from frameloom.data.buckets.sizes import nearest_values
from frameloom.models.vaes.config import LengthRule


def test_nearest_value_is_that_of_a_full_search() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        values = draw.permutation(np.round(draw.uniform(0.2, 4, 12), 1)).tolist()
        wanted = np.concatenate([draw.uniform(0, 5, 200), np.round(draw.uniform(0, 5, 200), 1) + 0.05, values])
        full = np.abs(np.array(values)[None, :] - wanted[:, None]).argmin(axis=1)
        assert nearest_values(values, wanted).tolist() == full.tolist()


def test_legal_lengths_follow_the_rule() -> None:
    assert LengthRule().legal(20) == [1, 5, 9, 13, 17]
    assert LengthRule(patch=2).legal(25) == [1, 5, 13, 21]
    assert LengthRule(causal=False).legal(13) == [1, 4, 8, 12]
    assert LengthRule().legal(93, multiple=8) == [29, 61, 93]
    assert LengthRule(patch=2).trim(np.array([0, 1, 49, 85])).tolist() == [0, 1, 45, 85]
