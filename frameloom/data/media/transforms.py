"""Transforms: how a picture is scaled and cut to the size of its bucket, as a list of steps that a recipe names.

A list is either `resize, center_crop | random_crop` (scale, then cut) or `center_crop, resize` (cut to the bucket's
ratio in the source, then scale); a last `rescale` stands for the way from bytes to [-1, 1], which the training task
does on the device. Sizes are decided here and carried out inside the decoder (`decode.py`), so a frame is never held
at full size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from frameloom.config.schema.data import TransformSection
from frameloom.core.errors import ConfigError


class ResizeCrop(NamedTuple):
    """Scale to `height` x `width`, then cut the wanted size out at `top`, `left`."""

    height: int
    width: int
    top: int
    left: int


CropRule = Callable[[int, int], ResizeCrop]
"""(height, width as displayed) -> how the picture is scaled and cut"""


def cover_rule(wanted_height: int, wanted_width: int) -> CropRule:
    """The smallest scaling that covers the wanted size with the ratio kept, cut in the centre."""
    return lambda height, width: Transforms().place(height, width, wanted_height, wanted_width)


Fit = Literal["cover", "short_side", "stretch", "area"]
Rounding = Literal["nearest", "down", "up"]


@dataclass(frozen=True)
class Resize:
    """Scale a picture.

    `cover`: the smallest size with the same ratio that covers the bucket. `short_side`: the short side becomes the
    bucket's short side. `stretch`: the bucket's own size, ratio lost. `area`: shrink to at most `max_area` pixels,
    never enlarge. `rounding` is that of the side that follows from the ratio.
    """

    disk_name: ClassVar[str] = "Resize"
    fit: Fit = "cover"
    rounding: Rounding = "nearest"
    max_area: int | None = None

    def scale(self, height: int, width: int, wanted_height: int, wanted_width: int) -> tuple[int, int]:
        if self.fit == "stretch":
            return wanted_height, wanted_width
        if self.fit == "area":
            if self.max_area is None or height * width <= self.max_area:
                return height, width
            factor = math.sqrt(self.max_area / (height * width))
            return int(height * factor), int(width * factor)
        if self.fit == "short_side":
            side = min(wanted_height, wanted_width)
            if height <= width:
                return side, self._follow(width, side, height)
            return self._follow(height, side, width), side
        if wanted_height / height > wanted_width / width:
            return wanted_height, max(wanted_width, self._follow(width, wanted_height, height))
        return max(wanted_height, self._follow(height, wanted_width, width)), wanted_width

    def _follow(self, side: int, other_wanted: int, other: int) -> int:
        # The factor first, as the published codes compute it: the order of the two operations decides some last pixels.
        length = side * (other_wanted / other)
        if self.rounding == "nearest":
            return round(length)
        return math.ceil(length) if self.rounding == "up" else int(length)


@dataclass(frozen=True)
class CenterCrop:
    """Cut the middle out; an odd pixel goes to the end (`down`), or by banker's rounding (`even`)."""

    disk_name: ClassVar[str] = "CenterCrop"
    rounding: Literal["down", "even"] = "down"

    def offset(self, excess: int) -> int:
        return excess // 2 if self.rounding == "down" else round(excess / 2)


@dataclass(frozen=True)
class RandomCrop:
    """Cut out anywhere, every place equally likely."""

    disk_name: ClassVar[str] = "RandomCrop"


@dataclass(frozen=True)
class Rescale:
    """Bytes to [-1, 1]: x / 127.5 - 1. It has no settings and is always the last step."""

    disk_name: ClassVar[str] = "Rescale"


Transform = Resize | CenterCrop | RandomCrop | Rescale

# By the name in a recipe: the step, and how it may round.
_STEPS: dict[str, tuple[type[Transform], tuple[str, ...]]] = {
    "resize": (Resize, ("nearest", "down", "up")),
    "center_crop": (CenterCrop, ("down", "even")),
    "random_crop": (RandomCrop, ()),
    "rescale": (Rescale, ()),
}


