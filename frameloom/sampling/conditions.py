"""Conditions besides text: pictures, videos and masks, read from files and encoded for the denoiser.

Shape letters: B batch, C channels, F frames, H height, W width.

The mode follows from the files of a request:

    nothing                    text to image or text to video
    image, last_image or both  image to video: the first frame, the last one, both
    video                      continuation: its last frames are the first ones of the new clip
    video and mask             inpainting: white of the mask is made anew, black is kept
    video (and mask), strength video to video: the video with noise on it is what sampling starts from
    image, strength, one frame image to image
    control                    a clip that a control model follows, beside any of these
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from frameloom.builders.denoiser import LoadedDenoiser
from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import ConfigError, DataError
from frameloom.core.random import stream
from frameloom.data.media.decode import IMAGE_FORMATS, probe_clip, read_clip, read_image
from frameloom.data.media.frames import Window, resample_window
from frameloom.data.media.transforms import to_signed_range
from frameloom.diffusion.conditioning import find_known_cells, is_at_ends
from frameloom.models.denoisers.base import Conditions, Draws
from frameloom.models.vaes.base import VideoVAE

BLANK = -1.0
_MASK_MIDDLE = 128


@dataclass(frozen=True)
class Given:
    """Pixels in [-1, 1] and which of them are known (1); `starts` when sampling starts from the clip.

    `control_CFHW` is the clip that a control model follows.
    """

    clip_CFHW: Tensor
    known_FHW: Tensor
    starts: bool = False
    control_CFHW: Tensor | None = None

    @property
    def is_known(self) -> bool:
        return bool(self.known_FHW.any())


def name_mode(request: SampleRequest) -> str:
    """One of text, image, continue, inpaint and video; ConfigError for files that do not go together."""
    problems = []
    if request.mask is not None and request.video is None:
        problems.append("--mask: a mask says what of a video is made anew; name the video with --video")
    if request.video is not None and (request.image is not None or request.last_image is not None):
        problems.append("--video: a video brings its own first and last frames; leave --image and --last-image out")
    if request.last_image is not None and request.frames == 1:
        problems.append("--last-image: a clip of one frame has no last one; use --image, or more frames")
    can_start = request.video is not None or (request.image is not None and request.frames == 1)
    if request.strength is not None and not can_start:
        problems.append("--strength: says how much of a given video is changed; name it with --video")
    if request.image is not None and request.frames == 1 and request.strength is None:
        problems.append("--image: with one frame there is nothing left to make; add --strength, or more frames")
    if problems:
        raise ConfigError(problems)
    if request.mask is not None:
        return "inpaint"
    if request.video is not None:
        return "continue" if request.strength is None else "video"
    if request.image is not None or request.last_image is not None:
        return "video" if request.frames == 1 else "image"
    return "text"


def read_given(request: SampleRequest, vae: VideoVAE) -> Given:
    """Read the files at the size of the clip that is made."""
    size_FHW = (request.frames, request.height, request.width)
    clip_CFHW = torch.full((3, *size_FHW), BLANK)
    known_FHW = torch.zeros(size_FHW, dtype=torch.uint8)
    mode = name_mode(request)
    if mode == "image":
        for path, frame in ((request.image, 0), (request.last_image, -1)):
            if path is not None:
                # Of a video, its first frame.
                clip_CFHW[:, frame] = _read_frames(path, request, 1)[:, 0]
                known_FHW[frame] = 1
    elif mode == "continue":
        assert request.video is not None
        count = request.known_frames or choose_known_frames(request.frames, vae)
        if count >= request.frames:
            raise ConfigError(
                f"sample.known_frames is {count}; of a clip of {request.frames} frames at most {request.frames - 1} "
                "can be taken over"
            )
        clip_CFHW[:, :count] = _read_frames(request.video, request, count, from_end=True)
        known_FHW[:count] = 1
    elif mode in ("inpaint", "video"):
        source = request.video or request.image
        assert source is not None
        clip_CFHW = _read_frames(source, request, request.frames)
        if request.mask is not None:
            # Known (1) where the mask is dark; a picture stands for all frames.
            is_picture = request.mask.suffix.lower() in IMAGE_FORMATS
            grey_FHW = _read_frames(request.mask, request, 1 if is_picture else request.frames).mean(0)
            known_FHW = (grey_FHW < _MASK_MIDDLE / 127.5 - 1).to(torch.uint8).expand(size_FHW).clone()
    control = None if request.control is None else _read_frames(request.control, request, request.frames)
    return Given(clip_CFHW, known_FHW, starts=request.strength is not None, control_CFHW=control)


def choose_known_frames(frames: int, vae: VideoVAE) -> int:
    """The number of frames nearest to half of a clip that fills latent frames; at least one."""
    lead, stride = int(vae.causal), vae.strides[0]
    return max(1, lead + round((frames / 2 - lead) / stride) * stride)


def _read_frames(path: Path, settings: SampleRequest, count: int, *, from_end: bool = False) -> Tensor:
    """`count` frames at the frame rate of the clip that is made, the first or the last ones of the file."""
    height, width = settings.height, settings.width
    if path.suffix.lower() in IMAGE_FORMATS:
        if count > 1:
            raise DataError(f"{path}: is a picture, and {count} frames are needed; name a video")
        return to_signed_range(read_image(path, height=height, width=width))
    facts = probe_clip(path)
    assert facts.fps is not None
    indices = resample_window(Window(0, facts.frames), facts.fps, settings.fps)
    if len(indices) < count:
        raise DataError(
            f"{path}: has {len(indices)} frames at {settings.fps:g} frames per second, and {count} are needed; give a "
            f"longer video, fewer frames, or a higher --fps (the file has {facts.frames} frames at {facts.fps:g})"
        )
    chosen = indices[-count:] if from_end else indices[:count]
    return to_signed_range(read_clip(path, indices=chosen, height=height, width=width))


@dataclass(frozen=True)
class Prepared:
    """What sampling of a batch needs besides text and noise.

    cond       conditions besides the text
    uncond     the same with nothing given, for image guidance; None when nothing is given anyway
    origin     the latent that sampling starts from; None: noise
    known      (mask_B1FHW, latent_BCFHW) of cells that are given, to be put back when sampling is done; None: none
    """

    cond: Conditions = field(default_factory=dict)
    uncond: Conditions | None = None
    origin_BCFHW: Tensor | None = None
    known: tuple[Tensor, Tensor] | None = None


@torch.no_grad()
def prepare(
    denoiser: LoadedDenoiser,
    vae: VideoVAE,
    seeds: Sequence[int],
    given: Sequence[Given],
    device: torch.device,
    *,
    keeps: bool = True,
) -> Prepared:
    """Conditions, start and kept cells of a batch, encoded one clip at a time: memory does not grow with the batch."""
    check_given(denoiser, given)
    clip_BCFHW = torch.stack([one.clip_CFHW for one in given]).to(device)
    known_B1FHW = torch.stack([one.known_FHW for one in given])[:, None].to(device)

    def encode(pixels_BCFHW: Tensor) -> Tensor:
        parts = [vae.normalize(vae.encode(part_CFHW[None]).mode()) for part_CFHW in pixels_BCFHW]
        return torch.cat(parts).float()

    origin = encode(clip_BCFHW) if given[0].starts else None
    model, condition = denoiser.model, denoiser.config.condition
    if condition == "control":
        control_BCFHW = torch.stack([one.control_CFHW for one in given if one.control_CFHW is not None]).to(device)
        return Prepared({"cond_latents": encode(control_BCFHW)}, origin_BCFHW=origin)
    if condition == "none":
        return Prepared(origin_BCFHW=origin)

    def draw(make: Callable[..., Tensor], purpose: str, shape: tuple[int, ...] = ()) -> Tensor:
        return torch.stack([make(shape, generator=stream(seed, purpose)) for seed in seeds]).to(device)

    draws = Draws(partial(draw, torch.rand), partial(draw, torch.randn), is_training=False)
    cond = {"cond_latents": model.pack_known(clip_BCFHW, known_B1FHW, encode, draws)}
    if not bool(known_B1FHW.any()):
        return Prepared(cond, origin_BCFHW=origin)
    uncond = {"cond_latents": model.pack_known(clip_BCFHW, torch.zeros_like(known_B1FHW), encode, draws)}
    known = None
    if keeps:
        known = model.find_known(cond["cond_latents"]) or (
            find_known_cells(known_B1FHW, vae.strides, causal=vae.causal),
            encode(clip_BCFHW),
        )
    return Prepared(cond, uncond, origin, known)


def check_given(denoiser: LoadedDenoiser, given: Sequence[Given]) -> None:
    """ConfigError when the model has no input for what is given, or for that shape of it."""
    name, condition = denoiser.family.name, denoiser.config.condition
    if condition == "control" and any(one.control_CFHW is None for one in given):
        raise ConfigError(
            f"{name}: a control model needs a control clip and cannot sample from text; name it: --control"
        )
    if condition != "control" and any(one.control_CFHW is not None for one in given):
        raise ConfigError(f"{name}: this model takes no control clip; leave --control out, or choose a control model")
    if condition != "inpaint" and any(one.is_known for one in given):
        raise no_input(name)
    if denoiser.family.supported_masks == "ends" and not all(is_at_ends(one.known_FHW) for one in given):
        raise ConfigError(
            f"{name}: this model can be given whole frames at the two ends of a clip, but the mask has others; "
            "make its black parts whole frames there, or choose an inpaint model that takes regions"
        )


def no_input(family: str) -> ConfigError:
    return ConfigError(
        f"{family}: this model has no input for given frames, so --image, --last-image, --mask and --video without "
        "--strength cannot be used; choose an image-to-video or inpaint model, or change a video with --video and "
        "--strength"
    )
