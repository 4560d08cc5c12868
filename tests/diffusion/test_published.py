"""Objectives from scheduler files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from frameloom.builders.objective import read_scheduler
from frameloom.core.errors import ConfigError
from frameloom.diffusion.ddpm import DDPMObjective
from frameloom.diffusion.flow import FlowObjective, grid_time

COG = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "snr_shift_scale": 3.0,
}


def test_training_ignores_the_shift_that_the_sampler_applies() -> None:
    training = read_scheduler(COG)
    sampler = replace(training, snr_shift=COG["snr_shift_scale"])
    assert training.snr_shift == 1
    gap = (training.alpha_bar_T - sampler.alpha_bar_T.float()).abs()
    assert float(gap.max()) == pytest.approx(0.264, abs=0.001) and int(gap.argmax()) == 264
    assert sampler.alpha_bar_T.dtype == torch.float64


@pytest.mark.parametrize("change", [{"prediction_type": "flow"}, {"trained_betas": [0.1]}])
def test_what_we_do_not_know_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="scheduler file"):
        read_scheduler({**COG, **change})


def test_even_steps_are_those_of_the_schedule_only_where_they_divide_it() -> None:
    trailing = {rule: DDPMObjective(step_to=rule) for rule in ("next", "even")}
    assert trailing["next"].levels(trailing["next"].schedule(50)) == trailing["even"].levels(
        trailing["even"].schedule(50)
    )
    linspace = {rule: DDPMObjective(step_to=rule, spacing="linspace") for rule in ("next", "even")}
    assert linspace["next"].levels(linspace["next"].schedule(4)) != linspace["even"].levels(
        linspace["even"].schedule(4)
    )
    with pytest.raises(ConfigError, match="step_to"):
        DDPMObjective(step_to="sideways")  # type: ignore[arg-type]


def test_flow_weights_follow_the_time() -> None:
    time_B = torch.tensor([0.25, 0.5, 1.0])
    assert FlowObjective(weighting="sigma_sqrt").weight_B(time_B).tolist() == [16.0, 4.0, 1.0]
    cosmap = FlowObjective(weighting="cosmap").weight_B(time_B)
    assert float(cosmap[1]) == pytest.approx(4 / torch.pi) and float(cosmap[2]) == pytest.approx(2 / torch.pi)
    assert FlowObjective().weight_B(time_B).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match="weighting"):
        FlowObjective(weighting="heavy")  # type: ignore[arg-type]


def test_grid_times_are_whole_levels_and_never_zero() -> None:
    times = grid_time(torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    assert float(times.min()) >= 0.001 and float(times.max()) <= 1
    assert torch.allclose((times * 1000).round(), times * 1000, atol=1e-3)