@dataclass(frozen=True)
class Transforms:
    """A checked list of steps; see the head of this file for what it may hold."""

    steps: tuple[Transform, ...] = (Resize(), CenterCrop())

    def __post_init__(self) -> None:
        problem = _find_problem(self.steps)
        if problem:
            raise ConfigError(f"data.transforms: {problem}")

    @property
    def crops_first(self) -> bool:
        return isinstance(self.steps[0], CenterCrop)

    @property
    def is_random(self) -> bool:
        return any(isinstance(step, RandomCrop) for step in self.steps)

    def place(
        self, height: int, width: int, wanted_height: int, wanted_width: int, draws: tuple[float, float] = (0.0, 0.0)
    ) -> ResizeCrop:
        """Where a picture of `height` x `width` is scaled and cut; `draws` in [0, 1) choose the top and the left of a
        random crop. A cut before the scaling is exact to half a pixel of the result."""
        if self.crops_first:
            box = self.source_box(height, width, wanted_height, wanted_width)
            scaled = (round(height * wanted_height / box.height), round(width * wanted_width / box.width))
            top = min(round(box.top * wanted_height / box.height), scaled[0] - wanted_height)
            left = min(round(box.left * wanted_width / box.width), scaled[1] - wanted_width)
            return ResizeCrop(*scaled, top, left)
        resize, crop = next(step for step in self.steps if isinstance(step, Resize)), self._crop
        scaled = resize.scale(height, width, wanted_height, wanted_width)
        excess = (scaled[0] - wanted_height, scaled[1] - wanted_width)
        if isinstance(crop, CenterCrop):
            return ResizeCrop(*scaled, crop.offset(excess[0]), crop.offset(excess[1]))
        return ResizeCrop(*scaled, *(int(draw * (room + 1)) for draw, room in zip(draws, excess, strict=True)))

    def source_box(self, height: int, width: int, wanted_height: int, wanted_width: int) -> ResizeCrop:
        """The largest centred part of the source that has the bucket's ratio: its size, top and left."""
        crop = self._crop
        assert isinstance(crop, CenterCrop)
        ratio = wanted_height / wanted_width
        size = (int(width * ratio), width) if height / width > ratio else (height, int(height / ratio))
        return ResizeCrop(*size, crop.offset(height - size[0]), crop.offset(width - size[1]))

    @property
    def _crop(self) -> CenterCrop | RandomCrop:
        return next((step for step in self.steps if isinstance(step, CenterCrop | RandomCrop)), CenterCrop())


def parse_transforms(sections: Sequence[TransformSection]) -> tuple[Transform, ...]:
    """The steps that a recipe names; ConfigError for a setting that its step does not have."""
    steps = []
    for number, section in enumerate(sections):
        where = f"data.transforms.{number}: {section.name}"
        kind, roundings = _STEPS[section.name]
        given = {name: value for name, value in section.model_dump(exclude={"name"}).items() if value is not None}
        known = [field.name for field in dataclasses.fields(kind)]
        for name, value in given.items():
            if name not in known:
                advice = f"it has {', '.join(known)}" if known else "it has no settings"
                raise ConfigError(f"{where} has no setting {name}; {advice}")
            if name == "rounding" and value not in roundings:
                raise ConfigError(f"{where} cannot round {value}; use {' or '.join(roundings)}")
        steps.append(kind(**given))
    return tuple(steps)


def _find_problem(steps: Sequence[Transform]) -> str | None:
    kinds = [type(step) for step in steps]
    if kinds and kinds[-1] is Rescale:
        kinds.pop()
    if Rescale in kinds:
        return "rescale must be the last step"
    if kinds.count(Resize) != 1 or len(kinds) > 2 or (len(kinds) == 2 and kinds.count(Resize) == 2):
        return "it needs one resize, at most one center_crop or random_crop, and rescale at the end if named"
    resize = next(step for step in steps if isinstance(step, Resize))
    if kinds[0] is RandomCrop:
        return "random_crop comes after resize; only center_crop can come before it"
    if kinds[0] is CenterCrop and resize.fit != "stretch":
        return "after center_crop the picture has the bucket's ratio; resize it with fit stretch"
    if (resize.fit == "area") != (resize.max_area is not None):
        return "max_area belongs to fit area; give both or neither"
    if resize.max_area is not None and resize.max_area < 1:
        return f"max_area is {resize.max_area}; it must be 1 or more"
    return None


def to_signed_range(pixels: Tensor) -> Tensor:
    """uint8 to [-1, 1]."""
    return pixels.float().div_(127.5).sub_(1)


def to_uint8(pixels: Tensor) -> Tensor:
    """[-1, 1] to uint8, rounded and clamped."""
    return pixels.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)


def psnr_db(a_BCFHW: Tensor, b_BCFHW: Tensor) -> Tensor:
    """Peak signal-to-noise ratio per clip of values in [-1, 1], the mean over its frames; inf if a frame is equal."""
    if a_BCFHW.shape != b_BCFHW.shape or a_BCFHW.ndim != 5:
        raise ValueError(f"two videos BCFHW of one shape, got {tuple(a_BCFHW.shape)} and {tuple(b_BCFHW.shape)}")
    errors_BCFHW = (a_BCFHW.to(torch.float32) - b_BCFHW.to(torch.float32)).square()
    return (10 * torch.log10(4 / errors_BCFHW.mean(dim=(1, 3, 4)))).mean(dim=1)
