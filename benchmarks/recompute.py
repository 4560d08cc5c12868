"""Memory and time of a step by what is recomputed: nothing, half of the blocks, all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.harness import (
    BenchSettings,
    MissingBaseline,
    Row,
    Times,
    Work,
    can_measure_peak,
    compare_numbers,
    compare_times,
    measure_or_skip,
    measure_peak_bytes,
    take_turns,
)
from benchmarks.model import Case, build_model, draw_inputs, list_cases
from frameloom.config.schema.training import RecomputeSection
from frameloom.training.memory.recompute import apply_recompute

_FAMILIES = ("opensora2", "cogvideox_fun")
_SETTINGS: dict[str, RecomputeSection | bool] = {
    "nothing": False,
    "every second block": RecomputeSection(every=2),
    "all blocks": True,
}


def measure(bench: BenchSettings) -> Iterator[Row]:
    for family in _FAMILIES:
        case = [one for one in list_cases(is_quick=bench.is_quick) if one.family == family][-1]
        yield from measure_or_skip("recompute", family, _measure, case, bench)


def _measure(case: Case, bench: BenchSettings) -> Iterator[Row]:
    if not can_measure_peak():
        raise MissingBaseline("the peak memory of a process is known only on Linux with glibc")
    passes = {name: _passes(case, setting) for name, setting in _SETTINGS.items()}
    # All times come before all peaks: measuring peaks slows allocation down.
    times = take_turns(passes, bench.rounds)
    peaks = {name: measure_peak_bytes(run) for name, run in passes.items()}
    for name in list(_SETTINGS)[1:]:
        yield _compare_memory(case, name, peaks)
        yield _compare_time(case, name, times)


def _compare_memory(case: Case, name: str, peaks: dict[str, int]) -> Row:
    return compare_numbers(
        "recompute",
        f"{case.family} {case.size}, memory with {name} recomputed",
        peaks[name],
        peaks["nothing"],
        unit="B",
        against="nothing recomputed",
    )


def _compare_time(case: Case, name: str, times: dict[str, Times]) -> Row:
    title = f"{case.family} {case.size}, time with {name} recomputed"
    row = compare_times("recompute", title, times[name], times["nothing"], against="nothing recomputed")
    return replace(row, note="forward and backward")


def _passes(case: Case, setting: RecomputeSection | bool) -> Work:
    _family, _, model = build_model(case)
    inputs = draw_inputs(case)
    apply_recompute(model, model.blocks(), setting, torch.device("cpu"))

    def run() -> None:
        made = model(inputs.noisy_BCFHW, inputs.timestep_B, inputs.text.conditions())
        torch.autograd.backward((made - inputs.target_BCFHW).square().mean())
        model.zero_grad(set_to_none=True)

    return run
