"""Pictures, videos and masks that a person gives besides the prompt, as pixels: what is known, and what to start from.

Modes follow from what is given:

    nothing                    text to image or text to video
    head, tail or both         image to video: the first frame, the last one, both
    video                      continuation: its last frames are the first ones of the new clip
    video and mask             inpainting: white of the mask is made anew, black is kept
    video (and mask), strength video to video: the video with noise on it is what sampling starts from
    head, strength, one frame  image to image
    control                    a clip that a control model follows, beside any of these

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import ConfigError, DataError
from frameloom.data.media.decode import IMAGE_FORMATS, probe_clip, read_clip, read_image
from frameloom.data.media.frames import Window, resample_window
from frameloom.data.media.transforms import to_unit_range

BLANK = -1.0
_MASK_MIDDLE = 128


class Media(Protocol):
    """Files of a request; those that are None are not given."""

    @property
    def head(self) -> Path | None: ...
    @property
    def tail(self) -> Path | None: ...
    @property
    def video(self) -> Path | None: ...
    @property
    def mask(self) -> Path | None: ...
    @property
    def control(self) -> Path | None: ...


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


def name_mode(media: Media, settings: SampleSection) -> str:
    """One of text, image, continue, inpaint and video; ConfigError for files that do not go together."""
    problems = []
    if media.mask is not None and media.video is None:
        problems.append("--mask: a mask says what of a video is made anew; name the video with --video")
    if media.video is not None and (media.head is not None or media.tail is not None):
        problems.append("--video: a video brings its own first and last frames; leave --image and --last-image out")
    if media.tail is not None and settings.frames == 1:
        problems.append("--last-image: a clip of one frame has no last one; use --image, or more frames")
    can_start = media.video is not None or (media.head is not None and settings.frames == 1)
    if settings.strength is not None and not can_start:
        problems.append("--strength: says how much of a given video is changed; name it with --video")
    if media.head is not None and settings.frames == 1 and settings.strength is None:
        problems.append("--image: with one frame there is nothing left to make; add --strength, or more frames")
    if problems:
        raise ConfigError(problems)
    if media.mask is not None:
        return "inpaint"
    if media.video is not None:
        return "continue" if settings.strength is None else "video"
    if media.head is not None or media.tail is not None:
        return "video" if settings.frames == 1 else "image"
    return "text"


def read_given(media: Media, settings: SampleSection, *, stride: int, causal: bool) -> Given:
    """Read the files at the size of the clip that is made; `stride` and `causal` are the autoencoder's."""
    size_FHW = (settings.frames, settings.height, settings.width)
    clip_CFHW = torch.full((3, *size_FHW), BLANK)
    known_FHW = torch.zeros(size_FHW, dtype=torch.uint8)
    mode = name_mode(media, settings)
    if mode == "image":
        for path, frame in ((media.head, 0), (media.tail, -1)):
            if path is not None:
                clip_CFHW[:, frame] = _read_picture(path, settings)
                known_FHW[frame] = 1
    elif mode == "continue":
        assert media.video is not None
        count = settings.known_frames or choose_known_frames(settings.frames, stride=stride, causal=causal)
        if count >= settings.frames:
            raise ConfigError(
                f"sample.known_frames is {count}; of a clip of {settings.frames} frames at most {settings.frames - 1} "
                "can be taken over"
            )
        clip_CFHW[:, :count] = _read_frames(media.video, settings, count, from_end=True)
        known_FHW[:count] = 1
    elif mode in ("inpaint", "video"):
        source = media.video or media.head
        assert source is not None
        clip_CFHW = _read_frames(source, settings, settings.frames)
        if media.mask is not None:
            known_FHW = _read_mask(media.mask, settings)
    control = None if media.control is None else _read_frames(media.control, settings, settings.frames)
    return Given(clip_CFHW, known_FHW, starts=settings.strength is not None, control_CFHW=control)


def choose_known_frames(frames: int, *, stride: int, causal: bool) -> int:
    """The number of frames nearest to half of a clip that fills latent frames; at least one."""
    lead = int(causal)
    return max(1, lead + round((frames / 2 - lead) / stride) * stride)


def _read_picture(path: Path, settings: SampleSection) -> Tensor:
    """[C, H, W]; of a video, its first frame."""
    return _read_frames(path, settings, 1)[:, 0]


def _read_frames(path: Path, settings: SampleSection, count: int, *, from_end: bool = False) -> Tensor:
    """`count` frames at the frame rate of the clip that is made, the first or the last ones of the file."""
    height, width = settings.height, settings.width
    if path.suffix.lower() in IMAGE_FORMATS:
        if count > 1:
            raise DataError(f"{path}: is a picture, and {count} frames are needed; name a video")
        return to_unit_range(read_image(path, height=height, width=width))
    facts = probe_clip(path)
    assert facts.fps is not None
    indices = resample_window(Window(0, facts.frames), facts.fps, settings.fps)
    if len(indices) < count:
        raise DataError(
            f"{path}: has {len(indices)} frames at {settings.fps:g} frames per second, and {count} are needed; give a "
            f"longer video, fewer frames, or a higher --fps (the file has {facts.frames} frames at {facts.fps:g})"
        )
    chosen = indices[-count:] if from_end else indices[:count]
    return to_unit_range(read_clip(path, indices=chosen, height=height, width=width))


def _read_mask(path: Path, settings: SampleSection) -> Tensor:
    """1 where the mask is dark; a picture stands for all frames."""
    is_picture = path.suffix.lower() in IMAGE_FORMATS
    pixels_CFHW = _read_frames(path, settings, 1 if is_picture else settings.frames)
    grey_FHW = pixels_CFHW.mean(0)
    known_FHW = (grey_FHW < _MASK_MIDDLE / 127.5 - 1).to(torch.uint8)
    return known_FHW.expand(settings.frames, -1, -1).clone()
