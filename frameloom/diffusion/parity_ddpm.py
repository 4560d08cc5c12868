"""Golden cases of DDPM: schedules and short trajectories, noising and losses, noise levels drawn in strata.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from frameloom.core.parity import ParityCase, ParityOutput, compare_numbers, pair_outputs
from frameloom.diffusion.ddpm import DDPMObjective, snr
from frameloom.diffusion.flow import FlowObjective, grid_time, logit_normal_time
from frameloom.diffusion.objective import Noised, Objective, offset_noise
from frameloom.diffusion.published import read_scheduler
from frameloom.diffusion.timesteps import level_range

_SCALED = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
_SCHEDULERS: dict[str | None, dict[str, Any]] = {
    None: {},
    "v1_5": _SCALED,
    "cogvideox": {**_SCALED, "snr_shift": 3.0},
}
_NUM_LEVELS = 1000


def is_scheduler(case: ParityCase) -> bool:
    return {"configs", "trajectory_steps"} <= case.config.keys()


def run_scheduler(case: ParityCase) -> list[ParityOutput]:
    ours: dict[str, Tensor] = {}
    for name, config in case.config["configs"].items():
        model = name.partition(".")[0]
        for scheduler in ("train_ddpm", "ddim_origin", "ddim_cog"):
            objective = read_scheduler(config, shifts_snr=scheduler == "ddim_cog")
            ours[f"{model}.{scheduler}.alphas_cumprod"] = objective.alpha_bar_T
            ours[f"{model}.{scheduler}.final_alpha_cumprod"] = torch.tensor([objective.levels([0])[-1][1]])
            ours |= _follow(case, objective, f"{name}.{scheduler}")
    return pair_outputs(case, ours, _tolerance_of_schedule)


def _tolerance_of_schedule(name: str, expected: Tensor) -> float:
    return 1e-6 if expected.dtype == torch.float32 else 1e-12 if expected.is_floating_point() else 0.0


def _follow(case: ParityCase, objective: DDPMObjective, prefix: str) -> dict[str, Tensor]:
    """Visited indices, and the latents of a walk through given predictions."""
    ours = {}
    for name in case.outputs:
        if name.startswith(f"{prefix}.timesteps"):
            ours[name] = torch.tensor(objective.schedule(int(name.removeprefix(f"{prefix}.timesteps"))))
    x = case.inputs["trajectory.start"]
    indices = objective.schedule(case.config["trajectory_steps"])
    for step, levels in enumerate(objective.levels(indices)):
        x = objective.ddim_step(x, case.inputs[f"trajectory.model_output.{step}"], *levels)
        ours[f"{prefix}.trajectory.{step}"] = x
    return ours


def is_loss(case: ParityCase) -> bool:
    return {"cases", "scheduler"} <= case.config.keys() and any(name.endswith("noise_pred") for name in case.inputs)


def run_loss(case: ParityCase) -> list[ParityOutput]:
    """CogVideoX-Fun's training loss; its latents are [B, F, C, H, W]."""
    ours: dict[str, Tensor] = {}
    for entry in case.config["cases"]:
        given = {name: case.inputs[f"{entry['k']}.{name}"] for name in ("latents", "noise", "noise_pred", "timesteps")}
        config = {**case.config["scheduler"], "prediction_type": entry["prediction_type"]}
        # An error in epsilon needs no terminal noise level, which that prediction cannot have.
        objective = _allow_epsilon(config, entry["motion_sub_loss_ratio"] if entry["motion_sub_loss"] else 0.0)
        latent, noise, prediction = (given[name].transpose(1, 2) for name in ("latents", "noise", "noise_pred"))
        noised = objective.add_noise_at(latent, noise, given["timesteps"])
        target = noised.target_BCFHW if entry["prediction_type"] == "v_prediction" else noise
        loss = objective.loss_B(prediction, noised._replace(target_BCFHW=target)).mean()
        ours |= {
            f"{entry['k']}.noisy_latents": noised.noisy_BCFHW.transpose(1, 2),
            f"{entry['k']}.target": target.transpose(1, 2),
            f"{entry['k']}.loss": loss[None],
        }
    return pair_outputs(case, ours, 1e-6)


def _allow_epsilon(config: Mapping[str, Any], motion_share: float) -> DDPMObjective:
    """The schedule of the file with v-prediction, which noises alike; the caller puts the target in."""
    return read_scheduler({**config, "prediction_type": "v_prediction"}, motion_share=motion_share)


