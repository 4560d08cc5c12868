"""Prompt in, video file out: five plain functions with tensors between them, and one that calls them in turn.

    encode_prompts -> draw_noise -> solve -> decode -> write_results

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.config.schema import SampleSection
from frameloom.core.paths import clean_name
from frameloom.core.random import stream
from frameloom.data.media import contact_sheet, write_image, write_video
from frameloom.diffusion.guidance import guided
from frameloom.diffusion.objective import Objective
from frameloom.generate.conditions import text_only, twice
from frameloom.generate.parts import LoadedDenoiser, TextPipeline, to_uint8
from frameloom.models.denoisers.base import NOTHING, Conditions
from frameloom.models.text import TextStates
from frameloom.models.text.scaling import TextScaling
from frameloom.models.vaes import VideoVAE


@dataclass(frozen=True)
class Sampler:
    """A trained model, ready to sample. `origin` is written into every file: the run and its step."""

    denoiser: LoadedDenoiser
    vae: VideoVAE
    text: TextPipeline
    scaling: TextScaling | None
    objective: Objective
    settings: SampleSection
    origin: dict[str, str]
    device: torch.device


@dataclass(frozen=True)
class Request:
    """One video to make; the same request gives the same video, alone or among others."""

    prompt: str
    seed: int


@dataclass(frozen=True)
class Result:
    request: Request
    frames_FHWC: NDArray[np.uint8]


def generate(
    sampler: Sampler, requests: Sequence[Request], *, batch_size: int = 16, on_step: Callable[[int], None] | None = None
) -> list[Result]:
    """Make all requested videos; `on_step` is told the number of videos that moved one solver step."""
    results = []
    for start in range(0, len(requests), batch_size):
        part = requests[start : start + batch_size]
        text = encode_prompts(sampler, [request.prompt for request in part])
        noise = draw_noise(sampler, part)
        seeds, settings = [request.seed for request in part], sampler.settings
        size = (settings.frames, settings.height, settings.width)
        given = text_only(sampler.denoiser, sampler.vae, seeds, size, sampler.device)
        latent = solve(sampler, text, noise, given, on_step)
        results += [Result(*pair) for pair in zip(part, decode(sampler, latent), strict=True)]
    return results


def encode_prompts(sampler: Sampler, prompts: Sequence[str]) -> tuple[TextStates, TextStates]:
    """States of the prompts, and of the empty prompt as often."""
    states = [sampler.text.encode(texts).to(sampler.device) for texts in (prompts, [""] * len(prompts))]
    if sampler.scaling is not None:
        states = [sampler.scaling.apply(part) for part in states]
    return states[0], states[1]


def draw_noise(sampler: Sampler, requests: Sequence[Request]) -> Tensor:
    """Noise from each request's own seed, drawn on the host, so that a seed means the same on every device."""
    settings, vae = sampler.settings, sampler.vae
    _, height_stride, width_stride = vae.strides
    shape = (
        vae.latent_channels,
        vae.latent_frames(settings.frames),
        settings.height // height_stride,
        settings.width // width_stride,
    )
    drawn = [torch.randn(shape, generator=stream(request.seed, "sample")) for request in requests]
    return torch.stack(drawn).to(sampler.device)


@torch.no_grad()
def solve(
    sampler: Sampler,
    text: tuple[TextStates, TextStates],
    noise_BCFHW: Tensor,
    given: Conditions = NOTHING,
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """From noise to a clean latent, with classifier-free guidance unless its scale is 1."""
    family, model, scale = sampler.denoiser.family, sampler.denoiser.model, sampler.settings.guidance
    conditional, unconditional = text
    both, given_twice = TextStates.concatenate([conditional, unconditional]), twice(given)

    def predict(x_BCFHW: Tensor, timestep_B: Tensor) -> Tensor:
        if scale == 1:
            return family.denoise(model, x_BCFHW, timestep_B, conditional, given)
        x_twice, timestep_twice = torch.cat([x_BCFHW, x_BCFHW]), torch.cat([timestep_B, timestep_B])
        doubled = family.denoise(model, x_twice, timestep_twice, both, given_twice)
        conditioned, unconditioned = doubled.chunk(2)
        return guided(conditioned, unconditioned, scale)

    def report(step: int, latent: Tensor) -> None:
        if on_step is not None:
            on_step(len(latent))

    return sampler.objective.sample(predict, noise_BCFHW, num_steps=sampler.settings.steps, on_step=report)


@torch.no_grad()
def decode(sampler: Sampler, latent_BCFHW: Tensor) -> list[NDArray[np.uint8]]:
    """Latents to frames, one clip at a time: memory does not grow with the number of clips."""
    clips = []
    for latent_CFHW in latent_BCFHW:
        pixels = sampler.vae.decode(sampler.vae.denormalize(latent_CFHW[None]))
        clips.append(to_uint8(pixels[0]).permute(1, 2, 3, 0).cpu().numpy())
    return clips


def write_results(sampler: Sampler, results: Sequence[Result], out: Path) -> list[Path]:
    """One mp4 per result (png for a single frame), none overwritten, and `contact-sheet.png` of this call."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for result in results:
        settings = {f"sample.{name}": str(value) for name, value in sampler.settings.model_dump().items()}
        about = {
            "prompt": result.request.prompt,
            "seed": str(result.request.seed),
            **settings,
            **sampler.origin,
        }
        is_image = len(result.frames_FHWC) == 1
        path = _free_path(out, clean_name(result.request.prompt), result.request.seed, ".png" if is_image else ".mp4")
        if is_image:
            write_image(path, result.frames_FHWC[0], metadata=about)
        else:
            write_video(path, result.frames_FHWC, sampler.settings.fps, metadata=about)
        paths.append(path)
    labels = [f"{result.request.prompt} (seed {result.request.seed})" for result in results]
    write_image(out / "contact-sheet.png", contact_sheet([list(result.frames_FHWC) for result in results], labels))
    return paths


def _free_path(out: Path, name: str, seed: int, suffix: str) -> Path:
    """The first name that is not taken; `clean_name` has left nothing that could leave `out`."""
    path, again = out / f"{name}-seed{seed}{suffix}", 2
    while path.exists():
        path, again = out / f"{name}-seed{seed}-{again}{suffix}", again + 1
    return path
