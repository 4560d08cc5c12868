"""The two sides of a step are one model: same weights, same numbers, same gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.baselines import build_baseline
from benchmarks.harness import BenchSettings
from benchmarks.model import (
    Case,
    build_model,
    choose_bare,
    configure,
    count_flops,
    draw_inputs,
    find_gap,
    list_batches,
    list_cases,
    measure,
    our_step,
)
from benchmarks.plain_models import BareDiT

TINY = {case.family: case for case in list_cases(is_quick=True)}
LARGE = [case for case in list_cases() if case.size != "tiny"]


@pytest.mark.parametrize("name", TINY)
def test_a_peer_predicts_the_same_and_has_the_same_gradients(name: str) -> None:
    case = TINY[name]
    _family, _, model = build_model(case)
    baseline, inputs = build_baseline(name, model), draw_inputs(case)
    arguments = (inputs.noisy_BCFHW, inputs.timestep_B, inputs.text)
    noisy_BCFHW, timestep_B, text = arguments
    ours, theirs = model(noisy_BCFHW, timestep_B, text.conditions()), baseline.predict(*arguments)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    other = baseline.predict(inputs.noisy_BCFHW, inputs.timestep_B * 0.5, inputs.text)
    assert (other - theirs).abs().max() > 1e-3
    for side in (ours, theirs):
        torch.autograd.backward((side - inputs.target_BCFHW).square().mean())
    norms = [
        torch.stack([p.grad.square().sum() for p in one.parameters() if p.grad is not None]).sum()
        for one in (model, baseline.module)
    ]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_sides_that_predict_otherwise_are_not_timed(wrong: float) -> None:
    case = TINY["latte"]
    family, _, model = build_model(case)
    baseline, inputs = build_baseline("latte", model), draw_inputs(case)
    assert find_gap(family, model, baseline, inputs) < 1e-4
    with torch.no_grad():
        next(model.parameters()).add_(wrong)
    with pytest.raises(ValueError, match="should predict the same"):
        find_gap(family, model, baseline, inputs)


def test_our_step_moves_weights_as_plain_adamw_does() -> None:
    moved = {}
    for name in ("ours", "plain", "another rate"):
        family, _, model = build_model(TINY["opensora2"])
        inputs = draw_inputs(TINY["opensora2"])
        before = torch.cat([value.detach().flatten() for value in model.parameters()])
        if name == "ours":
            our_step(family, model, inputs)()
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if name == "plain" else 2e-5)
            prediction = model(inputs.noisy_BCFHW, inputs.timestep_B, inputs.text.conditions())
            torch.autograd.backward(F.mse_loss(prediction, inputs.target_BCFHW))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        moved[name] = torch.cat([value.detach().flatten() for value in model.parameters()]) - before
    shares = {
        name: torch.isclose(moved["ours"], moved[name], rtol=1e-2, atol=1e-8).float().mean()
        for name in ("plain", "another rate")
    }
    # Adam makes a full step of a gradient that is nothing but rounding, of few numbers here.
    assert moved["ours"].abs().median() > 0 and shares["plain"] > 0.98 and shares["another rate"] < 0.5


@pytest.mark.parametrize("name", [name for name in TINY if name != "sdxl"])
def test_all_blocks_of_the_other_side_are_found(name: str) -> None:
    _family, _, model = build_model(TINY[name])
    assert len(build_baseline(name, model).list_blocks()) == len(model.blocks())


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.family)
def test_the_larger_models_have_about_30_million_parameters_and_enough_tokens(case: Case) -> None:
    family, config = configure(case)
    with torch.device("meta"):
        model = family.build(config)
    assert 25e6 < sum(parameter.numel() for parameter in model.parameters()) < 35e6
    assert config.num_tokens(case.latent) >= 1024


def test_operations_are_those_of_the_formula() -> None:
    """Six for every weight and token; attention four of N^2 D forward, and ten backward, which computes scores anew."""
    bare = BareDiT(width=512, num_heads=4, batch=2, num_tokens=1024)
    assert bare.depth == 6 and bare.name == "a bare DiT, 6 blocks of 512 channels"
    per_block = 6 * 1024 * 12 * 512**2 + 14 * 1024**2 * 512 + 6 * 6 * 512**2
    assert bare.count_flops() == pytest.approx(2 * 6 * per_block, rel=0.01)


def test_it_is_like_the_model_beside_which_it_stands() -> None:
    for case in (*list_cases(), *list_batches()):
        bare = choose_bare(case, 1024)
        if case.family == "sdxl" or case.size == "tiny":
            assert bare is None
            continue
        assert bare is not None and bare.batch == case.batch
        assert 25e6 < 18 * bare.depth * bare.width**2 < 38e6
        assert 0.7 < bare.count_flops() / count_flops(case) < 1.4


@pytest.mark.slow
def test_a_quick_run_measures_every_family() -> None:
    rows = list(measure(BenchSettings(1, is_quick=True)))
    assert [row.name for row in rows] == [f"{family} tiny" for family in TINY]
    assert all(row.ratio and row.ratio > 0 and not row.problem for row in rows)
