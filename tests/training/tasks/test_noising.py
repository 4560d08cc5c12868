"""Noise of training samples: keyed draws, stratified levels, offsets, perturbations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frameloom.data.buckets.policy import Bucket
from frameloom.data.loading.batch import Batch
from frameloom.diffusion.objectives import NoiseSettings
from frameloom.training.tasks.noising import apply_noise_options, draw_levels, draw_normal, draw_uniform


def batch(sample_indices: list[int], epoch: int = 0) -> Batch:
    bucket = Bucket(0, "64px", 9, "1:1", 64, 64, 4)
    return Batch(epoch, 0, bucket, np.array(sample_indices), np.array(sample_indices), [""] * len(sample_indices))


@pytest.mark.parametrize("draw", [draw_uniform, lambda *key: draw_normal(*key, (2, 3), torch.device("cpu"))])
def test_a_sample_draws_the_same_alone_or_in_any_batch(draw):
    whole = draw(5, "noise", batch([3, 4, 5, 6]))
    halves = torch.cat([draw(5, "noise", batch([3, 4])), draw(5, "noise", batch([5, 6]))])
    assert torch.equal(whole, halves)
    for other in (draw(6, "noise", batch([3, 4, 5, 6])), draw(5, "crop", batch([3, 4, 5, 6]))):
        assert not torch.equal(whole, other)
    assert not torch.equal(whole, draw(5, "noise", batch([3, 4, 5, 6], epoch=1)))


def test_draws_have_their_distribution():
    many = batch(list(range(4000)))
    uniform = draw_uniform(0, "timestep", many)
    assert abs(float(uniform.mean()) - 0.5) < 0.02 and float(uniform.min()) >= 0 and float(uniform.max()) < 1
    normal = draw_normal(0, "noise", many, (4,), torch.device("cpu"))
    assert abs(float(normal.mean())) < 0.03 and abs(float(normal.std()) - 1) < 0.03


def test_the_samples_of_a_global_batch_have_a_stratum_each() -> None:
    for start in (0, 12, 24):
        drawn = draw_levels(5, batch(list(range(start, start + 12))), 12)
        assert sorted((drawn * 12).long().tolist()) == list(range(12))
        plain = draw_levels(5, batch(list(range(start, start + 12))))
        assert sorted((plain * 12).long().tolist()) != list(range(12))


def test_strata_do_not_depend_on_how_a_step_is_split() -> None:
    whole = draw_levels(5, batch(list(range(30))), 8)
    parts = torch.cat([draw_levels(5, batch(list(range(30))[rank::3]), 8) for rank in range(3)])
    assert torch.equal(whole[torch.cat([torch.arange(30)[rank::3] for rank in range(3)])], parts)
    assert not torch.equal(whole, draw_levels(6, batch(list(range(30))), 8))
    assert not torch.equal(whole, draw_levels(5, batch(list(range(30)), epoch=1), 8))


def test_strata_are_shuffled_and_uniform_over_all() -> None:
    drawn = draw_levels(1, batch(list(range(8000))), 8)
    counted = torch.bincount((drawn * 40).long(), minlength=40)
    # 1,000 draws in each of 8 strata of 5 cells: exact per stratum, random inside.
    assert torch.equal(counted.reshape(8, 5).sum(dim=1), torch.full((8,), 1000))
    assert (counted - 200).abs().max() < 60
    first = (drawn.reshape(-1, 8)[:, 0] * 8).long()
    assert torch.bincount(first, minlength=8).min() > 80


def test_plain_settings_change_nothing() -> None:
    noise = torch.randn(3, 4, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    same, perturbation = apply_noise_options(NoiseSettings(), noise, 3, batch([1, 2, 3]))
    assert torch.equal(same, noise) and perturbation is None


def test_offsets_are_one_number_per_channel_or_per_sample() -> None:
    noise = torch.zeros(200, 4, 2, 2, 2)
    many = batch(list(range(200)))
    for per, different in (("channel", 800), ("sample", 200)):
        settings = NoiseSettings(noise_offset=0.1, noise_offset_per=per)
        moved, _ = apply_noise_options(settings, noise, 3, many)
        values = moved.flatten(2)
        assert torch.equal(values, values[:, :, :1].expand_as(values))
        assert len(values[:, :, 0].unique()) == different
        assert abs(float(values[:, :, 0].std()) - 0.1) < 0.02
        alone, _ = apply_noise_options(settings, noise[:1], 3, batch([7]))
        assert torch.equal(alone[0], moved[7]) and not torch.equal(alone[0], moved[8])


def test_perturbation_is_noise_of_its_own() -> None:
    noise = torch.randn(50, 4, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    same, perturbation = apply_noise_options(NoiseSettings(input_perturbation=0.1), noise, 3, batch(list(range(50))))
    assert torch.equal(same, noise) and perturbation is not None
    assert abs(float(perturbation.std()) - 0.1) < 0.005
    assert abs(float((perturbation * noise).mean())) < 0.005
