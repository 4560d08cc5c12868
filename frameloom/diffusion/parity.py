"""Golden cases of objectives and guidance: training steps, time shift, losses, guided sampling.

Shape letters: B batch, C channels, F frames, H height, W width, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from frameloom.core.parity import ParityCase, ParityOutput
from frameloom.diffusion.ddpm import DDPMObjective
from frameloom.diffusion.flow import FlowObjective, logit_normal_time, open_sora2_alpha, shift_time
from frameloom.diffusion.guidance import ThreeBranchGuidance
from frameloom.diffusion.objective import Noised, Objective, offset_noise

_SCALED = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
_SCHEDULERS: dict[str | None, dict[str, Any]] = {
    None: {},
    "v1_5": _SCALED,
    "cogvideox": {**_SCALED, "snr_shift": 3.0},
}


def matches(case: ParityCase) -> bool:
    return _kind(case) in _RUNNERS


def _kind(case: ParityCase) -> str:
    """The file's name without its folder and without what a variant adds behind it."""
    name = case.name.rsplit("/", 1)[-1]
    return next((kind for kind in _RUNNERS if name.startswith(kind)), "")


def run(case: ParityCase) -> list[ParityOutput]:
    """Every output of the file: compared, or with a note that says why not."""
    kind = _kind(case)
    ours = _RUNNERS[kind](case)
    return [_compare(case, name, ours, note=_NOTES[kind]) for name in sorted(case.outputs)]


def _compare(case: ParityCase, name: str, ours: Mapping[str, Tensor], *, note: str) -> ParityOutput:
    expected = case.outputs[name]
    if name not in ours:
        return ParityOutput(name, None, expected, tolerance=0.0, note=note)
    # An error of 1e-6 would be large for a gradient: small tensors are held to their own size.
    tolerance = min(1e-6, 1e-5 * float(expected.abs().max()))
    return ParityOutput(name, ours[name].reshape(expected.shape), expected, tolerance)


