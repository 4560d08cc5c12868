"""Cosines of constructed features against their closed form."""

from __future__ import annotations

import math

import pytest
import torch

from frameloom.evaluate.clip_metrics import measure_consistency, measure_text_similarity


def test_frames_that_stay_the_same_are_wholly_consistent() -> None:
    assert measure_consistency(torch.tensor([[3.0, 4.0]]).expand(6, 2)) == pytest.approx(1.0)
    assert measure_consistency(torch.eye(6)) == 0.0


def test_features_that_turn_by_an_angle_a_frame_have_the_mean_of_both_cosines() -> None:
    angles = torch.arange(4) * 0.3
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    expected = sum((math.cos(0.3 * frame) + math.cos(0.3)) / 2 for frame in (1, 2, 3)) / 3
    assert measure_consistency(features) == pytest.approx(expected, abs=1e-6)
    assert measure_consistency(5 * features) == pytest.approx(expected, abs=1e-6)


def test_opposite_features_count_as_nothing_and_a_picture_has_no_number() -> None:
    assert measure_consistency(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) == 0.0
    assert measure_consistency(torch.ones(1, 3)) is None


def test_text_similarity_is_the_mean_cosine_over_frames() -> None:
    features = torch.tensor([[2.0, 0.0], [0.0, 5.0], [1.0, 1.0], [-1.0, 0.0]])
    expected = (1 + 0 + math.sqrt(0.5) - 1) / 4
    assert measure_text_similarity(features, torch.tensor([7.0, 0.0])) == pytest.approx(expected)
