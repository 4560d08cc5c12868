"""Objectives from a recipe section."""

from __future__ import annotations

from frameloom.config.schema.objective import ObjectiveSection, beta_range
from frameloom.diffusion.ddpm import DDPMObjective
from frameloom.diffusion.edm import EDMObjective
from frameloom.diffusion.flow import FlowObjective
from frameloom.diffusion.noise_levels import LevelBias
from frameloom.diffusion.objective import NoiseSettings, Objective


def build_objective(section: ObjectiveSection) -> Objective:
    """What a denoiser learns, at which noise levels, and how it is sampled."""
    noise = NoiseSettings(
        offset=section.noise_offset,
        offset_per=section.noise_offset_per,
        perturbation=section.input_perturbation,
        num_strata=section.strata,
    )
    if section.kind == "flow":
        return FlowObjective(
            sigma_min=section.sigma_min,
            law=section.law,
            logit_mean=section.logit_mean,
            logit_std=section.logit_std,
            mode_scale=section.mode_scale,
            num_levels=section.num_levels,
            shift=section.shift,
            patch_area=section.shift_patch,
            sampling_patch_area=section.sampling_shift_patch,
            base_tokens=section.shift_tokens,
            weighting=section.weighting,
            motion_share=section.motion_share,
            noise=noise,
        )
    if section.kind == "edm":
        return EDMObjective(
            **section.edm.model_dump(),
            max_weight=section.min_snr_gamma,
            motion_share=section.motion_share,
            noise=noise,
        )
    beta_start, beta_end = beta_range(section)
    return DDPMObjective(
        beta_schedule=section.betas,
        beta_start=beta_start,
        beta_end=beta_end,
        zero_terminal_snr=section.kind == "v" if section.zero_terminal_snr is None else section.zero_terminal_snr,
        prediction=section.kind,
        snr_gamma=section.min_snr_gamma,
        snr_shift=section.snr_shift,
        spacing=section.spacing,
        motion_share=section.motion_share,
        bias=LevelBias(**section.bias.model_dump()) if section.bias is not None else None,
        within=section.levels,
        noise=noise,
    )
