"""The comparison of skiparse attention runs, agrees with its plain form, and finds what the formula promises."""

from __future__ import annotations

import pytest

from frameloom.bench import skiparse


def test_skiparse_computes_what_a_dense_mask_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skiparse, "GRID", (4, 16, 16))
    found = skiparse.compare_skiparse(rounds=5, warmup=1)
    assert found.num_tokens == 1024 and found.promised_share == 0.25
    assert found.largest_difference < 1e-5
    assert found.share > 0
    assert found.to_json()["share"] == found.share
    assert len(found.describe()) == 7
