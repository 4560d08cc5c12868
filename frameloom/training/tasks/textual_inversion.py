"""Textual inversion: the vectors of one new word learn through frozen text encoders and a frozen denoiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frameloom.builders.text import LearntWord, read_word, write_word
from frameloom.config.schema.subject_tuning import InversionSection
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.files import digest_value
from frameloom.core.logging import get_logger
from frameloom.core.random import stream
from frameloom.models.fit import check_fit
from frameloom.models.text.new_words import add_word, clip_encoders, start_vectors
from frameloom.training.tasks.denoiser import DenoiserTask, WrappedTask

__all__ = ["Inversion", "InversionTask", "build_inversion"]


_log = get_logger(__name__)


@dataclass(frozen=True)
class InversionTask(WrappedTask):
    """What trains are the vectors, a parameter for each text encoder."""

    words: nn.ParameterDict

    @property
    def model(self) -> nn.Module:
        return self.words


@dataclass(frozen=True)
class Inversion:
    """What a run of textual inversion saves and exports instead of the model. `base` digests what it is learnt with."""

    task: InversionTask
    placeholder: str
    num_vectors: int
    base: str

    key: ClassVar[str] = "inversion"
    """where a checkpoint keeps `state`"""

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.task.words.items())

    def state(self) -> dict[str, Any]:
        return {"placeholder": self.placeholder, "num_vectors": self.num_vectors, "base": self.base}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, where: str) -> None:
        """Take up the vectors of a checkpoint; refuse those of another word or of other models."""
        for name, value in self.state().items():
            if state[name] != value:
                what = "other models" if name == "base" else f"inversion.{name} {state[name]}"
                raise CheckpointError(
                    f"{where}: was learnt with {what}, the recipe has {value}; put it back, or start a new run with "
                    "--name"
                )
        own = self.tensors()
        check_fit(own, tensors, where=where)
        for name, parameter in own.items():
            parameter.copy_(tensors[name])

    def export(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        word = LearntWord(self.placeholder, {name: tensors[name] for name in self.task.words})
        write_word(folder, word, family=self.task.inner.denoiser.family.name, base={"sha256": self.base})


def build_inversion(
    section: InversionSection, task: DenoiserTask, captions: Sequence[str], *, seed: int, device: torch.device
) -> Inversion:
    """Freeze the denoiser and teach the text encoders the word; fresh vectors follow from `seed`."""
    if not any(section.placeholder in caption for caption in captions):
        raise ConfigError(
            f"inversion.templates is {section.templates}, but no caption has '{section.placeholder}', so it would "
            "not be learnt; write it into the captions, or choose object, style or face"
        )
    task.denoiser.model.requires_grad_(False)
    given = _read_start(section) if section.weights else {}
    words = nn.ParameterDict()
    for number, (name, encoder) in enumerate(clip_encoders(task.text.encoders).items()):
        vectors_VD = given.get(name)
        if vectors_VD is None:
            draws = stream(seed, "new word", number)
            vectors_VD = start_vectors(encoder, section.num_vectors, initializer=section.initializer, generator=draws)
        words[name] = nn.Parameter(vectors_VD.to(device, torch.float32))
        add_word(encoder, section.placeholder, words[name])
        encoder.learns = True
    base = base_digest(task)
    _log.info("inversion: %d numbers train", sum(part.numel() for part in words.values()))
    return Inversion(InversionTask(task, words), section.placeholder, section.num_vectors, base)


def base_digest(task: DenoiserTask) -> str:
    """Of the denoiser's and the encoders' first weights."""
    return digest_value([task.denoiser.digest, task.text.fingerprint()])


def _read_start(section: InversionSection) -> Mapping[str, Tensor]:
    word = read_word(Path(section.weights or ""))
    found = {len(part) for part in word.vectors.values()}
    if found != {section.num_vectors}:
        raise ConfigError(
            f"inversion.weights: '{section.weights}' has {', '.join(map(str, sorted(found)))} vectors, but "
            f"inversion.num_vectors is {section.num_vectors}; write the same"
        )
    return word.vectors
