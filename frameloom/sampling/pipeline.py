"""A loaded model, and the way from requests to frames: five functions with tensors between them.

Shape letters: B batch, C channels, F frames, H height, W width.

    encode_prompts -> draw_noise -> solve -> decode -> Sample.save

Differences between families are in their specs (`models/spec.py`); pictures and videos of a request are read and
encoded in `conditions.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.builders.text import TextPipeline
from frameloom.builders.vae import check_frames
from frameloom.config.schema.models import CaptionNoteSection
from frameloom.config.schema.sampling import MEDIA, SampleRequest, SampleSection
from frameloom.core.errors import ConfigError
from frameloom.core.progress import ProgressBar
from frameloom.core.random import stream
from frameloom.data.manifest.captions import format_motion, format_rate, join_suffix
from frameloom.data.media.transforms import to_uint8
from frameloom.diffusion.objectives import Objective
from frameloom.diffusion.samplers import Start, check_sampler, run_sampler
from frameloom.distributed.sequence_parallel import ALONE, SequenceGroup, find_sequence_group
from frameloom.models.text.base import TextStates
from frameloom.models.text.scaling import TextScaling
from frameloom.models.vaes.base import VideoVAE
from frameloom.sampling.block_cache import CacheCount, skipping_blocks
from frameloom.sampling.conditions import Given, Prepared, name_mode, no_input, prepare, read_given
from frameloom.sampling.guidance import GuidedDenoiser
from frameloom.sampling.outputs import Sample
from frameloom.sampling.request import check_media, complete_request, make_request

HOST = torch.device("cpu")
_RATIO = re.compile(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)")
_HAS_RATE = re.compile(r"\bFPS\b", re.IGNORECASE)
_HAS_MOTION = re.compile(r"\bmotion score\b", re.IGNORECASE)


@dataclass(frozen=True)
class CaptionNote:
    """What a model is trained to read behind a caption; rates are written up to `fps_max`."""

    section: CaptionNoteSection
    fps_max: float


@dataclass
class Offload:
    """Idle parts in host memory: each of `parts` is on `device` only inside `using` it.

    `moves` are all moves so far as (part, "device" or "host"), also where device and host are the same.
    """

    parts: dict[str, Any]
    device: torch.device
    resident: set[str] = field(default_factory=set)
    moves: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for part in self.parts.values():
            part.to(HOST)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """The part on the device; parts that others left there make room first."""
        if name in self.resident:
            yield
            return
        for other in sorted(self.resident):
            self._move(other, HOST)
        self._move(name, self.device)
        try:
            yield
        finally:
            self._move(name, HOST)

    def _move(self, name: str, device: torch.device) -> None:
        self.parts[name].to(device)
        is_away = device is HOST
        (self.resident.discard if is_away else self.resident.add)(name)
        self.moves.append((name, "host" if is_away else "device"))


@dataclass(frozen=True)
class Pipeline:
    """A loaded model. `settings` are the defaults of a request, `origin` is written into every file.

    The processes of `sequence` make each clip together: all get the same requests, and the first of them has the
    samples. `splits_text` says that such a group also splits the layers of its text encoders.
    """

    denoiser: LoadedDenoiser
    vae: VideoVAE
    text: TextPipeline
    scaling: TextScaling | None
    objective: Objective
    settings: SampleSection
    origin: Mapping[str, str]
    device: torch.device
    note: CaptionNote | None = None
    offload: Offload | None = None
    sequence: SequenceGroup = ALONE
    splits_text: bool = False

    @overload
    def sample(self, prompt: str, *, seed: int = ..., batch_size: int = ..., **fields: Any) -> Sample: ...

    @overload
    def sample(
        self, prompt: Sequence[str], *, seed: int = ..., batch_size: int = ..., **fields: Any
    ) -> list[Sample]: ...

    def sample(
        self, prompt: str | Sequence[str], *, seed: int = 0, batch_size: int = 1, **fields: Any
    ) -> Sample | list[Sample]:
        """A sample of a prompt, or of each of a list of prompts, whose seeds count up from `seed`.

        `fields` are those of `SampleRequest`: steps, guidance, frames, height, width, image, …; the defaults are
        those of the model's recipe.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        requests = [self.request(text, seed=seed + number, **fields) for number, text in enumerate(prompts)]
        check_requests(self, requests)
        with ProgressBar("sampling", sum(request.steps for request in requests)) as bar:
            samples = generate(self, requests, batch_size=batch_size, on_step=bar.advance)
        return samples[0] if isinstance(prompt, str) else samples

    def request(self, prompt: str, seed: int = 0, **fields: Any) -> SampleRequest:
        """A complete request of this model; ConfigError for a field that does not exist or a value it cannot have."""
        request = make_request({"prompt": prompt, "seed": seed, **fields}, where="sample()")
        check_media({f"sample(): {name}": getattr(request, name) for name in MEDIA})
        return self.complete(request)

    def complete(self, request: SampleRequest) -> SampleRequest:
        """The request with this model's settings where it has none itself, and a ratio turned into a size."""
        request = complete_request(request, self.settings)
        if request.ratio is None:
            return request
        match = _RATIO.fullmatch(request.ratio)
        if match is None or not float(match[1]) or not float(match[2]):
            raise ConfigError(f"--ratio {request.ratio}: not a ratio; write width:height, as in 16:9")
        area, wide = request.height * request.width, float(match[1]) / float(match[2])
        sides = ((area / wide) ** 0.5, (area * wide) ** 0.5)
        height, width = (max(cell, round(side / cell) * cell) for side, cell in zip(sides, self.cells_px, strict=True))
        return request.model_copy(update={"height": height, "width": width, "ratio": None})

    @property
    def cells_px(self) -> tuple[int, int]:
        """Height and width of a token in pixels; sides are multiples of them."""
        patch = self.denoiser.config.patch
        return self.vae.strides[1] * patch[1], self.vae.strides[2] * patch[2]

    @contextmanager
    def using(self, part: str) -> Iterator[None]:
        if self.offload is None:
            yield
        else:
            with self.offload.using(part):
                yield


