"""Subject tuning: textual inversion of a new word, and DreamBooth with pictures of the subject's class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frameloom.builders.data import list_pictures
from frameloom.builders.denoiser import build_denoiser
from frameloom.builders.objective import build_objective
from frameloom.builders.text import LearntWord, build_text, read_word, write_word
from frameloom.builders.vae import build_vae
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.training import InversionSection
from frameloom.core.device import pick_device
from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.core.files import digest_value
from frameloom.core.logging import get_logger
from frameloom.core.progress import ProgressBar
from frameloom.core.random import stream
from frameloom.data.loading.batch import Batch
from frameloom.data.media.writing import write_image
from frameloom.models.state_dict import check_fit
from frameloom.models.text.textual_inversion import add_word, clip_encoders, start_vectors
from frameloom.sampling.pipeline import Pipeline, generate
from frameloom.training.tasks.denoiser import DenoiserTask, WrappedTask

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


@dataclass(frozen=True)
class PriorTask(WrappedTask):
    """For batches whose second half are pictures of the class (`class_rows` of `BatchReader`).

    The loss of a sample is L(instance) + weight * L(class). Noise and noise levels of the two are drawn apart.
    """

    weight: float

    def losses(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        losses_B, _ = self.inner.losses(batch)
        instance_B, class_B = losses_B.chunk(2)
        return instance_B + self.weight * class_B, {"instance_loss": instance_B, "class_loss": class_B}

    def count_tokens(self, batch: Batch) -> int:
        return 2 * self.inner.count_tokens(batch)


def make_class_images(recipe: Recipe) -> int:
    """Fill the class folder up with samples of the model as it is before training; gives how many were made.

    Seeds and names count up, so a second call goes on where a first was stopped. Settings are those of `sample`.
    """
    section = recipe.dreambooth
    if section is None or section.class_folder is None or section.class_prompt is None:
        return 0
    folder = Path(section.class_folder)
    missing = section.num_class_images - len(list_pictures(folder))
    if missing <= 0:
        return 0
    _log.info("%s: %d of %d pictures are missing and are made now", folder, missing, section.num_class_images)
    folder.mkdir(parents=True, exist_ok=True)
    pipeline = _base_pipeline(recipe)
    seeds = [seed for seed in range(section.num_class_images) if not _picture(folder, seed).exists()][:missing]
    with ProgressBar("class pictures", missing) as bar:
        for seed in seeds:
            (sample,) = generate(pipeline, [pipeline.request(section.class_prompt, seed)])
            about = {"prompt": section.class_prompt, "seed": str(seed), **pipeline.origin}
            write_image(_picture(folder, seed), sample.frames[0], metadata=about)
            bar.advance()
    if len(list_pictures(folder)) < section.num_class_images:
        raise DataError(f"{folder}: still holds fewer than {section.num_class_images} pictures; choose another folder")
    return missing


def _picture(folder: Path, seed: int) -> Path:
    return folder / f"class-{seed:05d}.png"


def _base_pipeline(recipe: Recipe) -> Pipeline:
    device = pick_device(recipe.train.device)
    vae = build_vae(recipe.vae, seed=recipe.seed).model.to(device).eval()
    text = build_text(recipe.text, recipe.model).to(device)
    denoiser = build_denoiser(recipe.model, latent_channels=vae.latent_channels, text=text, seed=recipe.seed)
    denoiser.model.to(device).eval()
    return Pipeline(
        denoiser=denoiser,
        vae=vae,
        text=text,
        scaling=None,
        objective=build_objective(recipe.objective),
        settings=recipe.sample.model_copy(update={"frames": 1, "lora": None, "lora_scale": 1.0}),
        origin={"made_for": recipe.name},
        device=device,
    )
