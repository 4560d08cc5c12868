"""Golden cases of CogVideoX-Fun that need the autoencoder too: the channels of inpainting, and whole sampling runs.

Such a case names the case with the autoencoder's weights, which lies beside it. Golden latents are [B, F, C, H, W].

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from frameloom.checkpoint.goldens import read_case
from frameloom.core.errors import CheckpointError
from frameloom.core.parity import ParityCase, ParityOutput, pair_outputs
from frameloom.diffusion.ddpm import DDPMObjective
from frameloom.diffusion.guidance import guided
from frameloom.models.denoisers.cogvideox_fun.config import SIZES, SPEC
from frameloom.models.denoisers.cogvideox_fun.known import add_noise_to_known, blank_unknown, pack_known, resize_known
from frameloom.models.denoisers.cogvideox_fun.model import CogVideoXFunTransformer, build
from frameloom.models.denoisers.cogvideox_fun.parity import name_rotary
from frameloom.models.denoisers.cogvideox_fun.published import read_published
from frameloom.models.denoisers.conditions import Conditions, find_index
from frameloom.models.text.base import TextStates
from frameloom.models.vaes.cogvideox.config import CogVideoXConfig
from frameloom.models.vaes.cogvideox.model import CogVideoXVAE
from frameloom.models.vaes.cogvideox.weights import load_original as load_vae

CHANNEL_TOLERANCE = 1e-5
PIPELINE_TOLERANCE = 1e-4
# The published samplers: diffusers' DDIM, and CogVideoX's own, which shifts the schedule.
_SAMPLERS = ("ddim_origin", "ddim_cog")


def matches(case: ParityCase) -> bool:
    return "vae_case" in case.config and ("resized_mask" in case.outputs or "num_inference_steps" in case.config)


def run(case: ParityCase) -> list[ParityOutput]:
    vae = _load_vae(case)
    with torch.no_grad():
        if "resized_mask" in case.outputs:
            return pair_outputs(case, _make_channels(case, vae), CHANNEL_TOLERANCE)
        return pair_outputs(case, _sample_all(case, vae), PIPELINE_TOLERANCE)


def _load_vae(case: ParityCase) -> CogVideoXVAE:
    if case.path is None:
        raise CheckpointError(f"{case.name}: its autoencoder is in another file, so it must be read from a folder")
    name = case.config["vae_case"]
    beside = read_case(case.path.with_name(f"{name}.safetensors"), name=name)
    published = {key: value for key, value in beside.config.items() if not key.startswith("tiling")}
    vae = CogVideoXVAE(CogVideoXConfig.from_original(published)).eval()
    load_vae(vae, beside.weights)
    return vae


def _make_channels(case: ParityCase, vae: CogVideoXVAE) -> dict[str, Tensor]:
    """The training rule: masks and masked clips, and how they are encoded and packed."""
    given = case.inputs
    clip_BCFHW, known_B1FHW = given["pixel_values"].transpose(1, 2), 1 - given["mask"].transpose(1, 2).float()
    noise_BCFHW, sigma_B = given["reference_noise"].transpose(1, 2), given["reference_sigma_normal"].exp()
    masked_BCFHW = blank_unknown(clip_BCFHW, known_B1FHW)
    latent_BCFHW = _encode(vae, clip_BCFHW, given["posterior_noise.latents"])
    ours = {
        "latents_bfchw": latent_BCFHW.transpose(1, 2),
        "mask_pixel_values": masked_BCFHW.transpose(1, 2),
        "noisy_mask_pixel_values": add_noise_to_known(masked_BCFHW, noise_BCFHW, sigma_B).transpose(1, 2),
        "resized_mask": resize_known(known_B1FHW, latent_BCFHW.shape[2:]),
    }
    for name, mask in given.items():
        if name.startswith("resize."):
            name = name.removesuffix("mask") + "resized"
            ours[name] = resize_known(mask, case.outputs[name].shape[2:])
    config = replace(SIZES["2b-inpaint"], in_channels=vae.latent_channels, mask_scale=vae.config.scale[0])
    for name in (name for name in case.outputs if name.endswith("inpaint_latents")):
        is_noisy, is_kept = name.startswith("noisy"), "t2v_kept" in name
        beside_BCFHW = pack_known(
            config,
            clip_BCFHW,
            known_B1FHW,
            lambda pixels: _encode(vae, pixels, given["posterior_noise.mask_latents"]),
            noise_BCFHW=noise_BCFHW if is_noisy else None,
            sigma_B=sigma_B if is_noisy else None,
            keep_empty_B=torch.full((len(clip_BCFHW),), is_kept),
        )
        ours[name] = beside_BCFHW.transpose(1, 2)
        ours[name.replace("inpaint_latents", "t2v_flag")] = beside_BCFHW.flatten(1).any(dim=1).float()
    return ours


def _encode(vae: CogVideoXVAE, pixels_BCFHW: Tensor, noise_BCFHW: Tensor | None = None) -> Tensor:
    moments = vae.encode(pixels_BCFHW)
    return vae.normalize(moments.mode() if noise_BCFHW is None else moments.sample(noise_BCFHW))


def _sample_all(case: ParityCase, vae: CogVideoXVAE) -> dict[str, Tensor]:
    config = read_published(case.config["transformer"], mask_scale=vae.config.scale[0])
    model = build(config).eval()
    model.load_state_dict(case.weights)
    noise_BCFHW = case.inputs["start_latents"].transpose(1, 2)
    beside: dict[str, Tensor | None] = {"": None}
    if config.condition == "inpaint":
        beside = {"": _pack_clip(case, model, vae), "t2v_all_masked.": _pack_clip(case, model, vae, is_empty=True)}
    ours: dict[str, Tensor] = {}
    for sampler in (name for name in _SAMPLERS if f"{name}.latents" in case.outputs):
        for prefix, beside_BCFHW in beside.items():
            states = _sample(case, model, noise_BCFHW, beside_BCFHW, sampler)
            pixels_BCFHW = vae.decode(vae.denormalize(states["latents"].transpose(1, 2)))
            states["video_bcfhw"] = (pixels_BCFHW / 2 + 0.5).clamp(0, 1)
            ours |= {f"{sampler}.{prefix}{name}": state for name, state in states.items()}
    return ours


def _pack_clip(
    case: ParityCase, model: CogVideoXFunTransformer, vae: CogVideoXVAE, *, is_empty: bool = False
) -> Tensor:
    """What stands beside the latent; the clip is cut to the frames of the start noise."""
    frames = 1 + vae.strides[0] * (case.inputs["start_latents"].shape[1] - 1)
    clip_BCFHW = 2 * case.inputs["video_0to1"][:, :, :frames] - 1
    known_B1FHW = (case.inputs["mask_video_0or255"][:, :, :frames] < 128).float()
    noise = case.inputs.get("reference_noise") if model.config.add_noise_in_inpaint_model else None
    return pack_known(
        model.config,
        clip_BCFHW,
        torch.zeros_like(known_B1FHW) if is_empty else known_B1FHW,
        lambda pixels: _encode(vae, pixels),
        noise_BCFHW=None if noise is None else noise[:, :, :frames],
        sigma_B=torch.full((len(clip_BCFHW),), case.config["noise_aug_strength"]),
    )


def _sample(
    case: ParityCase, model: CogVideoXFunTransformer, noise_BCFHW: Tensor, beside_BCFHW: Tensor | None, sampler: str
) -> dict[str, Tensor]:
    """Latents of a guided run, and what went into and came out of the first call of the transformer."""
    states = {f"first_call.{name}": table for name, table in name_rotary(model, _latent_size(noise_BCFHW)).items()}
    tokens_BKD = torch.cat([case.inputs["negative_prompt_embeds"], case.inputs["prompt_embeds"]])
    text = TextStates(tokens_BKD, torch.ones(tokens_BKD.shape[:2], dtype=torch.bool), tokens_BKD.new_zeros(2, 0))
    given = Conditions(beside_BCFHW=None if beside_BCFHW is None else torch.cat([beside_BCFHW, beside_BCFHW]))

    def predict(x_BCFHW: Tensor, timestep_B: Tensor) -> Tensor:
        doubled, timesteps = torch.cat([x_BCFHW, x_BCFHW]), torch.cat([timestep_B, timestep_B])
        prediction = SPEC.denoise(model, doubled, timesteps, text, given)
        first = {"hidden_states": doubled, "prediction": prediction, "inpaint_latents": given.beside_BCFHW}
        for name, state in first.items():
            if state is not None:
                states.setdefault(f"first_call.{name}", state.transpose(1, 2))
        states.setdefault("first_call.timestep", find_index(timesteps))
        unconditional, conditional = prediction.chunk(2)
        return guided(conditional, unconditional, case.config["guidance_scale"])

    objective = _build_objective(case.config["scheduler"], sampler)
    latent_BCFHW = objective.sample(predict, noise_BCFHW, num_steps=case.config["num_inference_steps"])
    return states | {"latents": latent_BCFHW.transpose(1, 2)}


def _latent_size(latent_BCFHW: Tensor) -> tuple[int, int, int]:
    return latent_BCFHW.shape[2], latent_BCFHW.shape[3], latent_BCFHW.shape[4]


def _build_objective(scheduler: Mapping[str, Any], sampler: str) -> DDPMObjective:
    """As published, only CogVideoX's own sampler knows the shift of the schedule."""
    is_own = sampler == "ddim_cog"
    return DDPMObjective(
        num_train_timesteps=scheduler["num_train_timesteps"],
        beta_schedule=scheduler["beta_schedule"],
        beta_start=scheduler["beta_start"],
        beta_end=scheduler["beta_end"],
        zero_terminal_snr=scheduler["rescale_betas_zero_snr"],
        snr_shift=scheduler["snr_shift_scale"] if is_own else 1.0,
        spacing=scheduler["timestep_spacing"],
        double_precision=is_own,
        step_to="even",
    )
