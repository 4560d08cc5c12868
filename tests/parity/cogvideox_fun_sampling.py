"""Golden cases of CogVideoX-Fun that need the autoencoder too: the channels of inpainting, and whole sampling runs.

Such a case names the case with the autoencoder's weights, which lies beside it. Golden latents are [B, F, C, H, W].

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.config.schema.sampling import SampleSection
from frameloom.models.denoisers.base import Draws, find_index
from frameloom.models.denoisers.cogvideox_fun.conditioning import (
    TRAINING_LOG_SIGMA,
    add_noise_to_known,
    blank_unknown,
    draw_known,
    pack_known,
    resize_known,
)
from frameloom.models.denoisers.cogvideox_fun.config import SIZES
from frameloom.models.denoisers.cogvideox_fun.weights import read_config
from frameloom.models.registry import get_denoiser
from frameloom.models.vaes.cogvideox.model import CogVideoXVAE
from frameloom.sampling.conditions import Given, Prepared, prepare
from tests.parity.cases import ParityCase, ParityOutput, golden, pair_outputs
from tests.parity.cogvideox_fun_transformer import name_rotary
from tests.parity.noise_schedules import read_sampler
from tests.parity.sampling import compare_frames, load_vae, make_sampler, make_text, sample_latents

CHANNEL_TOLERANCE = 1e-5
PIPELINE_TOLERANCE = 1e-4
# The published samplers: diffusers' DDIM, and CogVideoX's own, which shifts the schedule.
_SAMPLERS = ("ddim_origin", "ddim_cog")


@golden(lambda case: "vae_case" in case.config and "resized_mask" in case.outputs)
@torch.no_grad()
def run_channels(case: ParityCase) -> list[ParityOutput]:
    return pair_outputs(case, _make_channels(case, load_vae(case, "cogvideox")), CHANNEL_TOLERANCE)


@golden(lambda case: {"vae_case", "num_inference_steps"} <= case.config.keys())
@torch.no_grad()
def run_pipeline(case: ParityCase) -> list[ParityOutput]:
    """Both samplers, with the given clip and, where the file has it, with nothing given."""
    vae = load_vae(case, "cogvideox")
    family = get_denoiser("cogvideox_fun")
    config = read_config(case.config["transformer"], mask_scale=vae.config.scale[0])
    model = family.build(config).eval()
    family.load_original(model, case.weights)
    denoiser = LoadedDenoiser(family, model, config)
    prepared = {"": Prepared()}
    if config.condition == "inpaint":
        prepared = {"": _prepare(case, denoiser, vae), "t2v_all_masked.": _prepare(case, denoiser, vae, is_empty=True)}
    ours: dict[str, Tensor] = {}
    frames: list[ParityOutput] = []
    for name in _SAMPLERS:
        for prefix, one in prepared.items():
            label = f"{name}.{prefix}"
            if f"{label}latents" in case.outputs:
                states, compared = _sample(case, denoiser, vae, one, name, label)
                ours |= {label + key: state for key, state in states.items()}
                frames += compared
    return [*pair_outputs(case, ours, PIPELINE_TOLERANCE), *frames]


def _record_draws(noise_BCFHW: Tensor, log_sigma_B: Tensor, *, keeps_empty: bool) -> Draws:
    """The random numbers of the published training, where ours come from streams."""
    mean, deviation = TRAINING_LOG_SIGMA

    def normal(purpose: str, shape: tuple[int, ...]) -> Tensor:
        return noise_BCFHW if shape != (1,) else ((log_sigma_B - mean) / deviation)[:, None]

    empty_B = torch.full((len(noise_BCFHW),), 0.0 if keeps_empty else 1.0)
    return Draws(lambda purpose: empty_B, normal, is_training=True)


def _make_channels(case: ParityCase, vae: CogVideoXVAE) -> dict[str, Tensor]:
    """The training rule: masks and masked clips, and how they are encoded and packed."""
    given = case.inputs
    clip_BCFHW, known_B1FHW = given["pixel_values"].transpose(1, 2), 1 - given["mask"].transpose(1, 2).float()
    noise_BCFHW, log_sigma_B = given["reference_noise"].transpose(1, 2), given["reference_sigma_normal"]
    masked_BCFHW = blank_unknown(clip_BCFHW, known_B1FHW)
    latent_BCFHW = _encode_sample(vae, clip_BCFHW, given["posterior_noise.latents"])
    noisy_BCFHW = add_noise_to_known(masked_BCFHW, noise_BCFHW, log_sigma_B.exp())
    ours = {
        "latents_bfchw": latent_BCFHW.transpose(1, 2),
        "mask_pixel_values": masked_BCFHW.transpose(1, 2),
        "noisy_mask_pixel_values": noisy_BCFHW.transpose(1, 2),
        "resized_mask": resize_known(known_B1FHW, latent_BCFHW.shape[2:]),
    }
    for name, mask in given.items():
        if name.startswith("resize."):
            name = name.removesuffix("mask") + "resized"
            ours[name] = resize_known(mask, case.outputs[name].shape[2:])
    config = replace(SIZES["2b-inpaint"], in_channels=vae.latent_channels, mask_scale=vae.config.scale[0])
    for name in (name for name in case.outputs if name.endswith("inpaint_latents")):
        beside_BCFHW = draw_known(
            replace(config, add_noise_in_inpaint_model=name.startswith("noisy")),
            clip_BCFHW,
            known_B1FHW,
            lambda pixels: _encode_sample(vae, pixels, given["posterior_noise.mask_latents"]),
            _record_draws(noise_BCFHW, log_sigma_B, keeps_empty="t2v_kept" in name),
        )
        ours[name] = beside_BCFHW.transpose(1, 2)
        ours[name.replace("inpaint_latents", "t2v_flag")] = beside_BCFHW.flatten(1).any(dim=1).float()
    return ours


def _encode_sample(vae: CogVideoXVAE, pixels_BCFHW: Tensor, noise_BCFHW: Tensor) -> Tensor:
    return vae.normalize(vae.encode(pixels_BCFHW).sample(noise_BCFHW))


def _prepare(case: ParityCase, denoiser: LoadedDenoiser, vae: CogVideoXVAE, *, is_empty: bool = False) -> Prepared:
    """What is given, as `frameloom sample` makes it; the clip is cut to the frames of the start noise."""
    frames = 1 + vae.strides[0] * (case.inputs["start_latents"].shape[1] - 1)
    clip_BCFHW = 2 * case.inputs["video_0to1"][:, :, :frames] - 1
    known_B1FHW = (case.inputs["mask_video_0or255"][:, :, :frames] < 128).float()
    known_B1FHW = torch.zeros_like(known_B1FHW) if is_empty else known_B1FHW
    if not denoiser.config.add_noise_in_inpaint_model:
        given = [Given(clip, known[0]) for clip, known in zip(clip_BCFHW, known_B1FHW, strict=True)]
        return prepare(denoiser, vae, range(len(given)), given, torch.device("cpu"), keeps=False)
    beside_BCFHW = pack_known(
        denoiser.config,
        clip_BCFHW,
        known_B1FHW,
        lambda pixels: vae.normalize(vae.encode(pixels).mode()),
        noise_BCFHW=case.inputs["reference_noise"][:, :, :frames],
        sigma_B=torch.full((len(clip_BCFHW),), case.config["noise_aug_strength"]),
    )
    return Prepared({"cond_latents": beside_BCFHW})


def _sample(
    case: ParityCase, denoiser: LoadedDenoiser, vae: CogVideoXVAE, prepared: Prepared, sampler: str, label: str
) -> tuple[dict[str, Tensor], list[ParityOutput]]:
    """Latents and frames of a guided run, and what went into and came out of the first call of the transformer."""
    config, noise_BCFHW = case.config, case.inputs["start_latents"].transpose(1, 2)
    objective = read_sampler(config["scheduler"], sampler)
    settings = SampleSection(steps=config["num_inference_steps"], guidance=config["guidance_scale"], keep="none")
    loop = make_sampler(denoiser, vae, objective, settings)
    text, negative = (make_text(case.inputs[name]) for name in ("prompt_embeds", "negative_prompt_embeds"))
    states: dict[str, Tensor] = {}
    handle = denoiser.model.register_forward_hook(_keep_first_call(states))
    latent_BCFHW = sample_latents(loop, text, negative, noise_BCFHW, prepared)
    handle.remove()
    size = noise_BCFHW.shape[2], noise_BCFHW.shape[3], noise_BCFHW.shape[4]
    states |= {f"first_call.{name}": table for name, table in name_rotary(denoiser.model, size).items()}
    states["latents"] = latent_BCFHW.transpose(1, 2)
    pixels_BCFHW = vae.decode(vae.denormalize(latent_BCFHW))
    states["video_bcfhw"] = (pixels_BCFHW / 2 + 0.5).clamp(0, 1)
    expected = case.outputs.get(f"{label}video_bcfhw")
    return states, [] if expected is None else [compare_frames(f"{label}frames", loop, latent_BCFHW, expected)]


def _keep_first_call(states: dict[str, Tensor]) -> Any:
    """A hook; the published batch has the negative prompts first, ours the prompts."""

    def hook(module: nn.Module, args: Sequence[Tensor | None], output: Tensor) -> None:
        named = {
            "hidden_states": args[0],
            "inpaint_latents": args[2].get("cond_latents"),
            "prediction": output,
            "timestep": find_index(args[1]),
        }
        for name, state in named.items():
            if state is None or f"first_call.{name}" in states:
                continue
            prompts, negatives = state.chunk(2)
            state = torch.cat([negatives, prompts])
            states[f"first_call.{name}"] = state.transpose(1, 2) if state.ndim == 5 else state

    return hook
