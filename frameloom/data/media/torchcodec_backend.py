"""The torchcodec decoder, for machines whose FFmpeg is newer than the one in PyAV's wheels.

The header is checked with PyAV's allow-list of containers before torchcodec sees the file, and a decoder has one
thread. It takes the same frames; scaled pixels differ by the rounding of another FFmpeg, so a latent cache belongs to
one of the two. Damaged frames inside a readable file go unnoticed here.
Shape letters: C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.errors import MissingExtra
from frameloom.data.media import decode
from frameloom.data.media.decode import LIMITS, ClipError, DecodeLimits, Media, PlaceRule
from frameloom.data.media.tar_members import Member
from frameloom.data.media.transforms import cover


def load_torchcodec() -> tuple[ModuleType, ModuleType]:
    """Its modules of decoders and transforms; MissingExtra if it, or the FFmpeg that it needs, is not there."""
    try:
        return import_module("torchcodec.decoders"), import_module("torchcodec.transforms")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingExtra("torchcodec (with FFmpeg 4 to 8 on the library path)", "torchcodec") from error


def read_clip(
    path: Media,
    *,
    indices: Sequence[int] | NDArray[np.int64],
    height: int,
    width: int,
    limits: DecodeLimits = LIMITS,
    place: PlaceRule | None = None,
) -> Tensor:
    """The same as `decode.read_clip`."""
    decoders, transforms = load_torchcodec()
    wanted = decode.check_indices(indices)
    if isinstance(path, Member) or path.suffix.lower() == ".avi":
        # A part of a tar has no name to open; avi has no presentation times: with B-frames torchcodec gives neighbours
        # of the frames asked for.
        return decode.read_clip(path, indices=wanted, height=height, width=width, limits=limits, place=place)
    with decode.open_video(path, limits) as (_, stream):
        number = stream.index
    try:
        header = decoders.VideoDecoder(path, stream_index=number, seek_mode="approximate").metadata
        rule = place or (lambda from_height, from_width: cover(from_height, from_width, height, width))
        spot = decode.check_place(path, rule(header.height, header.width), height, width, limits)
        resize = transforms.Resize((spot.height, spot.width))
        decoder = decoders.VideoDecoder(path, stream_index=number, num_ffmpeg_threads=1, transforms=[resize])
        if wanted[-1] >= decoder.metadata.num_frames:
            raise ClipError(f"{path}: frame {wanted[-1]} is not there; the file is cut or its manifest row is wrong")
        frames_FCHW: Tensor = decoder.get_frames_at(wanted.tolist()).data
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ClipError(f"{path}: torchcodec cannot read it ({reason}); replace the file or leave it out") from error
    cut_FCHW = frames_FCHW[:, :, spot.top : spot.top + height, spot.left : spot.left + width]
    return cut_FCHW.transpose(0, 1).contiguous().to(torch.uint8)
