"""The form of Generate: its fields, taken from `SampleRequest`, and the checks before a model is loaded."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.sampling import SampleRequest, SampleSection
from frameloom.core.errors import ConfigError, DataError
from frameloom.core.files import digest_file
from frameloom.sampling.request import make_request
from frameloom.studio.generate.models import StudioModel
from frameloom.studio.server.context import Limits

# The fields of a request on the form, row by row; "num" is how many samples are made of it.
ROWS = (
    ("prompt",),
    ("negative_prompt",),
    ("image", "last_image"),
    ("seed", "num"),
    ("steps", "guidance", "sampler"),
    ("ratio", "width", "height"),
    ("frames", "fps", "format"),
)
FIELDS = tuple(name for row in ROWS for name in row)
LABELS = {"num": "Samples", "image": "First frame", "last_image": "Last frame", "fps": "Frames per second"}
OUT = "studio/generated"
UPLOADS = "studio/uploads"
FORMATS = ("mp4", "webm", "gif")
OWN_SIZE = "custom"
_MAX_SAMPLES = 16
_MAX_PIXELS = 10**9
_RATIO = re.compile(r"\d{1,4}(\.\d{1,4})?:\d{1,4}(\.\d{1,4})?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def label_of(name: str) -> str:
    return LABELS.get(name, name.replace("_", " ").capitalize())


def bounds_of(limits: Limits) -> dict[str, tuple[float, float]]:
    """The smallest and largest number of each field."""
    return {
        "seed": (0, 2**62),
        "num": (1, _MAX_SAMPLES),
        "steps": (1, limits.steps),
        "guidance": (0, 100),
        "frames": (1, limits.frames),
        "height": (1, limits.side_px),
        "width": (1, limits.side_px),
        "fps": (0.1, 240),
    }


def read_form(values: Mapping[str, Any], model: StudioModel) -> dict[str, Any]:
    """The fields that the form sets: what it leaves empty, or leaves as the model has it, is not said."""
    found = dict(values)
    for name in ("prompt", "negative_prompt"):
        # No caption has control characters; line breaks and tabs stay.
        found[name] = _CONTROL.sub("", found.get(name) or "")
    if found.get("ratio") in (None, "", OWN_SIZE):
        found["ratio"] = None
    else:
        found["width"] = found["height"] = None
    hidden: tuple[str, ...] = () if model.makes_clips else ("frames", "fps", "format")
    hidden += () if model.takes_image else ("image", "last_image")
    if found.get("sampler") not in model.samplers:
        hidden += ("sampler",)
    own = dict(model.settings)
    given = {name: value for name, value in found.items() if value is not None and name not in hidden}
    if (given.get("height"), given.get("width")) == (own["height"], own["width"]):
        given = {name: value for name, value in given.items() if name not in ("height", "width")}
    sides = ("height", "width")
    return {name: value for name, value in given.items() if name in sides or name not in own or own[name] != value}


def check_values(values: Mapping[str, Any], model: StudioModel, limits: Limits) -> SampleRequest:
    """The request of a form; ConfigError lists everything that is wrong. The model itself is not opened."""
    problems = _find_problems(values, model, limits)
    if problems:
        raise ConfigError(problems)
    request = make_request({name: value for name, value in values.items() if name != "num"}, where="Form")
    # The recipe's own rules: numbers of frames and sizes that the model can make, samplers that it knows.
    settings = request.model_dump(mode="json", exclude_unset=True, include=set(SampleSection.model_fields))
    words = [f"--sample.{name}={value}" for name, value in settings.items() if name != "negative_prompt"]
    load_recipe(model.recipe, words)
    return request


def _find_problems(values: Mapping[str, Any], model: StudioModel, limits: Limits) -> list[str]:
    problems = [] if str(values.get("prompt", "")).strip() else ["Prompt: is empty; say what to show"]
    for name in ("prompt", "negative_prompt"):
        if (length := len(values.get(name, ""))) > limits.prompt_chars:
            problems.append(f"{label_of(name)}: has {length:,} characters; at most {limits.prompt_chars:,} are allowed")
    for name, (least, most) in bounds_of(limits).items():
        value = values.get(name)
        if value is None or (math.isfinite(value) and least <= value <= most):
            continue
        if name == "seed":
            problems.append("Seed: choose a whole number from 0 on")
        else:
            problems.append(f"{label_of(name)}: {value:,} is out of range; choose {least:,g} to {most:,g}")
    frames, height, width = (
        values.get(name) or getattr(model.settings, name) for name in ("frames", "height", "width")
    )
    if frames * height * width > _MAX_PIXELS:
        problems.append(
            f"Size: {frames} frames of {width}x{height} are too much for one request; make it shorter or smaller"
        )
    ratio, form = values.get("ratio"), values.get("format")
    if ratio is not None and not _RATIO.fullmatch(ratio):
        problems.append(f"Ratio: '{ratio[:20]}'; write 16:9")
    if form not in (None, *FORMATS):
        problems.append(f"Format: '{str(form)[:20]}'; choose {', '.join(FORMATS)}")
    if not model.takes_image and (values.get("image") or values.get("last_image")):
        problems.append("Image: this model takes text alone; remove it")
    return problems


def format_command(model: str, request: SampleRequest, num: int) -> str:
    """The same as a command, to be typed in the studio's folder."""
    given = request.model_dump(mode="json", exclude_unset=True)
    words = []
    if "width" in given:
        words = ["--size", f"{given.pop('width')}x{given.pop('height')}"]
    for name, value in {**given, "num": num, "out": OUT}.items():
        if value is not None and (name, value) != ("num", 1):
            words += [f"--{name.replace('negative_prompt', 'negative').replace('_', '-')}", str(value)]
    return shlex.join(["frameloom", "sample", model, *words])


def keep_upload(path: Path, root: Path, *, max_bytes: int) -> str:
    """Decode a picture that was sent, and keep it as a png named by its content; gives its path from `root`."""
    from frameloom.data.media.decode import IMAGE_FORMATS, DecodeLimits, probe_image, read_image
    from frameloom.data.media.writing import write_image

    if path.suffix.lower() not in IMAGE_FORMATS:
        raise DataError(f"Image: {path.suffix or 'no suffix'} is not supported; send {', '.join(IMAGE_FORMATS)}")
    if path.stat().st_size > max_bytes:
        raise DataError(f"Image: {path.stat().st_size:,} bytes; at most {max_bytes:,} are allowed")
    limits = DecodeLimits(max_pixels=8192 * 8192)
    facts = probe_image(path, limits=limits)
    pixels_CFHW = read_image(path, height=facts.height, width=facts.width, limits=limits)
    folder = root / UPLOADS
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".upload-{uuid4().hex}.png"
    try:
        write_image(temporary, pixels_CFHW[:, 0].permute(1, 2, 0).contiguous().numpy())
        name = f"{digest_file(temporary)[:24]}.png"
        temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    return f"{UPLOADS}/{name}"
