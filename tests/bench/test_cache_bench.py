"""The cache comparison runs and tells what it found."""

from __future__ import annotations

import json

import pytest

from frameloom.bench.cache import compare_cache


@pytest.mark.slow
def test_reading_encoding_and_opening_are_measured() -> None:
    found = compare_cache(3, num_clips=24, open_rows=3000)
    assert found.encode_ratio > 0
    assert found.open_per_row_s > 0
    assert set(json.loads(json.dumps(found.to_json()))) >= {"npy_ratio", "encode_ratio", "open_per_row_s"}
    assert any("one .npy per clip" in line for line in found.describe())
