"""Golden cases of flow matching: shifted times and sampling schedules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from frameloom.core.parity import ParityCase, ParityOutput, compare_numbers, pair_outputs
from frameloom.diffusion.flow import FlowObjective, open_sora2_alpha, shift_time

_EXTRAS = {
    "no_shift": re.compile(r"no_shift_(\d+)_steps"),
    "constant": re.compile(r"flow_shift_([\d.]+)_of_(\d+)_steps"),
    "tokens": re.compile(r"steps_(\d+)_seq_(\d+)_frames_(\d+)"),
}
_TOLERANCE = 1e-6


def is_time_shift(case: ParityCase) -> bool:
    entries = case.config.get("cases")
    return isinstance(entries, list) and "u" in case.inputs and all("latent_T_H_W" in entry for entry in entries)


def run_time_shift(case: ParityCase) -> list[ParityOutput]:
    alphas = [open_sora2_alpha(*entry["latent_T_H_W"]) for entry in case.config["cases"]]
    ours = {
        f"{entry['i']}.t": shift_time(case.inputs["u"], alpha)
        for entry, alpha in zip(case.config["cases"], alphas, strict=True)
    }
    wanted = [entry["shift_alpha"] for entry in case.config["cases"]]
    return [*pair_outputs(case, ours, _TOLERANCE), compare_numbers("alpha", alphas, wanted, _TOLERANCE)]


def is_schedule(case: ParityCase) -> bool:
    return isinstance(case.config.get("schedules"), list)


def run_schedule(case: ParityCase) -> list[ParityOutput]:
    results = [output for entry in case.config["schedules"] for output in _compare_schedule(entry)]
    for name, wanted in case.config.get("extra", {}).items():
        results.append(compare_numbers(name, _extra_schedule(name), wanted, _TOLERANCE))
    return results


def _compare_schedule(entry: dict[str, Any]) -> Iterator[ParityOutput]:
    area, compression = entry["patch_size"] ** 2, entry["AE_SPATIAL_COMPRESSION"]
    rows, columns = (-(-entry[side] // compression) for side in ("height", "width"))
    latent = _empty_latent(entry["latent_frames"], rows * entry["patch_size"], columns * entry["patch_size"])
    objective = FlowObjective(shift="open_sora2", sampling_patch_area=area)
    name = f"{entry['resolution']} {entry['aspect_ratio']} {entry['num_frames']} frames patch {entry['patch_size']}"
    times_key = next(key for key in entry if key.startswith("timesteps_"))
    ours = objective.schedule(latent, len(entry[times_key]) - 1)
    yield compare_numbers(f"{name} times", ours, entry[times_key], _TOLERANCE)
    alpha = objective.alpha(latent, patch_area=area)
    yield compare_numbers(
        f"{name} alpha, tokens", [alpha, rows * columns], [entry["shift_alpha"], entry["image_seq_len"]], _TOLERANCE
    )


def _empty_latent(frames: int, height: int, width: int) -> torch.Tensor:
    return torch.empty(1, 1, frames, height, width, device="meta")


def _extra_schedule(name: str) -> list[float]:
    latent = _empty_latent(1, 1, 1)
    if found := _EXTRAS["no_shift"].fullmatch(name):
        return FlowObjective().schedule(latent, int(found[1]))
    if found := _EXTRAS["constant"].fullmatch(name):
        return FlowObjective(shift=float(found[1])).schedule(latent, int(found[2]))
    if found := _EXTRAS["tokens"].fullmatch(name):
        steps, tokens, frames = map(int, found.groups())
        objective = FlowObjective(shift="open_sora2", sampling_patch_area=1)
        return objective.schedule(_empty_latent(frames, 1, tokens), steps)
    raise ValueError(f"a schedule called {name!r} is of no known kind")
