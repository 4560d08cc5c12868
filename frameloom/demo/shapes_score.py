"""Scoring of Moving Shapes: reads attributes back from the pixels of a clip and compares them with its caption.

Nothing here is learned. The background is the median of the border. Every pixel is then taken as a mix of the
background and the shape's colour, which gives a soft mask; its centroid over time is the motion, and the outline that
covers it best is the shape. Soft masks make blur and noise cost little: generated clips have both.
Shape letters: F frames, H height, W width, C channels (3).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import DataError
from frameloom.core.progress import ProgressBar
from frameloom.core.random import numpy_stream
from frameloom.data.media.transforms import psnr_db, to_signed_range
from frameloom.data.media.writing import write_image
from frameloom.demo.shapes import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    SIZE_RANGE,
    SPEEDS,
    ShapeAttributes,
    cover_shape,
    heldout_prompts,
    parse_caption,
    render_centred,
    shape_area,
)
from frameloom.evaluate.clip_metrics import PromptMetric
from frameloom.sampling.outputs import Sample
from frameloom.sampling.pipeline import Pipeline, generate

UNREADABLE = "unreadable"
"""What is said of a colour, shape or motion that cannot be measured; it matches no caption."""

# What equal frames count as: JSON has no infinity.
_EQUAL_DB = 100.0
_NUM_VALUES = {
    "colour": len(COLOURS),
    "shape": len(SHAPES),
    "motion": len(MOTIONS),
    "background": len(BACKGROUNDS),
    "speed": len(SPEEDS),
}

_BORDER = 0.06  # width of the frame-shaped region that shows the background, in short sides
_MIN_CONTRAST = 40.0  # RGB distance below which there is no shape; the faintest real one has 100
_MIN_AREA = shape_area("triangle", SIZE_RANGE[0]) / 3  # in square short sides; smaller is a speck
_SEARCH_RADIUS = 0.3  # no shape reaches further from its centroid, in short sides
_TRACE = 0.2  # a pixel with less of the shape's colour shows background and noise
_MIN_OVERLAP = 0.6  # with the best outline; blur and noise leave 0.7, two shapes or a torn one far less
_MAX_WANDERING = 0.05  # of the centroid around its line, in short sides; real clips stay below 0.01
_MAX_FADING = 0.5  # how far a colour may be mixed with the background and keep its name
_QUICK_FROM = 0.038  # short sides per frame: half-way between slow and quick
_MOVING_FROM = 0.4 * SPEEDS["slowly"]  # a still one measures 0.001

Floats = NDArray[np.float32]


def score_clip(frames_FHWC: NDArray[np.uint8]) -> ShapeAttributes:
    """What the pixels show; one frame is an image and has no motion."""
    video_FHWC = frames_FHWC.astype(np.float32)
    background = _measure_background(video_FHWC)
    background_name = _nearest(background, BACKGROUNDS)
    smooth_FHWC = _smooth(video_FHWC)
    core = _measure_core(smooth_FHWC, background)
    if core is None:
        motion = None if len(video_FHWC) == 1 else UNREADABLE
        return ShapeAttributes(UNREADABLE, UNREADABLE, background_name, motion)
    mask_FHW = _measure_mask(smooth_FHWC, background, core)
    centre_F2 = _measure_centres(mask_FHW)
    motion, speed = _read_motion(mask_FHW, centre_F2)
    shape = _read_shape(mask_FHW, centre_F2)
    return ShapeAttributes(_read_colour(core, background), shape, background_name, motion, speed)


def _measure_background(video_FHWC: Floats) -> Floats:
    _, height_px, width_px, _ = video_FHWC.shape
    edge = max(2, round(_BORDER * min(height_px, width_px)))
    border_HW = np.ones((height_px, width_px), bool)
    border_HW[edge:-edge, edge:-edge] = False
    return np.asarray(np.median(video_FHWC[:, border_HW], axis=(0, 1)), np.float32)


def _nearest(colour: Floats, palette: dict[str, tuple[int, int, int]]) -> str:
    distances = np.linalg.norm(np.array(list(palette.values())) - colour, axis=1)
    return list(palette)[int(distances.argmin())]


def _smooth(video: Floats) -> Floats:
    """Mean over 3x3 pixels of FHW or FHWC, edges repeated: noise goes down by three, a shape of 16 pixels stays."""
    padded = np.pad(video, [(0, 0), (1, 1), (1, 1)] + [(0, 0)] * (video.ndim - 3), mode="edge")
    rows = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    return np.asarray((rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]) / 9, np.float32)


def _measure_core(smooth_FHWC: Floats, background: Floats) -> Floats | None:
    """Colour in the middle of the shape: the median of the pixels that stand out most; None when nothing does."""
    difference_FHWC = smooth_FHWC - background
    square_FHW = np.einsum("fhwc,fhwc->fhw", difference_FHWC, difference_FHWC)
    short_px = min(smooth_FHWC.shape[1:3])
    num_core = max(4, round(_MIN_AREA * short_px**2)) * len(smooth_FHWC)
    reach = float(np.partition(square_FHW, -num_core, axis=None)[-num_core])
    if reach < _MIN_CONTRAST**2:
        return None
    return np.asarray(np.median(smooth_FHWC[square_FHW >= reach], axis=0), np.float32)


def _measure_mask(smooth_FHWC: Floats, background: Floats, core: Floats) -> Floats:
    """Share of the shape's colour in every pixel, FHW; weak traces count as background."""
    axis = core - background
    share_FHW = (smooth_FHWC - background) @ (axis / (axis @ axis))
    return _drop_traces(np.asarray(share_FHW, np.float32))


