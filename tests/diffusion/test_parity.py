from __future__ import annotations

import pytest
import torch

from frameloom.core.parity import ParityCase
from frameloom.diffusion import parity

# Number of outputs that are compared in each case; the others carry a note.
COMPARED = {
    ("open-sora-v2", "flow_train_step"): 16,
    ("open-sora-v2", "time_shift"): 8,
    ("open-sora-v2", "cfg_combination"): 42,
    ("open-sora-plan", "train_loss_v13"): 49,
}


def read_case(golden, system: str, name: str) -> ParityCase:
    tensors, config = golden(system, name)
    parts = {
        prefix: {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        for prefix in ("weights.", "in.", "out.")
    }
    return ParityCase(name, config, parts["weights."], parts["in."], parts["out."])


@pytest.mark.parametrize(("system", "name"), COMPARED)
def test_every_output_is_within_tolerance_or_says_why_not(golden, system, name):
    case = read_case(golden, system, name)
    assert parity.matches(case)
    outputs = parity.run(case)
    assert {output.name for output in outputs} == set(case.outputs)
    for output in outputs:
        if output.ours is None:
            assert output.note
        else:
            torch.testing.assert_close(output.ours.float(), output.expected, rtol=0, atol=output.tolerance)
    assert sum(output.ours is not None for output in outputs) == COMPARED[system, name]


@pytest.mark.parametrize(("system", "name"), COMPARED)
def test_disturbed_inputs_are_out_of_tolerance(golden, system, name):
    case = read_case(golden, system, name)
    changed = {key: value + 0.01 if value.is_floating_point() else value for key, value in case.inputs.items()}
    outputs = parity.run(ParityCase(name, case.config, case.weights, changed, case.outputs))
    gaps = [((out.ours - out.expected).abs().max() > out.tolerance) for out in outputs if out.ours is not None]
    assert sum(gaps) > len(gaps) / 2


def test_other_cases_are_left_to_other_runners():
    assert not parity.matches(ParityCase("mmdit_flux_like", {}, {}, {}, {}))
