"""Sampling requests of the page, checked against limits and the model before anything is loaded."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import ConfigError
from frameloom.studio.generate.models import ModelFacts, ModelPlace
from frameloom.studio.server.context import Limits

OUT = "studio/generated"
UPLOADS = "studio/uploads"
FORMATS = ("mp4", "webm", "gif")
_MAX_SAMPLES = 16
_MAX_SEED = 2**62
_MAX_PIXELS = 10**9
_MAX_SCALE = 100.0
_RATIO = re.compile(r"\d{1,4}(\.\d{1,4})?:\d{1,4}(\.\d{1,4})?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Wish:
    """One order of the page. Settings that are None are the model's own; `head` and `tail` are files from the root."""

    model: str
    prompt: str
    seed: int = 0
    num_samples: int = 1
    negative: str | None = None
    steps: int | None = None
    guidance: float | None = None
    sampler: str | None = None
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    ratio: str | None = None
    fps: float | None = None
    format: str | None = None
    head: str | None = None
    tail: str | None = None

    def overrides(self) -> list[str]:
        """Settings as `frameloom sample` passes them on, in its order: files say them, and shall be equal."""
        flags = {
            **{"steps": self.steps, "guidance": self.guidance, "sampler": self.sampler, "frames": self.frames},
            **{"fps": self.fps, "format": self.format},
            "negative_prompt": None if self.negative is None else json.dumps(self.negative),
            **{"height": self.height, "width": self.width},
        }
        given = {name: value for name, value in flags.items() if value is not None}
        return [word for name, value in given.items() for word in (f"--sample.{name}", str(value))]

    def command(self) -> str:
        """The same as a command, to be typed in the studio's folder."""
        flags: dict[str, Any] = {
            "prompt": self.prompt,
            "seed": self.seed,
            "num": None if self.num_samples == 1 else self.num_samples,
            **{"steps": self.steps, "guidance": self.guidance, "sampler": self.sampler, "frames": self.frames},
            **{"fps": self.fps, "format": self.format, "negative": self.negative, "ratio": self.ratio},
            "size": None if self.width is None else f"{self.width}x{self.height}",
            "image": self.head,
            "last-image": self.tail,
            "out": OUT,
        }
        words = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
        return shlex.join(["frameloom", "sample", self.model, *words])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def drop_defaults(wish: Wish, facts: ModelFacts) -> Wish:
    """Settings that are the model's own are not said; so a file does not depend on who has filled in a form."""
    own = facts.settings
    pairs = {
        **{"steps": own.steps, "guidance": own.guidance, "sampler": own.sampler, "frames": own.frames},
        **{"fps": own.fps, "format": own.format, "negative": own.negative_prompt},
    }
    same: dict[str, Any] = {name: None for name, value in pairs.items() if getattr(wish, name) == value}
    if wish.ratio is not None or (wish.height, wish.width) == (own.height, own.width):
        same |= {"height": None, "width": None}
    return replace(wish, **same)


def check_wish(wish: Wish, place: ModelPlace, facts: ModelFacts, limits: Limits) -> None:
    """ConfigError lists everything that is wrong; the model itself is not opened."""
    problems = [problem for problem in _find_problems(wish, facts, limits) if problem]
    if problems:
        raise ConfigError(problems)
    # The recipe's own rules: numbers of frames and sizes that the model can make, samplers that it knows.
    load_recipe(place.recipe, wish.overrides())


def _find_problems(wish: Wish, facts: ModelFacts, limits: Limits) -> list[str]:
    own = facts.settings
    frames, height, width = wish.frames or own.frames, wish.height or own.height, wish.width or own.width
    return [
        "" if wish.prompt.strip() else "Prompt: is empty; say what to show",
        _check_text("Prompt", wish.prompt, limits.prompt_chars),
        _check_text("Negative prompt", wish.negative or "", limits.prompt_chars),
        _check_range("Seed", wish.seed, 0, _MAX_SEED),
        _check_range("Samples", wish.num_samples, 1, _MAX_SAMPLES),
        _check_range("Steps", wish.steps, 1, limits.steps),
        _check_range("Guidance", wish.guidance, 0, _MAX_SCALE),
        _check_range("Frames", wish.frames, 1, limits.frames),
        _check_range("Height", wish.height, 1, limits.side_px),
        _check_range("Width", wish.width, 1, limits.side_px),
        _check_range("Frames a second", wish.fps, 0.1, 240),
        _check_volume(frames, height, width),
        "" if wish.ratio is None or _RATIO.fullmatch(wish.ratio) else f"Ratio: '{wish.ratio[:20]}'; write 16:9",
        "" if wish.format in (None, *FORMATS) else f"Format: '{str(wish.format)[:20]}'; choose {', '.join(FORMATS)}",
        "" if facts.takes_image or not (wish.head or wish.tail) else "Image: this model takes text alone; remove it",
    ]


def _check_text(name: str, text: str, most: int) -> str:
    return "" if len(text) <= most else f"{name}: has {len(text):,} characters; at most {most:,} are taken"


def _check_range(name: str, value: float | None, least: float, most: float) -> str:
    if value is None or (math.isfinite(value) and least <= value <= most):
        return ""
    if most == _MAX_SEED:
        return f"{name}: choose a whole number from 0 on"
    return f"{name}: {value:,} is out of range; choose {least:,g} to {most:,g}"


def _check_volume(frames: int, height: int, width: int) -> str:
    if frames * height * width <= _MAX_PIXELS:
        return ""
    return f"Size: {frames} frames of {width}x{height} are too much for one request; make it shorter or smaller"


def clean_prompt(text: str) -> str:
    """Without control characters, which no caption has; line breaks and tabs stay."""
    return _CONTROL.sub("", text)


def media_paths(wish: Wish) -> dict[str, Path]:
    found = {"head": wish.head, "tail": wish.tail}
    return {name: Path(value) for name, value in found.items() if value is not None}
