"""The comparison of autoencoders runs, and both sides compute the same."""

from __future__ import annotations

import pytest

from frameloom.bench.vae import compare_vaes


@pytest.mark.slow
def test_both_sides_of_every_case_agree() -> None:
    found = compare_vaes(rounds=3, clip=(9, 32, 32))
    assert [duel.family for duel in found.duels] == ["wfvae", "kl", "cogvideox", "hunyuan"]
    assert all(duel.largest_difference < 1e-4 for duel in found.duels)
    assert all((duel.ratio("encode_s") or 0) > 0 for duel in found.duels)
    assert len(found.describe()) == 2 + 3 * len(found.duels)
    assert found.to_json()["rounds"] == 3