def check_requests(pipeline: Pipeline, requests: Sequence[SampleRequest]) -> None:
    """ConfigError for the first request that this model cannot make, before anything is made."""
    family = pipeline.denoiser.family
    for request in requests:
        check_sampler(request.sampler, pipeline.objective)
        check_frames(pipeline.vae, request.frames)
        for name, side, cell in zip(
            ("height", "width"), (request.height, request.width), pipeline.cells_px, strict=True
        ):
            if side % cell:
                raise ConfigError(f"--{name} {side}: this model makes multiples of {cell} pixels")
        takes_frames = pipeline.denoiser.config.condition != "none"
        if name_mode(request) in ("image", "continue", "inpaint") and not takes_frames:
            raise no_input(family.name)


def generate(
    pipeline: Pipeline,
    requests: Sequence[SampleRequest],
    *,
    batch_size: int = 16,
    on_step: Callable[[int], object] = lambda count: None,
) -> list[Sample]:
    """All samples; `on_step` gets the number of videos that moved one solver step.

    Of several processes that make a clip together, only the first decodes it and has a sample.
    """
    samples = []
    for batch in split_batches(requests, batch_size):
        given = [read_given(one, pipeline.vae) for one in batch]
        text = encode_prompts(pipeline, batch)
        noise = draw_noise(pipeline, batch)
        prepared = encode_given(pipeline, batch, given)
        latent = solve(pipeline, batch, text, noise, prepared, on_step)
        if pipeline.sequence.rank:
            continue
        clips = decode(pipeline, latent)
        if batch[0].keep == "pixels":
            for number, one in enumerate(given):
                known_FHW1 = one.known_FHW.numpy()[..., None] > 0
                given_FHWC = to_uint8(one.clip_CFHW).permute(1, 2, 3, 0).numpy()
                clips[number] = np.where(known_FHW1, given_FHWC, clips[number])
        samples += [Sample(frames, request, pipeline.origin) for frames, request in zip(clips, batch, strict=True)]
    return samples


def split_batches(requests: Sequence[SampleRequest], batch_size: int) -> Iterator[list[SampleRequest]]:
    """Neighbours with equal settings and the same kind of inputs, at most `batch_size`."""
    settings = attrgetter(*SampleSection.model_fields)
    for _, group in groupby(requests, key=lambda request: (name_mode(request), settings(request))):
        alike = list(group)
        for start in range(0, len(alike), batch_size):
            yield alike[start : start + batch_size]


@torch.no_grad()
def encode_prompts(pipeline: Pipeline, requests: Sequence[SampleRequest]) -> tuple[TextStates, TextStates]:
    """States of the prompts, and of the negative prompts."""
    prompts = [add_note(pipeline.note, request) for request in requests]
    with pipeline.using("text"):
        pairs = (prompts, [request.negative_prompt for request in requests])
        states = [pipeline.text.encode(texts).to(pipeline.device) for texts in pairs]
    if pipeline.scaling is not None:
        states = [pipeline.scaling.apply(part) for part in states]
    return states[0], states[1]


