"""Golden cases of noise: schedules and short trajectories, noising and losses, noise levels drawn in strata.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from frameloom.builders.objective import read_scheduler
from frameloom.diffusion.noise_levels import stratify
from frameloom.diffusion.objectives import (
    DDPMObjective,
    FlowObjective,
    Noised,
    Objective,
    add_noise,
    grid_time,
    logit_normal_time,
    offset_noise,
    open_sora2_shift,
    shift_time,
    snr,
    weighted_error_B,
)
from frameloom.diffusion.samplers import run_sampler
from tests.parity.cases import (
    ParityCase,
    ParityOutput,
    above_rounding,
    compare_numbers,
    golden,
    largest,
    leave_out,
    pair_outputs,
    pick_prefixed,
)

_SCALED = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
_SCHEDULERS: dict[str | None, dict[str, Any]] = {
    None: {},
    "v1_5": _SCALED,
    "cogvideox": {**_SCALED, "snr_shift": 3.0},
}
_NUM_LEVELS = 1000
# Levels of a DDPM do not depend on the latent.
_NO_LATENT = torch.empty(0)


@golden(lambda case: {"configs", "trajectory_steps"} <= case.config.keys())
def run_scheduler(case: ParityCase) -> list[ParityOutput]:
    ours: dict[str, Tensor] = {}
    for name, config in case.config["configs"].items():
        model = name.partition(".")[0]
        for scheduler in ("train_ddpm", "ddim_origin", "ddim_cog"):
            objective = read_sampler(config, scheduler)
            ours[f"{model}.{scheduler}.alphas_cumprod"] = objective.alpha_bar_T
            ours[f"{model}.{scheduler}.final_alpha_cumprod"] = _find_last_alpha_bar(objective)
            ours |= _follow(case, objective, f"{name}.{scheduler}")

    def allow(name: str, expected: Tensor) -> float:
        if not expected.is_floating_point():
            return 0.0
        # Our schedules are in float64 where they shift, CogVideoX's own always.
        is_single = torch.float32 in (expected.dtype, ours[name].dtype if name in ours else expected.dtype)
        return above_rounding(1e-6 if is_single else 1e-12)(name, expected)

    return pair_outputs(case, ours, allow)


def _find_last_alpha_bar(objective: DDPMObjective) -> Tensor:
    """Of what the last step goes to, the latent without noise."""
    _, reached = objective.steps(1, _NO_LATENT)[-1]
    return torch.ones(1) if reached is None else objective.coefficients(torch.tensor([reached])).alpha.square()


def _list_indices(objective: DDPMObjective, num_steps: int) -> list[int]:
    return [round(now * objective.num_train_timesteps) for now, _ in objective.steps(num_steps, _NO_LATENT)]


def read_sampler(config: Mapping[str, Any], scheduler: str) -> DDPMObjective:
    """As published, only CogVideoX's own sampler knows the shift of the schedule: `objective.snr_shift` of a recipe."""
    objective = read_scheduler(config)
    return replace(objective, snr_shift=config["snr_shift_scale"]) if scheduler == "ddim_cog" else objective


def _follow(case: ParityCase, objective: DDPMObjective, prefix: str) -> dict[str, Tensor]:
    """Visited indices, and the latents of a walk through given predictions."""
    ours = {}
    for name in case.outputs:
        if name.startswith(f"{prefix}.timesteps"):
            ours[name] = torch.tensor(_list_indices(objective, int(name.removeprefix(f"{prefix}.timesteps"))))
    predictions = (case.inputs[f"trajectory.model_output.{step}"] for step in range(case.config["trajectory_steps"]))

    def keep(step: int, x: Tensor) -> None:
        ours[f"{prefix}.trajectory.{step - 1}"] = x

    run_sampler(
        "default",
        objective,
        lambda x, timestep_B: next(predictions),
        case.inputs["trajectory.start"],
        num_steps=case.config["trajectory_steps"],
        on_step=keep,
    )
    return ours


@golden(
    lambda case: (
        {"cases", "scheduler"} <= case.config.keys() and any(name.endswith("noise_pred") for name in case.inputs)
    )
)
def run_loss(case: ParityCase) -> list[ParityOutput]:
    """CogVideoX-Fun's training loss; its latents are [B, F, C, H, W]."""
    ours: dict[str, Tensor] = {}
    for entry in case.config["cases"]:
        given = {name: case.inputs[f"{entry['k']}.{name}"] for name in ("latents", "noise", "noise_pred", "timesteps")}
        config = {**case.config["scheduler"], "prediction_type": entry["prediction_type"]}
        motion_share = entry["motion_sub_loss_ratio"] if entry["motion_sub_loss"] else 0.0
        latent, noise, prediction = (given[name].transpose(1, 2) for name in ("latents", "noise", "noise_pred"))
        noised = _add_noise(config, latent, noise, given["timesteps"])
        loss = weighted_error_B(prediction, noised, motion_share=motion_share).mean()
        ours |= {
            f"{entry['k']}.noisy_latents": noised.noisy_BCFHW.transpose(1, 2),
            f"{entry['k']}.target": noised.target_BCFHW.transpose(1, 2),
            f"{entry['k']}.loss": loss[None],
        }
    return pair_outputs(case, ours, 1e-6)


