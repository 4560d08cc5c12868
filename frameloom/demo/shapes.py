"""Moving Shapes: drawing one coloured shape that moves over a plain background, and its caption.

A caption describes its clip completely: colour, shape, motion, speed, background. Everything is measured in
units of the short side, and the whole motion stays inside the central square, so a caption stays true after
a resize or a centre crop. (A horizontal flip would turn "left" into a lie: do not flip this set.)
Shape letters: F frames, H height, W width, C channels (3).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from frameloom.core.random import key, numpy_stream

# Six hues at least 38 degrees apart over colourless backgrounds: mixing one into the other (blur, codec) keeps the hue.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (224, 48, 48),
    "yellow": (244, 206, 40),
    "green": (40, 168, 72),
    "cyan": (48, 204, 220),
    "blue": (48, 88, 232),
    "purple": (164, 56, 204),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "black": (18, 18, 18),
    "gray": (128, 128, 128),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle")
# Unit steps (down, right) per motion.
MOTIONS: dict[str, tuple[int, int]] = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0), "still": (0, 0)}
# Short sides per frame, far enough apart to tell them from nine frames.
SPEEDS: dict[str, float] = {"slowly": 0.022, "quickly": 0.055}

SIZE_RANGE = (0.36, 0.44)  # extent of a shape in short sides
EDGE_MARGIN = 0.02

_ATTRIBUTE_WORDS = {
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "motion": tuple(MOTIONS),
    "background": tuple(BACKGROUNDS),
    "speed": tuple(SPEEDS),
}
_HELD_OUT_SHARE = 0.1

Combination = tuple[str, str, str, str]
"""Colour, shape, motion, background: what is held out. Speed is not part of it."""


@dataclass(frozen=True)
class ShapeAttributes:
    """What a clip shows. An image has no motion; what stands still, or is said without a speed, has no speed."""

    colour: str
    shape: str
    background: str
    motion: str | None = None
    speed: str | None = None

    @property
    def combination(self) -> Combination:
        """An image counts as standing still: it shows what every frame of that clip shows."""
        return self.colour, self.shape, self.motion or "still", self.background


_MOVING = (
    "a {colour} {shape} moves {motion} {speed} over a {background} background",
    "a {colour} {shape} {speed} moves {motion} over a {background} background",
)
_STILL = ("a {colour} {shape} stays still over a {background} background",)
_IMAGE = ("an image of a {colour} {shape} over a {background} background",)


def write_caption(attributes: ShapeAttributes, wording: int = 0) -> str:
    """The caption in one of a few wordings (any number; taken modulo how many there are)."""
    wordings = _IMAGE if attributes.motion is None else _STILL if attributes.motion == "still" else _MOVING
    words = {name: getattr(attributes, name) or "" for name in _ATTRIBUTE_WORDS}
    return " ".join(wordings[wording % len(wordings)].format(**words).split())


def parse_caption(caption: str) -> ShapeAttributes | None:
    """The attributes a caption names; None when colour, shape or background is missing or any is said twice."""
    words = ["gray" if word == "grey" else word for word in re.findall(r"[a-z]+", caption.lower())]
    found = {name: [word for word in words if word in known] for name, known in _ATTRIBUTE_WORDS.items()}
    if any(len(found[name]) != 1 for name in ("colour", "shape", "background")):
        return None
    if len(found["motion"]) > 1 or len(found["speed"]) > len(found["motion"]) or ("still" in words and found["speed"]):
        return None
    return ShapeAttributes(**{name: values[0] for name, values in found.items() if values})


def all_combinations() -> list[Combination]:
    return list(itertools.product(COLOURS, SHAPES, MOTIONS, BACKGROUNDS))


def _spread(
    candidates: Sequence[Combination], count: int, tie_break: Callable[[Combination], int]
) -> list[Combination]:
    """Choose `count` so that every value, then every pair of values, is met about equally often in every prefix."""
    left = sorted(candidates, key=tie_break)
    met: Counter[tuple[tuple[int, str], ...]] = Counter()
    sizes = [len(set(values)) for values in zip(*candidates, strict=True)]
    chosen: list[Combination] = []

    def crowding(combination: Combination) -> tuple[int, int]:
        places = list(enumerate(combination))
        return (
            sum(met[(place,)] * sizes[place[0]] for place in places),
            sum(met[pair] for pair in itertools.combinations(places, 2)),
        )

    while len(chosen) < count:
        best = min(left, key=crowding)
        left.remove(best)
        chosen.append(best)
        places = list(enumerate(best))
        met.update([(place,) for place in places])
        met.update(itertools.combinations(places, 2))
    return chosen


@cache
def held_out_combinations() -> tuple[Combination, ...]:
    """The tenth of all combinations that no training row ever shows; fixed for good, every value in both parts."""
    candidates = all_combinations()
    count = round(_HELD_OUT_SHARE * len(candidates))
    return tuple(_spread(candidates, count, lambda combination: key(0, "shapes-held-out/" + "/".join(combination))))


def heldout_prompts(count: int, seed: int) -> list[str]:
    """Video prompts of combinations that no training row shows, balanced over values from the first prompt on."""
    prompts: list[str] = []
    turns: Counter[str] = Counter()
    held = held_out_combinations()
    for cycle in range(-(-count // len(held))):
        random = numpy_stream(seed, "shapes-prompts", cycle)
        tie_break = partial(lambda turn, chosen: key(seed, "shapes-prompts/" + "/".join(chosen), turn), cycle)
        for colour, shape, motion, background in _spread(held, len(held), tie_break):
            # Each motion takes the speeds in turn, from a start of its own, so that no motion goes with one speed.
            turn = turns[motion] + key(seed, f"shapes-prompts-speed/{motion}") % 2
            turns[motion] += 1
            speed = None if motion == "still" else tuple(SPEEDS)[turn % 2]
            attributes = ShapeAttributes(colour, shape, background, motion, speed)
            prompts.append(write_caption(attributes, int(random.integers(6))))
    return prompts[:count]


_TRIANGLE_RADIUS = 0.58  # of a shape's size, from the centroid to a corner; its side is then as long as the size
_SQUARE_HALF = 0.45  # a little smaller, or a square would look larger than the circle


def shape_area(shape: str, size: float) -> float:
    if shape == "circle":
        return float(np.pi / 4 * size**2)
    if shape == "square":
        return 4 * (_SQUARE_HALF * size) ** 2
    return 3 * 3**0.5 / 4 * (_TRIANGLE_RADIUS * size) ** 2


def cover_shape(
    shape: str, size_px: float, centre_F2: NDArray[np.floating], height_px: int, width_px: int
) -> NDArray[np.float32]:
    """Share of every pixel that the shape covers, FHW; `centre_F2` is (down, right) in pixels.

    The share comes from the distance to the outline, which is smooth at every position: no jumps by whole pixels.
    """
    centre = np.asarray(centre_F2, np.float32)
    down = (np.arange(height_px, dtype=np.float32) + 0.5)[None, :, None] - centre[:, 0, None, None]
    right = (np.arange(width_px, dtype=np.float32) + 0.5)[None, None, :] - centre[:, 1, None, None]
    if shape == "circle":
        outside = np.hypot(down, right) - size_px / 2
    elif shape == "square":
        outside = np.maximum(np.abs(down), np.abs(right)) - _SQUARE_HALF * size_px
    else:
        inner = _TRIANGLE_RADIUS * size_px / 2
        outside = np.maximum(down, np.abs(right) * np.float32(3**0.5 / 2) - down / 2) - inner
    return np.asarray(np.clip(0.5 - outside, 0, 1), np.float32)


def render_clip(
    attributes: ShapeAttributes, height_px: int, width_px: int, num_frames: int, random: np.random.Generator
) -> NDArray[np.uint8]:
    """Draw the clip, FHWC; size and start come from `random`, such that the whole motion stays in the picture."""
    size = random.uniform(*SIZE_RANGE)
    return _paint(attributes, size, _draw_path(attributes, size, num_frames, random), height_px, width_px)


def render_centred(
    attributes: ShapeAttributes, *, height_px: int, width_px: int, random: np.random.Generator
) -> NDArray[np.uint8]:
    """A picture, HWC, with the shape near the middle: where a clip's first frame shows it betrays where it goes."""
    place_12 = 0.5 + random.uniform(-0.03, 0.03, size=(1, 2))
    picture_1HWC = _paint(attributes, random.uniform(*SIZE_RANGE), place_12, height_px, width_px)
    return picture_1HWC.reshape(height_px, width_px, 3)