def _drop_traces(share: Floats) -> Floats:
    return np.asarray(np.clip((share - _TRACE) / (1 - _TRACE), 0, 1), np.float32)


def _measure_centres(mask_FHW: Floats) -> NDArray[np.float64]:
    """Centroids (down, right) in pixels; the second look leaves out specks far from the first."""
    _, height_px, width_px = mask_FHW.shape
    down = np.arange(height_px) + 0.5
    right = np.arange(width_px) + 0.5
    centre_F2 = _centroid(mask_FHW.astype(np.float64) ** 2, down, right)
    radius_px = _SEARCH_RADIUS * min(height_px, width_px)
    near_FHW = (
        (down[None, :, None] - centre_F2[:, 0, None, None]) ** 2
        + (right[None, None, :] - centre_F2[:, 1, None, None]) ** 2
    ) <= radius_px**2
    return _centroid(mask_FHW * near_FHW, down, right)


def _centroid(
    weight_FHW: NDArray[np.floating], down: NDArray[np.floating], right: NDArray[np.floating]
) -> NDArray[np.float64]:
    total_F = weight_FHW.sum(axis=(1, 2)) + 1e-6
    return np.stack([weight_FHW.sum(axis=2) @ down / total_F, weight_FHW.sum(axis=1) @ right / total_F], axis=1)


def _read_motion(mask_FHW: Floats, centre_F2: NDArray[np.float64]) -> tuple[str | None, str | None]:
    """Direction and speed of the least-squares line through the centroids; frames count by how much they show."""
    if len(mask_FHW) == 1:
        return None, None
    weight_F = mask_FHW.sum(axis=(1, 2), dtype=np.float64) + 1e-6
    weight_F /= weight_F.sum()
    place_F2 = (centre_F2 - weight_F @ centre_F2) / min(mask_FHW.shape[1:])
    frame_F = np.arange(len(mask_FHW)) - weight_F @ np.arange(len(mask_FHW))
    velocity = (weight_F * frame_F) @ place_F2 / max(weight_F @ frame_F**2, 1e-6)
    wandering = float(np.sqrt(weight_F @ ((place_F2 - frame_F[:, None] * velocity) ** 2).sum(axis=1)))
    if wandering > _MAX_WANDERING:
        return UNREADABLE, None
    speed = float(np.linalg.norm(velocity))
    if speed < _MOVING_FROM:
        return "still", None
    directions = {name: step for name, step in MOTIONS.items() if name != "still"}
    along = np.array(list(directions.values())) @ velocity
    return list(directions)[int(along.argmax())], "quickly" if speed >= _QUICK_FROM else "slowly"


def _read_shape(mask_FHW: Floats, centre_F2: NDArray[np.float64]) -> str:
    """The shape whose outline, at the mask's own place and area, covers the mask best over all frames."""
    area_px = float(mask_FHW.sum(dtype=np.float64)) / len(mask_FHW)
    overlap = {}
    for shape in SHAPES:
        size_px = (area_px / shape_area(shape, 1.0)) ** 0.5
        # The outline goes through what the mask went through, or its sharper corners would count against it.
        cover_FHW = _drop_traces(_smooth(cover_shape(shape, size_px, centre_F2, *mask_FHW.shape[1:])))
        overlap[shape] = float(np.minimum(cover_FHW, mask_FHW).sum() / np.maximum(cover_FHW, mask_FHW).sum())
    best = max(overlap, key=lambda shape: overlap[shape])
    return best if overlap[best] >= _MIN_OVERLAP else UNREADABLE


def _read_colour(core: Floats, background: Floats) -> str:
    """The colour nearest to the core, where each may be mixed with the background by up to a half."""
    axes = np.array(list(COLOURS.values()), np.float32) - background
    share = np.clip((axes @ (core - background)) / (axes**2).sum(axis=1), 1 - _MAX_FADING, 1)
    distances = np.linalg.norm(core - background - share[:, None] * axes, axis=1)
    return list(COLOURS)[int(distances.argmin())]