def add_note(note: CaptionNote | None, request: SampleRequest) -> str:
    """The prompt with the frame rate and motion that the model expects behind it, unless it has them itself.

    The empty prompt stays empty, and a picture has no frame rate. Of a model that is trained without notes, a motion
    score asks for the published way of writing one.
    """
    if (note is None and request.motion_score is None) or not request.prompt:
        return request.prompt
    section = CaptionNoteSection(in_sampling="sentences") if note is None else note.section
    has_rate = section.fps and request.frames > 1 and not _HAS_RATE.search(request.prompt)
    score = section.motion_in_sampling if request.motion_score is None else request.motion_score
    has_motion = section.motion is not None and score is not None and not _HAS_MOTION.search(request.prompt)
    motion = [format_motion(score)] if has_motion and score is not None else []
    if note is not None and section.in_sampling == "as_trained":
        return join_suffix(request.prompt, ([format_rate(request.fps, note.fps_max)] if has_rate else []) + motion)
    text = request.prompt.strip()
    text = text if text.endswith(".") else f"{text}."
    return " ".join([text, *(f"{part}." for part in ([f"{request.fps:g} FPS"] if has_rate else []) + motion)])


def draw_noise(pipeline: Pipeline, requests: Sequence[SampleRequest]) -> Tensor:
    """Noise from each request's own seed, drawn on the host, so that a seed means the same on every device."""
    request, vae = requests[0], pipeline.vae
    _, height_stride, width_stride = vae.strides
    # A picture is one latent frame, also of an autoencoder that packs several frames into one.
    frames = 1 if request.frames == 1 else vae.latent_frames(request.frames)
    shape = (vae.latent_channels, frames, request.height // height_stride, request.width // width_stride)
    drawn = [torch.randn(shape, generator=stream(one.seed, "sample")) for one in requests]
    return torch.stack(drawn).to(pipeline.device)


def encode_given(pipeline: Pipeline, requests: Sequence[SampleRequest], given: Sequence[Given]) -> Prepared:
    """Conditions of a batch besides text; none of a model that takes text alone and gets nothing else."""
    takes = pipeline.denoiser.config.condition != "none"
    if not takes and not any(one.is_known or one.starts or one.control_CFHW is not None for one in given):
        return Prepared()
    seeds, keeps = [request.seed for request in requests], requests[0].keep == "latent"
    with pipeline.using("vae"):
        return prepare(pipeline.denoiser, pipeline.vae, seeds, given, pipeline.device, keeps=keeps)


@torch.no_grad()
def solve(
    pipeline: Pipeline,
    requests: Sequence[SampleRequest],
    text: tuple[TextStates, TextStates],
    noise_BCFHW: Tensor,
    prepared: Prepared,
    on_step: Callable[[int], object] = lambda count: None,
    count: CacheCount | None = None,
) -> Tensor:
    """From noise to a clean latent, with guidance; what is given is put back last. `count` is of skipped blocks."""
    settings = requests[0]
    predict = GuidedDenoiser(pipeline.denoiser, *text, prepared, settings)
    start = None
    if prepared.origin_BCFHW is not None and settings.strength is not None:
        start = Start(prepared.origin_BCFHW, settings.strength)
        predict.step = start.skip(settings.steps)

    def report(step: int, latent: Tensor) -> None:
        predict.step = step
        on_step(len(latent))

    blocks = pipeline.denoiser.model.blocks()
    group = find_sequence_group(pipeline.denoiser.model)
    with pipeline.using("denoiser"), skipping_blocks(blocks, settings.cache_threshold, count, group=group):
        latent = run_sampler(
            settings.sampler,
            pipeline.objective,
            predict,
            noise_BCFHW,
            num_steps=settings.steps,
            generators=[stream(one.seed, "sampler noise", device=noise_BCFHW.device.type) for one in requests],
            start=start,
            on_step=report,
        )
    if prepared.known is None:
        return latent
    mask_B1FHW, given_BCFHW = prepared.known
    return torch.where(mask_B1FHW > 0, given_BCFHW.to(latent), latent)


@torch.no_grad()
def decode(pipeline: Pipeline, latent_BCFHW: Tensor) -> list[NDArray[np.uint8]]:
    """Latents to frames, one clip at a time: memory does not grow with the number of clips."""
    clips = []
    with pipeline.using("vae"):
        for latent_CFHW in latent_BCFHW:
            pixels = pipeline.vae.decode(pipeline.vae.denormalize(latent_CFHW[None]))
            clips.append(to_uint8(pixels[0]).permute(1, 2, 3, 0).cpu().numpy())
    return clips