def _add_noise(config: Mapping[str, Any], latent: Tensor, noise: Tensor, index_B: Tensor) -> Noised:
    if config["prediction_type"] != "epsilon" or not config["rescale_betas_zero_snr"]:
        return add_noise(read_scheduler(config), latent, noise, index_B / _NUM_LEVELS)
    # Refused, since the last level holds no latent; v-prediction noises alike, and below that level epsilon is defined.
    objective = read_scheduler({**config, "prediction_type": "v_prediction"})
    return add_noise(objective, latent, noise, index_B / _NUM_LEVELS)._replace(target_BCFHW=noise)


@golden(
    lambda case: isinstance(case.config.get("run"), dict) and {"model_input", "base_noise", "u"} <= case.inputs.keys()
)
def run_train_loss(case: ParityCase) -> list[ParityOutput]:
    """Open-Sora-Plan 1.3's training loss, with its gradient."""
    ours: dict[str, Tensor] = {
        "schedule.alphas_cumprod_plain": DDPMObjective(zero_terminal_snr=False).alpha_bar_T,
        "schedule.alphas_cumprod_zero_snr": DDPMObjective().alpha_bar_T,
        # From the published levels: near the first one a last bit of them, which processors round in their own way,
        # moves the ratio by a thousandth.
        "schedule.snr_all_t_zero_snr": snr(case.outputs["schedule.alphas_cumprod_zero_snr"]),
    }
    for name, settings in case.config["run"].items():
        found = _run_flow(case, settings) if settings.get("rf") else _run_ddpm(case, settings)
        ours |= {f"{name}.{key}": tensor for key, tensor in found.items()}
    left_out = {}
    for name, settings in case.config["run"].items():
        is_sample, is_masked = settings["prediction_type"] == "sample", settings["masked"]
        if is_sample or is_masked:
            deviation = "sample-prediction" if is_sample else "padded-samples"
            left_out |= {f"{name}.{key}": deviation for key in ("loss", "grad_model_output")}
            for key in ("loss", "grad_model_output"):
                ours.pop(f"{name}.{key}", None)
    return pair_outputs(case, ours, _tolerance_of_loss, left_out)


def _tolerance_of_loss(name: str, expected: Tensor) -> float:
    # An error of 1e-6 would be large for a gradient: small tensors are held to their own size.
    size = largest(expected)
    if name.endswith("snr") or ".snr_" in name:
        return 1e-5 * size
    return 1e-5 * size if size < 0.1 else above_rounding(1e-6)(name, expected)