def pack_patches(latent_BCFHW: Tensor) -> Tensor:
    """Tokens of 2x2 patches, channel outermost inside a token: the layout of Open-Sora 2.0's files."""
    batch, channels, frames, height, width = latent_BCFHW.shape
    split = latent_BCFHW.reshape(batch, channels, frames, height // 2, 2, width // 2, 2)
    return split.permute(0, 2, 3, 5, 1, 4, 6).reshape(batch, -1, channels * 4)


def unpack_patches(tokens_BND: Tensor, size_CFHW: list[int]) -> Tensor:
    channels, frames, height, width = size_CFHW
    split = tokens_BND.reshape(-1, frames, height // 2, width // 2, channels, 2, 2)
    return split.permute(0, 4, 1, 2, 5, 3, 6).reshape(-1, channels, frames, height, width)


def _flow_train_step(case: ParityCase) -> dict[str, Tensor]:
    ours: dict[str, Tensor] = {}
    for settings in case.config["cases"]:
        name, size = settings["name"], settings["latent_shape"][1:]
        given = {
            key.removeprefix(f"{name}."): value for key, value in case.inputs.items() if key.startswith(f"{name}.")
        }
        objective = FlowObjective(sigma_min=settings["sigma_min"], shift="open_sora2")
        latent = given["x_0_bcthw"]
        noise = unpack_patches(given[f"draw{settings['draw_order'].index('randn_like')}_randn_like"], size)
        time_B = shift_time(logit_normal_time(given["draw0_randn"]), objective.alpha(latent))
        noised = objective.add_noise_at(latent, noise, time_B)
        ours[f"{name}.model_input.timesteps"] = noised.timestep_B
        ours[f"{name}.model_input.img"] = pack_patches(noised.noisy_BCFHW)
        ours[f"{name}.target"] = pack_patches(noised.target_BCFHW)
        ours[f"{name}.loss"] = objective.loss_B(unpack_patches(given["model_pred"], size), noised).mean()
    return ours


def _time_shift(case: ParityCase) -> dict[str, Tensor]:
    return {
        f"{settings['i']}.t": shift_time(case.inputs["u"], open_sora2_alpha(*settings["latent_T_H_W"]))
        for settings in case.config["cases"]
    }


def _cfg_combination(case: ParityCase) -> dict[str, Tensor]:
    config, size = case.config, case.config["latent_B_C_T_H_W"][1:]
    times, num_steps = case.inputs["timesteps"].tolist(), config["num_steps"]
    ours: dict[str, Tensor] = {}
    for variant, flags in config["variants"].items():
        guidance = ThreeBranchGuidance(
            text_scale=config["guidance"],
            image_scale=config["guidance_img"],
            oscillate_text=flags.get("text_osci", False),
            oscillate_image=flags.get("image_osci", False),
            scale_image_by_frame=flags.get("scale_temporal_osci", False),
        )
        x = unpack_patches(case.inputs["img"][:1], size)
        for step in range(num_steps):
            ours[f"{variant}.img_entering_step{step}"] = pack_patches(x)
            full, image_only, neither = torch.split(unpack_patches(case.inputs[f"pred.{step}"], size), 1)
            velocity = guidance.combine(full, image_only, neither, step=step, num_steps=num_steps)
            x = x + (times[step + 1] - times[step]) * velocity
        ours[f"{variant}.final"] = pack_patches(x)
    return ours


def _train_loss_v13(case: ParityCase) -> dict[str, Tensor]:
    ours: dict[str, Tensor] = {
        "schedule.alphas_cumprod_plain": DDPMObjective(zero_terminal_snr=False).alpha_bar_T,
        "schedule.alphas_cumprod_zero_snr": DDPMObjective().alpha_bar_T,
    }
    for name, settings in case.config["run"].items():
        if settings["prediction_type"] == "sample" or settings.get("weighting_scheme"):
            continue
        noise, noised, objective = _noise_v13(case, name, settings)
        mask = case.inputs["attention_mask"] if settings["masked"] else None
        prediction = case.inputs["model_output"].clone().requires_grad_()
        loss = objective.loss_B(prediction, noised, mask).mean()
        (grad,) = torch.autograd.grad(loss, prediction)
        ours |= {
            f"{name}.noise": noise,
            f"{name}.noisy_model_input": noised.noisy_BCFHW,
            f"{name}.target": noised.target_BCFHW,
            f"{name}.loss": loss.detach(),
            f"{name}.grad_model_output": grad,
        }
    return ours


def _noise_v13(case: ParityCase, name: str, settings: Mapping[str, Any]) -> tuple[Tensor, Noised, Objective]:
    latent, noise = case.inputs["model_input"], case.inputs["base_noise"]
    if settings.get("rf"):
        # Its flow branch adds no noise offset and draws times on the grid of 1000 levels.
        flow = FlowObjective(sigma_min=0.0)
        return noise, flow.add_noise_at(latent, noise, case.outputs[f"{name}.timesteps_used"] / 1000), flow
    noise = offset_noise(noise, case.inputs["offset_noise"][:, :, 0, 0, 0], settings["noise_offset"])
    ddpm = DDPMObjective(
        zero_terminal_snr=settings["rescale_betas_zero_snr"],
        prediction="v" if settings["prediction_type"] == "v_prediction" else "epsilon",
        snr_gamma=settings["snr_gamma"],
        **_SCHEDULERS[settings.get("scheduler")],
    )
    return noise, ddpm.add_noise_at(latent, noise, case.inputs["timesteps"]), ddpm


_RUNNERS: dict[str, Callable[[ParityCase], dict[str, Tensor]]] = {
    "flow_train_step": _flow_train_step,
    "time_shift": _time_shift,
    "cfg_combination": _cfg_combination,
    "train_loss_v13": _train_loss_v13,
}
_NOTES = {
    "flow_train_step": "text, ids and guidance are inputs of the denoiser, not of the objective",
    "time_shift": "not part of the time shift",
    "cfg_combination": "inputs of the denoiser, or the distilled sampler without guidance",
    "train_loss_v13": "given, derived from a compared value, or of an option left out (sample, sigma_sqrt)",
}