def _paint(
    attributes: ShapeAttributes, size: float, path_F2: NDArray[np.float64], height_px: int, width_px: int
) -> NDArray[np.uint8]:
    short_px = min(height_px, width_px)
    corner = np.array([height_px - short_px, width_px - short_px]) / 2
    cover_FHW = cover_shape(attributes.shape, size * short_px, path_F2 * short_px + corner, height_px, width_px)
    background = np.array(BACKGROUNDS[attributes.background], np.float32)
    colour = np.array(COLOURS[attributes.colour], np.float32)
    frames_FHWC = background + cover_FHW[..., None] * (colour - background)
    return np.rint(frames_FHWC).astype(np.uint8)


def _draw_path(
    attributes: ShapeAttributes, size: float, num_frames: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """Centroids (down, right), in short sides within the central unit square, at constant speed."""
    direction = np.array(MOTIONS[attributes.motion or "still"], float)
    steps_F2 = np.arange(num_frames)[:, None] * direction * SPEEDS.get(attributes.speed or "", 0.0)
    # How far the shape reaches from its centroid: up, down, left, right.
    up = down = left = right = size / 2 if attributes.shape == "circle" else _SQUARE_HALF * size
    if attributes.shape == "triangle":
        radius = _TRIANGLE_RADIUS * size
        up, down, left, right = radius, radius / 2, radius * 3**0.5 / 2, radius * 3**0.5 / 2
    low = np.array([up, left]) + EDGE_MARGIN - steps_F2.min(axis=0)
    high = 1 - np.array([down, right]) - EDGE_MARGIN - steps_F2.max(axis=0)
    if np.any(low > high):
        raise ValueError(f"{num_frames} frames are too many for a shape that moves {attributes.speed}")
    return np.asarray(random.uniform(low, high) + steps_F2)