def is_train_loss(case: ParityCase) -> bool:
    return isinstance(case.config.get("run"), dict) and {"model_input", "base_noise", "u"} <= case.inputs.keys()


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
    of_samples = [name for name, settings in case.config["run"].items() if settings["prediction_type"] == "sample"]
    left_out = {f"{name}.{key}": "sample-prediction" for name in of_samples for key in ("loss", "grad_model_output")}
    return pair_outputs(case, ours, _tolerance_of_loss, left_out)


def _tolerance_of_loss(name: str, expected: Tensor) -> float:
    # An error of 1e-6 would be large for a gradient: small tensors are held to their own size.
    largest = float(expected.double().abs().max())
    return 1e-5 * largest if name.endswith("snr") or ".snr_" in name else min(1e-6, 1e-5 * largest)


def _run_flow(case: ParityCase, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    flow = FlowObjective(sigma_min=0.0, weighting=settings.get("weighting_scheme", "none"))
    time_B = grid_time(case.inputs["u"])
    # Its flow branch adds no noise offset.
    noised = flow.add_noise_at(case.inputs["model_input"], case.inputs["base_noise"], time_B)
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
    noised = ddpm.add_noise_at(case.inputs["model_input"], noise, index_B)
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
    mask = case.inputs["attention_mask"] if settings["masked"] else None
    prediction = case.inputs["model_output"].clone().requires_grad_()
    loss = objective.loss_B(prediction, noised, mask).mean()
    (grad,) = torch.autograd.grad(loss, prediction)
    return {
        "noisy_model_input": noised.noisy_BCFHW,
        "target": noised.target_BCFHW,
        "loss": loss.detach(),
        "grad_model_output": grad,
    }


def is_timestep_sampling(case: ParityCase) -> bool:
    return {"single_process", "distributed_uniform"} <= case.config.keys()


def run_timestep_sampling(case: ParityCase) -> list[ParityOutput]:
    return list(_compare_draws(case.config))


def _compare_draws(config: Mapping[str, Any]) -> Iterator[ParityOutput]:
    for number, entry in enumerate(config["single_process"]):
        calls = _draw(
            range(entry["num_idx"]), entry["generator_seed"], len(entry["first_16_calls"]), entry["n_samples"]
        )
        yield compare_numbers(f"one process {number}", calls, entry["first_16_calls"])
    for entry in config["distributed_uniform"]:
        size, levels = entry["world_size"], entry["num_idx"]
        ranges = [level_range(rank["rank"], size, levels) for rank in entry["ranks"]]
        for found, rank in zip(ranges, entry["ranks"], strict=True):
            name = f"rank {rank['rank']} of {size} processes, {levels} levels"
            wanted = rank["first_6_calls_of_2"]
            yield compare_numbers(name, _draw(found, rank["generator_seed"], len(wanted), 2), wanted)
            drawn = torch.tensor(_draw(found, rank["generator_seed"], 1, 20_000))
            stats = [rank[f"{kind}_of_20000"] for kind in ("min", "max", "mean")]
            ours = [float(drawn.min()), float(drawn.max()), float(drawn.double().mean())]
            yield compare_numbers(f"{name}, range and mean", ours, stats, 1e-9 * levels)
        width = len(ranges[0])
        groups = [levels // width, size // (levels // width), width]
        yield compare_numbers(
            f"parts of {size} processes", groups, [entry[key] for key in ("group_num", "group_width", "sigma_interval")]
        )
    if helper := config.get("lognorm_helper_defined_but_unused"):
        generator = torch.Generator().manual_seed(helper["generator_seed"])
        drawn = (logit_normal_time(torch.randn(helper["n"], generator=generator)) * _NUM_LEVELS).int()
        yield compare_numbers("logit-normal, first", drawn[: len(helper["first_10"])], helper["first_10"])
        ours = [float(value) for value in (drawn.double().mean(), drawn.double().std(), drawn.min(), drawn.max())]
        yield compare_numbers("logit-normal", ours, [helper[key] for key in ("mean", "std", "min", "max")], 1e-6)


def _draw(levels: range, seed: int, num_calls: int, num_samples: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(levels.start, levels.stop, (num_samples,), generator=generator).tolist() for _ in range(num_calls)
    ]
