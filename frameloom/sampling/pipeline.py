"""From requests to video frames: five functions with tensors between them, and one that calls them in turn.

Shape letters: B batch, C channels, F frames, H height, W width.

    encode_prompts -> draw_noise -> solve -> decode -> write_results

What differs between families is in their specs (`models/spec.py`); given pictures and videos are read and encoded in
`conditions.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.builders.text import TextPipeline
from frameloom.config.schema.models import CaptionNoteSection
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.sampling import SampleSection
from frameloom.core.random import stream
from frameloom.data.manifest.captions import join_note, spell_motion, spell_rate
from frameloom.data.media.transforms import to_uint8
from frameloom.data.media.writing import CONTACT_SHEET, contact_sheet, write_image
from frameloom.diffusion.objectives import Objective
from frameloom.diffusion.samplers import Start, run_sampler
from frameloom.distributed.sequence_parallel import ALONE, SequenceGroup, find_sequence_group
from frameloom.models.text.base import TextStates
from frameloom.models.text.scaling import TextScaling
from frameloom.models.vaes.base import VideoVAE
from frameloom.sampling.block_cache import CacheCount, skipping_blocks
from frameloom.sampling.conditions import Given, Prepared, name_mode, prepare, read_given
from frameloom.sampling.guidance import GuidedDenoiser
from frameloom.sampling.outputs import describe_result, free_path, write_clip
from frameloom.sampling.request import Request

HOST = torch.device("cpu")
_SAID_RATE = re.compile(r"\bFPS\b", re.IGNORECASE)
_SAID_MOTION = re.compile(r"\bmotion score\b", re.IGNORECASE)


@dataclass(frozen=True)
class Sampler:
    """A trained model, ready to sample. `origin` is written into every file: the run and its step.

    `note` is what the model expects behind a prompt; `placement` moves parts that are idle away, without one they stay.
    The processes of `sequence` make each clip together: all are asked for the same requests, and the first of them gets
    the results. `splits_text` says that such a group also splits the layers of its text encoders.
    """

    denoiser: LoadedDenoiser
    vae: VideoVAE
    text: TextPipeline
    scaling: TextScaling | None
    objective: Objective
    settings: SampleSection
    origin: dict[str, str]
    device: torch.device
    note: PromptNote | None = None
    placement: Placement | None = None
    sequence: SequenceGroup = ALONE
    splits_text: bool = False

    def using(self, part: str) -> AbstractContextManager[None]:
        return nullcontext() if self.placement is None else self.placement.using(part)


@dataclass(frozen=True)
class Result:
    request: Request
    frames_FHWC: NDArray[np.uint8]


def generate(
    sampler: Sampler, requests: Sequence[Request], *, batch_size: int = 16, on_step: Callable[[int], None] | None = None
) -> list[Result]:
    """Make all requested videos; `on_step` is told the number of videos that moved one solver step.

    Of several processes that make a clip together, only the first decodes it and has a result.
    """
    results = []
    for part, settings in split_batches(sampler, requests, batch_size):
        given = [read_given(one, settings, stride=sampler.vae.strides[0], causal=sampler.vae.causal) for one in part]
        text = encode_prompts(sampler, [request.prompt for request in part], settings)
        noise = draw_noise(sampler, part, settings)
        prepared = prepare_batch(sampler, part, given, settings)
        latent = solve(sampler, text, noise, prepared, [request.seed for request in part], settings, on_step)
        if sampler.sequence.rank:
            continue
        clips = decode(sampler, latent)
        if settings.keep == "pixels":
            clips = [put_back(*pair) for pair in zip(clips, given, strict=True)]
        results += [Result(*pair) for pair in zip(part, clips, strict=True)]
    return results


def split_batches(
    sampler: Sampler, requests: Sequence[Request], batch_size: int
) -> Iterator[tuple[list[Request], SampleSection]]:
    """Neighbours with equal settings and the same kind of inputs, at most `batch_size`, with their settings."""

    def kind(request: Request) -> tuple[SampleSection, str]:
        settings = request.settings or sampler.settings
        return settings, name_mode(request, settings)

    for (settings, _), group in groupby(requests, key=kind):
        alike = list(group)
        for start in range(0, len(alike), batch_size):
            yield alike[start : start + batch_size], settings


@torch.no_grad()
def encode_prompts(
    sampler: Sampler, prompts: Sequence[str], settings: SampleSection | None = None
) -> tuple[TextStates, TextStates]:
    """States of the prompts, and of the negative prompt as often."""
    settings = settings or sampler.settings
    told = [prompt if sampler.note is None else sampler.note.add(prompt, settings) for prompt in prompts]
    with sampler.using("text"):
        pairs = (told, [settings.negative_prompt] * len(prompts))
        states = [sampler.text.encode(texts).to(sampler.device) for texts in pairs]
    if sampler.scaling is not None:
        states = [sampler.scaling.apply(part) for part in states]
    return states[0], states[1]


def draw_noise(sampler: Sampler, requests: Sequence[Request], settings: SampleSection | None = None) -> Tensor:
    """Noise from each request's own seed, drawn on the host, so that a seed means the same on every device."""
    settings, vae = settings or sampler.settings, sampler.vae
    _, height_stride, width_stride = vae.strides
    # A picture is one latent frame, also of an autoencoder that packs several frames into one.
    frames = 1 if settings.frames == 1 else vae.latent_frames(settings.frames)
    shape = (vae.latent_channels, frames, settings.height // height_stride, settings.width // width_stride)
    drawn = [torch.randn(shape, generator=stream(request.seed, "sample")) for request in requests]
    return torch.stack(drawn).to(sampler.device)


def prepare_batch(
    sampler: Sampler, requests: Sequence[Request], given: Sequence[Given], settings: SampleSection
) -> Prepared:
    """Encode what is given; a model that takes nothing but text, and gets nothing else, is told nothing."""
    takes = sampler.denoiser.family.beside(sampler.denoiser.config) != "none"
    if not takes and not any(one.is_known or one.starts or one.control_CFHW is not None for one in given):
        return Prepared()
    seeds = [request.seed for request in requests]
    with sampler.using("vae"):
        return prepare(sampler.denoiser, sampler.vae, seeds, given, sampler.device, keeps=settings.keep == "latent")


@torch.no_grad()
def solve(
    sampler: Sampler,
    text: tuple[TextStates, TextStates],
    noise_BCFHW: Tensor,
    prepared: Prepared,
    seeds: Sequence[int],
    settings: SampleSection | None = None,
    on_step: Callable[[int], None] | None = None,
    count: CacheCount | None = None,
) -> Tensor:
    """From noise to a clean latent, with guidance; what is given is put back last. `count` is of skipped blocks."""
    settings = settings or sampler.settings
    predict = GuidedDenoiser(sampler.denoiser, *text, prepared, settings)
    start = None
    if prepared.origin_BCFHW is not None and settings.strength is not None:
        start = Start(prepared.origin_BCFHW, settings.strength)
        predict.step = start.skip(settings.steps)

    def report(step: int, latent: Tensor) -> None:
        predict.step = step
        if on_step is not None:
            on_step(len(latent))

    blocks = sampler.denoiser.family.blocks(sampler.denoiser.model)
    group = find_sequence_group(sampler.denoiser.model)
    with sampler.using("denoiser"), skipping_blocks(blocks, settings.cache_threshold, count, group=group):
        latent = run_sampler(
            settings.sampler,
            sampler.objective,
            predict,
            noise_BCFHW,
            num_steps=settings.steps,
            generators=[stream(seed, "sampler noise", device=noise_BCFHW.device.type) for seed in seeds],
            start=start,
            on_step=report,
        )
    return prepared.put_back(latent)


@torch.no_grad()
def decode(sampler: Sampler, latent_BCFHW: Tensor) -> list[NDArray[np.uint8]]:
    """Latents to frames, one clip at a time: memory does not grow with the number of clips."""
    clips = []
    with sampler.using("vae"):
        for latent_CFHW in latent_BCFHW:
            pixels = sampler.vae.decode(sampler.vae.denormalize(latent_CFHW[None]))
            clips.append(to_uint8(pixels[0]).permute(1, 2, 3, 0).cpu().numpy())
    return clips


def put_back(frames_FHWC: NDArray[np.uint8], given: Given) -> NDArray[np.uint8]:
    """The frames with every known pixel as it was given."""
    clip_FHWC = to_uint8(given.clip_CFHW).permute(1, 2, 3, 0).numpy()
    known = given.known_FHW.numpy()[..., None] > 0
    return np.where(known, clip_FHWC, frames_FHWC)


def write_results(sampler: Sampler, results: Sequence[Result], out: Path) -> list[Path]:
    """One file per result, none overwritten, and `contact-sheet.png` of this call."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for result in results:
        settings = result.request.settings or sampler.settings
        suffix = "png" if len(result.frames_FHWC) == 1 else settings.format
        path = free_path(out, result.request, suffix)
        write_clip(path, result.frames_FHWC, settings, describe_result(sampler.origin, result.request, settings))
        paths.append(path)
    labels = [f"{result.request.prompt} (seed {result.request.seed})" for result in results]
    write_image(out / CONTACT_SHEET, contact_sheet([list(result.frames_FHWC) for result in results], labels))
    return paths


@dataclass(frozen=True)
class PromptNote:
    section: CaptionNoteSection
    fps_max: float

    def add(self, prompt: str, settings: SampleSection) -> str:
        """The prompt with what it does not say itself; the empty prompt stays empty, a picture has no frame rate."""
        if not prompt:
            return prompt
        has_rate = self.section.fps and settings.frames > 1 and not _SAID_RATE.search(prompt)
        score = self.section.motion_in_sampling if settings.motion_score is None else settings.motion_score
        is_silent = self.section.motion is None or score is None or _SAID_MOTION.search(prompt)
        motion = [] if is_silent or score is None else [spell_motion(score)]
        if self.section.in_sampling == "as_trained":
            return join_note(prompt, ([spell_rate(settings.fps, self.fps_max)] if has_rate else []) + motion)
        text = prompt.strip()
        text = text if text.endswith(".") else f"{text}."
        return " ".join([text, *(f"{part}." for part in ([f"{settings.fps:g} FPS"] if has_rate else []) + motion)])


def build_note(recipe: Recipe) -> PromptNote | None:
    """What the recipe trains with; without that, a motion score that is asked for is told in the published way."""
    if recipe.text.note is not None:
        return PromptNote(recipe.text.note, recipe.data.fps_max)
    if recipe.sample.motion_score is None:
        return None
    return PromptNote(CaptionNoteSection(in_sampling="sentences"), recipe.data.fps_max)


class Movable(Protocol):
    def to(self, device: torch.device, /) -> Any: ...


@dataclass
class Placement:
    """`parts` by name; with `offload`, a part is on `device` only inside `using` it, else all stay there.

    `resident` are the parts on the device now, `moves` all moves so far as (part, device or host): the account of what
    a device must hold at once, which is kept where device and host are the same, too.
    """

    parts: dict[str, Movable]
    device: torch.device
    offload: bool = False
    resident: set[str] = field(default_factory=set)
    moves: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, part in self.parts.items():
            if self.offload:
                part.to(HOST)
            else:
                part.to(self.device)
                self.resident.add(name)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """The part on the device; what is left there by others is parked first."""
        if not self.offload or name in self.resident:
            yield
            return
        for other in sorted(self.resident):
            self._park(other)
        self.parts[name].to(self.device)
        self.resident.add(name)
        self.moves.append((name, "device"))
        try:
            yield
        finally:
            self._park(name)

    def _park(self, name: str) -> None:
        self.parts[name].to(HOST)
        self.resident.discard(name)
        self.moves.append((name, "host"))