def _run_flow(case: ParityCase, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    flow = FlowObjective(sigma_min=0.0, weighting=settings.get("weighting_scheme", "none"))
    time_B = grid_time(case.inputs["u"])
    # Its flow branch adds no noise offset.
    noised = add_noise(flow, case.inputs["model_input"], case.inputs["base_noise"], time_B)
    return {"timesteps_used": time_B * _NUM_LEVELS, **_measure(case, settings, flow, noised)}


def _run_ddpm(case: ParityCase, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    index_B = case.inputs["timesteps"]
    offset_BC = case.inputs["offset_noise"][:, :, 0, 0, 0]
    noise = offset_noise(case.inputs["base_noise"], offset_BC, settings["noise_offset"])
    is_epsilon = settings["prediction_type"] == "epsilon"
    ddpm = DDPMObjective(
        zero_terminal_snr=settings["rescale_betas_zero_snr"],
        prediction="epsilon" if is_epsilon else "v",
        snr_gamma=settings["snr_gamma"],
        **_SCHEDULERS[settings.get("scheduler")],
    )
    noised = add_noise(ddpm, case.inputs["model_input"], noise, index_B / _NUM_LEVELS)
    alpha_bar_B = ddpm.alpha_bar_T[index_B]
    found = {
        "noise": noise,
        "timesteps_used": (noised.timestep_B * ddpm.num_train_timesteps).round().long(),
        "alphas_cumprod_at_t": alpha_bar_B,
        "snr": snr(alpha_bar_B.float()),
    }
    if settings["prediction_type"] == "sample":
        return found | {"noisy_model_input": noised.noisy_BCFHW}
    return found | _measure(case, settings, ddpm, noised)


def _measure(case: ParityCase, settings: Mapping[str, Any], objective: Objective, noised: Noised) -> dict[str, Tensor]:
    prediction = case.inputs["model_output"].clone().requires_grad_()
    loss = weighted_error_B(prediction, noised, motion_share=objective.motion_share).mean()
    (grad,) = torch.autograd.grad(loss, prediction)
    return {
        "noisy_model_input": noised.noisy_BCFHW,
        "target": noised.target_BCFHW,
        "loss": loss.detach(),
        "grad_model_output": grad,
    }


@golden(lambda case: {"single_process", "distributed_uniform"} <= case.config.keys())
def run_timestep_sampling(case: ParityCase) -> list[ParityOutput]:
    """CogVideoX-Fun's draws, as the uniform numbers that lead our law of noise levels to them."""
    return list(_compare_draws(case.config))


def _compare_draws(config: Mapping[str, Any]) -> Iterator[ParityOutput]:
    for number, entry in enumerate(config["single_process"]):
        wanted, levels = pick_prefixed(entry, "first_"), range(entry["num_idx"])
        drawn = _replay_draws(levels, entry["generator_seed"], len(wanted), entry["n_samples"])
        yield compare_numbers(f"one process {number}", _place(drawn, levels, 0, 1), wanted)
    for entry in config["distributed_uniform"]:
        yield from _compare_strata(entry)
    if helper := config.get("lognorm_helper_defined_but_unused"):
        generator = torch.Generator().manual_seed(helper["generator_seed"])
        drawn = (logit_normal_time(torch.randn(helper["n"], generator=generator)) * _NUM_LEVELS).int()
        first = pick_prefixed(helper, "first_")
        yield compare_numbers("logit-normal, first", drawn[: len(first)], first)
        ours = [float(value) for value in (drawn.double().mean(), drawn.double().std(), drawn.min(), drawn.max())]
        yield compare_numbers("logit-normal", ours, [helper[key] for key in ("mean", "std", "min", "max")], 1e-6)


def _compare_strata(entry: Mapping[str, Any]) -> Iterator[ParityOutput]:
    """Each group of processes has its part of all levels, as each of our strata has."""
    size, num_levels, num_strata, width = (
        entry[key] for key in ("world_size", "num_idx", "group_num", "sigma_interval")
    )
    for rank in entry["ranks"]:
        stratum = rank["rank"] // entry["group_width"]
        levels = range(stratum * width, (stratum + 1) * width)
        name = f"rank {rank['rank']} of {size} processes, {num_levels} levels"
        wanted, seed = pick_prefixed(rank, "first_"), rank["generator_seed"]
        drawn = _replay_draws(levels, seed, len(wanted), len(wanted[0]))
        yield compare_numbers(name, _place(drawn, range(num_levels), stratum, num_strata, levels), wanted)
        num_draws = next(int(key.removeprefix("mean_of_")) for key in rank if key.startswith("mean_of_"))
        many = _place(_replay_draws(levels, seed, 1, num_draws), range(num_levels), stratum, num_strata, levels)
        stats = [pick_prefixed(rank, f"{kind}_of_") for kind in ("min", "max", "mean")]
        ours = [float(many.min()), float(many.max()), float(many.double().mean())]
        yield compare_numbers(f"{name}, range and mean", ours, stats, 1e-9 * num_levels)
    yield leave_out(f"parts of {size} processes", "strata-from-the-recipe")


def _replay_draws(levels: range, seed: int, num_calls: int, num_samples: int) -> Tensor:
    """What the published generator gives, [calls, samples]."""
    generator = torch.Generator().manual_seed(seed)
    calls = [torch.randint(levels.start, levels.stop, (num_samples,), generator=generator) for _ in range(num_calls)]
    return torch.stack(calls)


def _place(drawn: Tensor, all_levels: range, stratum: int, num_strata: int, levels: range | None = None) -> Tensor:
    """Our levels for uniform draws in the middle of the published ones, within a stratum."""
    levels = levels or all_levels
    uniform = (drawn.flatten().double() - levels.start + 0.5) / len(levels)
    return _place_uniform(uniform, stratum, num_strata, len(all_levels)).reshape(drawn.shape)


def _place_uniform(uniform_B: Tensor, stratum: int, num_strata: int, num_levels: int) -> Tensor:
    objective = DDPMObjective(num_train_timesteps=num_levels)
    draw_B = stratify(uniform_B, torch.full(uniform_B.shape, stratum), num_strata)
    return (objective.timesteps(draw_B, _NO_LATENT) * num_levels).round().long()


@golden(lambda case: {"explicit_uniform_sampling_v131", "collate"} <= case.config.keys())
def run_ranks_and_collate(case: ParityCase) -> list[ParityOutput]:
    """Open-Sora-Plan 1.3.1: levels drawn in strata by rank, and clips of several sizes in one batch."""
    return [
        *(_compare_ranks(number, entry) for number, entry in enumerate(case.config["explicit_uniform_sampling_v131"])),
        *(
            leave_out(f"{name} {number}", "padded-batches")
            for number in range(len(case.config["collate"]))
            for name in ("picked", "pixels", "cells", "cells with picture", "pixels with picture")
        ),
    ]


def _compare_ranks(number: int, entry: Mapping[str, Any]) -> ParityOutput:
    generator = random.Random(entry["python_random_seed"])
    # The published code draws the whole batch twice and uses the second.
    drawn = [generator.random() for _ in range(2 * entry["bsz"])][entry["bsz"] :]
    ours = _place_uniform(torch.tensor(drawn, dtype=torch.float64), entry["rank"], entry["n"], entry["T"])
    return compare_numbers(f"noise levels {number}", ours, entry["timesteps"])


_EXTRAS = {
    "no_shift": re.compile(r"no_shift_(\d+)_steps"),
    "constant": re.compile(r"flow_shift_([\d.]+)_of_(\d+)_steps"),
    "tokens": re.compile(r"steps_(\d+)_seq_(\d+)_frames_(\d+)"),
}
_FLOW_TOLERANCE = 1e-6


def is_time_shift(case: ParityCase) -> bool:
    entries = case.config.get("cases")
    return isinstance(entries, list) and "u" in case.inputs and all("latent_T_H_W" in entry for entry in entries)


@golden(is_time_shift)
def run_time_shift(case: ParityCase) -> list[ParityOutput]:
    alphas = [open_sora2_shift(*entry["latent_T_H_W"]) for entry in case.config["cases"]]
    ours = {
        f"{entry['i']}.t": shift_time(case.inputs["u"], alpha)
        for entry, alpha in zip(case.config["cases"], alphas, strict=True)
    }
    wanted = [entry["shift_alpha"] for entry in case.config["cases"]]
    return [*pair_outputs(case, ours, _FLOW_TOLERANCE), compare_numbers("alpha", alphas, wanted, _FLOW_TOLERANCE)]


@golden(lambda case: isinstance(case.config.get("schedules"), list))
def run_schedule(case: ParityCase) -> list[ParityOutput]:
    results = [output for entry in case.config["schedules"] for output in _compare_schedule(entry)]
    for name, wanted in case.config.get("extra", {}).items():
        results.append(compare_numbers(name, _extra_schedule(name), wanted, _FLOW_TOLERANCE))
    return results


def _compare_schedule(entry: dict[str, Any]) -> Iterator[ParityOutput]:
    area, compression = entry["patch_size"] ** 2, entry["AE_SPATIAL_COMPRESSION"]
    rows, columns = (-(-entry[side] // compression) for side in ("height", "width"))
    latent = _empty_latent(entry["latent_frames"], rows * entry["patch_size"], columns * entry["patch_size"])
    objective = FlowObjective(shift="open_sora2", sampling_shift_patch=area)
    name = f"{entry['resolution']} {entry['aspect_ratio']} {entry['num_frames']} frames patch {entry['patch_size']}"
    times_key = next(key for key in entry if key.startswith("timesteps_"))
    ours = _list_times(objective, latent, len(entry[times_key]) - 1)
    yield compare_numbers(f"{name} times", ours, entry[times_key], _FLOW_TOLERANCE)
    alpha = objective.shift_factor(latent, shift_patch=area)
    yield compare_numbers(
        f"{name} alpha, tokens",
        [alpha, rows * columns],
        [entry["shift_alpha"], entry["image_seq_len"]],
        _FLOW_TOLERANCE,
    )


def _empty_latent(frames: int, height: int, width: int) -> torch.Tensor:
    return torch.empty(1, 1, frames, height, width, device="meta")


def _list_times(objective: FlowObjective, latent: Tensor, num_steps: int) -> list[float]:
    steps = objective.steps(num_steps, latent)
    return [steps[0][0], *(float(then) for _, then in steps if then is not None)]


def _extra_schedule(name: str) -> list[float]:
    latent = _empty_latent(1, 1, 1)
    if found := _EXTRAS["no_shift"].fullmatch(name):
        return _list_times(FlowObjective(), latent, int(found[1]))
    if found := _EXTRAS["constant"].fullmatch(name):
        return _list_times(FlowObjective(shift=float(found[1])), latent, int(found[2]))
    if found := _EXTRAS["tokens"].fullmatch(name):
        steps, tokens, frames = map(int, found.groups())
        objective = FlowObjective(shift="open_sora2", sampling_shift_patch=1)
        return _list_times(objective, _empty_latent(frames, 1, tokens), steps)
    raise ValueError(f"a schedule called {name!r} is of no known kind")
