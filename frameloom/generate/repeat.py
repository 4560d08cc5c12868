"""A file that says how it was made, as a request to make it again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from frameloom.config.sampling_settings import SampleSection
from frameloom.core.errors import CheckpointError, DataError
from frameloom.core.files import digest_file
from frameloom.generate.load import Source
from frameloom.generate.outputs import MEDIA, read_about
from frameloom.generate.pipeline import Request, Sampler

_PREFIX = "sample."
# Equal in both, or the result would be another one.
_IDENTITY = ("recipe", "weights")


@dataclass(frozen=True)
class Repeat:
    """What a file was made from; `check` refuses a model that is not the same."""

    file: Path
    source: Source
    request: Request
    about: dict[str, str]

    def check(self, sampler: Sampler) -> None:
        different = [name for name in _IDENTITY if self.about.get(name) != sampler.origin.get(name)]
        if different:
            raise CheckpointError(
                f"{self.file}: was made with another model: {' and '.join(different)} of {self.source.path} are not "
                "the same any more; name the model that it was made with, or sample with its prompt and seed"
            )


def read_repeat(file: Path, *, model: Path | None = None) -> Repeat:
    """The request and the model of a file; `model` is where the model lies now, if it was moved."""
    about = read_about(file)
    settings = _read_settings(file, about)
    if "model" not in about and model is None:
        raise DataError(f"{file}: does not say its model; name the run in front: frameloom sample RUN --like {file}")
    try:
        overrides = json.loads(about.get("overrides", "[]"))
        seed, step = int(about["seed"]), about.get("step")
        source = Source(
            model or Path(about["model"]),
            (*overrides, *_of_model(settings)),
            step=None if step is None else int(step),
            family=about.get("family"),
            recipe=about.get("recipe_name"),
        )
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: says how it was made in a form that is not known ({error})") from error
    media: dict[str, Any] = {name: Path(about[name]) for name in MEDIA if name in about}
    for name, path in media.items():
        if not path.is_file() or digest_file(path) != about.get(f"{name}.sha256"):
            raise DataError(
                f"{file}: was made with {path} as its {name}, which is not there or has changed; bring it back"
            )
    request = Request(about["prompt"], seed, **media, settings=settings, name=about.get("name"))
    return Repeat(file, source, request, about)


def _read_settings(file: Path, about: dict[str, str]) -> SampleSection:
    """Settings that the file does not have, because it is older than them, have their defaults."""
    found = {}
    for name, field in SampleSection.model_fields.items():
        text = about.get(_PREFIX + name)
        if text is not None:
            is_text = isinstance(field.default, str) or (field.default is None and not _is_json(text))
            found[name] = text if is_text else json.loads(text)
    try:
        return SampleSection.model_validate(found)
    except ValidationError as error:
        raise DataError(f"{file}: its settings are not known here ({error.errors()[0]['msg']})") from error


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _of_model(settings: SampleSection) -> list[str]:
    """Settings that a model is loaded with."""
    words = []
    for name in ("weights", "lora_scale", "lora_merge", "precision", "tile_px", "offload"):
        value = getattr(settings, name)
        words += [f"--sample.{name}", value if isinstance(value, str) else json.dumps(value)]
    if settings.lora is not None:
        loras = settings.lora
        text = loras if isinstance(loras, str) else json.dumps([one.model_dump() for one in loras])
        words += ["--sample.lora", text]
    return words
