"""Metrics of single clips: motion, flicker, subject consistency, similarity to the prompt.

Motion and flicker follow VBench's dynamic degree and temporal flickering (Huang et al. 2023), with block matching in
place of optical flow. Pixels are uint8.
Shape letters: C channels, F frames, H height, W width, N blocks, D width of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from frameloom.core.errors import ConfigError, DataError
from frameloom.core.spelling import refuse_unknown
from frameloom.evaluate.networks import FrameNetwork, TextFrameNetwork, load_clip, load_frame_network

# By the name that a person writes: the column of the result.
CLIP_METRICS = {
    "flicker": "flicker",
    "motion": "motion_px",
    "consistency": "consistency",
    "clip": "clip_similarity",
}


@dataclass(frozen=True)
class PromptMetric:
    """A number of a clip (C, F, H, W as uint8) and its prompt that a caller adds, such as the score of Moving Shapes.

    `applies` says of a set of prompts whether the metric can be measured against all of them.
    """

    column: str
    measure: Callable[[Tensor, str], float]
    applies: Callable[[Sequence[str]], bool]


@dataclass(frozen=True)
class ClipMeasures:
    """Numbers of one clip by column; None where a clip has none, as a picture has no motion."""

    names: Sequence[str]
    network: FrameNetwork | None = None
    clip: TextFrameNetwork | None = None
    prompt_metrics: Mapping[str, PromptMetric] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        return [self._column(name) for name in self.names]

    @property
    def needs_prompts(self) -> bool:
        return any(name == "clip" or name in self.prompt_metrics for name in self.names)

    def _column(self, name: str) -> str:
        return self.prompt_metrics[name].column if name in self.prompt_metrics else CLIP_METRICS[name]

    def __call__(
        self, pixels_CFHW: Tensor, prompt: str | None = None, *, features_FD: Tensor | None = None, name: str = ""
    ) -> dict[str, float | None]:
        """Of uint8 pixels; `features_FD` are those of `network`, if the caller has them. Errors begin with `name`."""
        try:
            return {self._column(one): self._measure(one, pixels_CFHW, prompt, features_FD) for one in self.names}
        except DataError as error:
            raise DataError(f"{name}: {error}" if name else str(error)) from error

    def _measure(self, name: str, pixels_CFHW: Tensor, prompt: str | None, features_FD: Tensor | None) -> float | None:
        if name == "flicker":
            return measure_flicker(pixels_CFHW)
        if name == "motion":
            return measure_motion(pixels_CFHW)
        if name == "consistency":
            assert self.network is not None
            return measure_consistency(self.network.encode_frames(pixels_CFHW) if features_FD is None else features_FD)
        if prompt is None:
            raise DataError(f"no prompt is known, which {name} is measured against; give prompts with --prompts FILE")
        if name == "clip":
            assert self.clip is not None
            return measure_text_similarity(self.clip.encode_frames(pixels_CFHW), self.clip.encode_text(prompt))
        return self.prompt_metrics[name].measure(pixels_CFHW, prompt)


def build_clip_measures(
    names: Sequence[str] | None,
    *,
    network: Path | None = None,
    clip: Path | None = None,
    device: torch.device | str = "cpu",
    prompt_metrics: Mapping[str, PromptMetric] | None = None,
    prompts: Sequence[str] = (),
) -> ClipMeasures:
    """The metrics called `names`; without names motion, flicker, what the given networks can measure, and those of
    `prompt_metrics` that apply to all `prompts`.
    """
    added = prompt_metrics or {}
    able = {"motion": True, "flicker": True, "consistency": network, "clip": clip}
    able |= {name: bool(prompts) and metric.applies(prompts) for name, metric in added.items()}
    chosen = list(dict.fromkeys(names if names is not None else [name for name, can in able.items() if can]))
    for name in chosen:
        refuse_unknown(name, [*CLIP_METRICS, *added], what="metric")
    needed = {
        "consistency": (network, "a vision network such as DINOv2, as transformers saves it: --network FOLDER"),
        "clip": (clip, "both halves of a CLIP, as transformers saves it: --clip FOLDER"),
    }
    problems = [f"{name} needs {what}" for name, (folder, what) in needed.items() if name in chosen and folder is None]
    if problems:
        raise ConfigError(problems)
    return ClipMeasures(
        chosen,
        None if network is None else load_frame_network(network, device),
        load_clip(clip, device) if clip is not None and "clip" in chosen else None,
        added,
    )


# A pixel that stays within so many of the 255 levels over the whole clip belongs to a still part.
_STILL_LEVELS = 32.0
# Blocks overlap by half, so that an edge between two of them is inside of a third.
BLOCK_PX, STRIDE_PX, REACH_PX = 16, 8, 8
_SIDE_PX = 128  # larger pictures are made smaller before blocks are sought, so that REACH_PX reaches far enough
_TOP_SHARE = 0.05
# Cost in levels of a pixel of way: between matches that are alike, which noise would decide, the nearest wins.
_LEVELS_PER_PX = 0.1
# A block stays where it is unless another place fits better by this much; noise alone must not move it.
_LEVELS_TO_MOVE = 1.0
# A block whose levels lie closer together is plain: it is found anywhere, so it says nothing about motion.
_PLAIN_LEVELS = 48.0


def measure_flicker(pixels_CFHW: Tensor) -> float | None:
    """Mean absolute difference of neighbouring frames in still parts, in levels of 255; 0 is best.

    None for a picture, and for a clip without still parts. A flicker stronger than `_STILL_LEVELS` counts as motion.
    """
    if pixels_CFHW.shape[1] < 2:
        return None
    video = pixels_CFHW.float()
    range_HW = (video.amax(1) - video.amin(1)).amax(0)
    is_still_HW = range_HW <= _STILL_LEVELS
    if not is_still_HW.any():
        return None
    change_HW = video.diff(dim=1).abs().mean(dim=(0, 1))
    return float(change_HW[is_still_HW].double().mean())


def measure_motion(pixels_CFHW: Tensor) -> float | None:
    """Pixels that the fastest twentieth of the picture moves in a frame, the mean over the clip; None for a picture.

    A shape of some blocks that moves k pixels a frame gives k. Moves beyond the reach of the search (8 pixels, or a
    sixteenth of a short side above 128) are underestimated. None as well when a side is smaller than a block.
    """
    if pixels_CFHW.shape[1] < 2 or min(pixels_CFHW.shape[-2:]) < BLOCK_PX:
        return None
    video_FCHW = pixels_CFHW.float().transpose(0, 1)
    factor = max(1.0, min(video_FCHW.shape[-2:]) / _SIDE_PX)
    if factor > 1:
        height, width = (round(side / factor) for side in video_FCHW.shape[-2:])
        video_FCHW = F.interpolate(video_FCHW, (height, width), mode="bilinear", antialias=True, align_corners=False)
    total = 0.0
    for before_CHW, after_CHW in pairwise(video_FCHW):
        distance_N = match_blocks(before_CHW, after_CHW)
        total += float(distance_N.topk(max(1, round(_TOP_SHARE * len(distance_N)))).values.double().mean())
    return factor * total / (len(video_FCHW) - 1)


def match_blocks(before_CHW: Tensor, after_CHW: Tensor) -> Tensor:
    """How far each block of `before` is found in `after`, in pixels: the place with the least absolute difference.

    Every place up to REACH_PX away is tried; a plain block counts as still. Rows and columns that do not fill a block
    are left out.
    """
    height, width = before_CHW.shape[-2:]
    # Places outside of the picture cost without end, so no block is found there.
    wide_CHW = F.pad(after_CHW, (REACH_PX,) * 4, value=float("inf"))
    best_N = distance_N = None
    for down in range(-REACH_PX, REACH_PX + 1):
        for right in range(-REACH_PX, REACH_PX + 1):
            length = (down**2 + right**2) ** 0.5
            top, left = REACH_PX + down, REACH_PX + right
            gap_HW = (wide_CHW[:, top : top + height, left : left + width] - before_CHW).abs().mean(0)
            cost_N = F.avg_pool2d(gap_HW[None], BLOCK_PX, STRIDE_PX).flatten() + (
                _LEVELS_PER_PX * length if length else -_LEVELS_TO_MOVE
            )
            if best_N is None or distance_N is None:
                best_N, distance_N = cost_N, torch.full_like(cost_N, length)
                continue
            is_better_N = cost_N < best_N
            best_N = torch.where(is_better_N, cost_N, best_N)
            distance_N = torch.where(is_better_N, length, distance_N)
    assert distance_N is not None
    high_CN, low_CN = (F.max_pool2d(sign * before_CHW, BLOCK_PX, STRIDE_PX).flatten(1) for sign in (1, -1))
    return torch.where((high_CN + low_CN).amax(0) < _PLAIN_LEVELS, 0.0, distance_N)


def measure_consistency(features_FD: Tensor) -> float | None:
    """Subject consistency as VBench defines it (Huang et al. 2023): the mean over frames, from the second on, of the
    likeness to the first frame and to the frame before; negative cosines count as 0. None for a picture.
    """
    if len(features_FD) < 2:
        return None
    unit_FD = F.normalize(features_FD.double(), dim=1)
    to_first = (unit_FD[1:] * unit_FD[:1]).sum(1).clamp(min=0)
    to_previous = (unit_FD[1:] * unit_FD[:-1]).sum(1).clamp(min=0)
    return float(((to_first + to_previous) / 2).mean())


def measure_text_similarity(features_FD: Tensor, text_D: Tensor) -> float:
    """The mean over frames of the cosine between frame and text."""
    return float(F.cosine_similarity(features_FD.double(), text_D.double()[None], dim=1).mean())