@dataclass(frozen=True)
class ScoreReport:
    """How often clips show what their captions say.

    `accuracy` has a share per attribute, over the captions that name it; `all_right` is the share of clips
    whose every named attribute is right. `chance` is what uniform guessing gives, under the same names.
    """

    count: int
    accuracy: dict[str, float]
    all_right: float
    chance: dict[str, float]
    first_frame_db: float | None = None
    """median likeness (PSNR) of first frames to the ones that were given"""
    results: Sequence[Sample] = ()

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "results" and value is not None}


def score_prompts(clips: Iterable[tuple[NDArray[np.uint8], str]]) -> ScoreReport:
    """Compare frames with captions. Every caption must be one that `parse_caption` understands."""
    right: dict[str, list[bool]] = {name: [] for name in _NUM_VALUES}
    all_right, all_chance = [], []
    for frames_FHWC, caption in clips:
        wanted = parse_caption(caption)
        if wanted is None:
            raise DataError(f"{caption!r} names no colour, shape and background of Moving Shapes; leave it out")
        found = score_clip(frames_FHWC)
        named = [name for name in _NUM_VALUES if getattr(wanted, name) is not None]
        for name in named:
            right[name].append(getattr(wanted, name) == getattr(found, name))
        all_right.append(all(right[name][-1] for name in named))
        all_chance.append(prod(1 / _NUM_VALUES[name] for name in named))
    if not all_right:
        raise ValueError("no clips to score")
    accuracy = {name: float(np.mean(values)) for name, values in right.items() if values}
    chance = {name: 1 / _NUM_VALUES[name] for name in accuracy} | {"all_right": float(np.mean(all_chance))}
    return ScoreReport(len(all_right), accuracy, float(np.mean(all_right)), chance)


def are_shapes(prompts: Sequence[str]) -> bool:
    """Whether all prompts are ones of Moving Shapes, which can be scored from pixels."""
    return bool(prompts) and all(parse_caption(prompt) is not None for prompt in prompts)


def _score_pixels(pixels_CFHW: Tensor, prompt: str) -> float:
    return score_prompts([(pixels_CFHW.permute(1, 2, 3, 0).contiguous().numpy(), prompt)]).all_right


# What evaluation can measure of clips of Moving Shapes, besides its own metrics.
PROMPT_METRICS = {"shapes": PromptMetric("shapes_right", _score_pixels, are_shapes)}


def score_run(pipeline: Pipeline, *, num_prompts: int, seed: int, batch_size: int = 24) -> ScoreReport:
    """Sample prompts whose combinations were never trained on, and score them; seeds count up from 0."""
    prompts = heldout_prompts(num_prompts, seed=seed)
    requests = [pipeline.request(prompt, number) for number, prompt in enumerate(prompts)]
    return _sample_and_score(pipeline, requests, batch_size)


def score_from_first_frames(pipeline: Pipeline, *, num_prompts: int, seed: int, batch_size: int = 24) -> ScoreReport:
    """The same with a first frame given, drawn anew for each held-out prompt.

    What the frame shows is then for the model to keep; where it goes, only the prompt says.
    """
    size = {"height_px": pipeline.settings.height, "width_px": pipeline.settings.width}
    with tempfile.TemporaryDirectory() as folder:
        frames, requests = [], []
        for number, prompt in enumerate(heldout_prompts(num_prompts, seed=seed)):
            attributes, path = parse_caption(prompt), Path(folder) / f"{number:04d}.png"
            assert attributes is not None
            frames.append(render_centred(attributes, **size, random=numpy_stream(seed, "shapes-first-frame", number)))
            write_image(path, frames[-1])
            requests.append(pipeline.request(prompt, number, image=path))
        scored = _sample_and_score(pipeline, requests, batch_size)
    likeness = []
    for pair in zip((result.frames[0] for result in scored.results), frames, strict=True):
        pixels = (to_signed_range(torch.from_numpy(frame_HWC).permute(2, 0, 1)[None, :, None]) for frame_HWC in pair)
        likeness.append(min(float(psnr_db(*pixels)), _EQUAL_DB))
    return replace(scored, first_frame_db=median(likeness))


def is_right(result: Sample) -> bool:
    """Whether every attribute that the prompt names is there."""
    return score_prompts([(result.frames, result.request.prompt)]).all_right == 1


def _sample_and_score(pipeline: Pipeline, requests: Sequence[SampleRequest], batch_size: int) -> ScoreReport:
    with ProgressBar("sampling", len(requests) * pipeline.settings.steps) as bar:
        results = generate(pipeline, requests, batch_size=batch_size, on_step=bar.advance)
    return replace(score_prompts([(result.frames, result.request.prompt) for result in results]), results=results)
