"""The torchcodec decoder, for machines whose FFmpeg is newer than the one in PyAV's wheels.

The header is checked with PyAV's allow-list of containers before torchcodec sees the file, and a decoder has one
thread. It takes the same frames; scaled pixels differ by the rounding of another FFmpeg, so a latent cache belongs to
one of the two. Damaged frames inside a readable file go unnoticed here.
Shape letters: C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.core.errors import MissingExtra
from frameloom.data.media import decode
from frameloom.data.media.decode import LIMITS, ClipError, DecodeLimits, Media
from frameloom.data.media.tar_members import Member
from frameloom.data.media.transforms import CropRule, cover_rule


def read_clip(
    path: Media,
    *,
    indices: Sequence[int] | NDArray[np.int64],
    height: int,
    width: int,
    limits: DecodeLimits = LIMITS,
    crop_rule: CropRule | None = None,
) -> Tensor:
    """The same as `decode.read_clip`; MissingExtra if torchcodec, or the FFmpeg that it needs, is not there."""
    try:
        decoders, transforms = import_module("torchcodec.decoders"), import_module("torchcodec.transforms")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingExtra("torchcodec (with FFmpeg 4 to 8 on the library path)", "torchcodec") from error
    wanted = decode.check_indices(indices)
    if isinstance(path, Member) or path.suffix.lower() == ".avi":
        # A part of a tar has no name to open; avi has no presentation times: with B-frames torchcodec gives neighbours
        # of the frames asked for.
        return decode.read_clip(path, indices=wanted, height=height, width=width, limits=limits, crop_rule=crop_rule)
    with decode.open_video(path, limits) as (_, stream):
        number = stream.index
    try:
        header = decoders.VideoDecoder(path, stream_index=number, seek_mode="approximate").metadata
        crop = (crop_rule or cover_rule(height, width))(header.height, header.width)
        decode.check_crop(path, crop, height, width, limits)
        resize = transforms.Resize((crop.height, crop.width))
        decoder = decoders.VideoDecoder(path, stream_index=number, num_ffmpeg_threads=1, transforms=[resize])
        if wanted[-1] >= decoder.metadata.num_frames:
            raise ClipError(f"{path}: frame {wanted[-1]} is not there; the file is cut or its manifest row is wrong")
        frames_FCHW: Tensor = decoder.get_frames_at(wanted.tolist()).data
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ClipError(f"{path}: torchcodec cannot read it ({reason}); replace the file or leave it out") from error
    cut_FCHW = frames_FCHW[:, :, crop.top : crop.top + height, crop.left : crop.left + width]
    return cut_FCHW.transpose(0, 1).contiguous().to(torch.uint8)
