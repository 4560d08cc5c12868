"""Subject tuning: textual inversion of a new word, and DreamBooth with pictures of the subject's class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.builders.data import list_pictures
from frameloom.builders.denoiser import LoadedDenoiser, build_denoiser
from frameloom.builders.objective import build_objective
from frameloom.builders.text import LearntWord, TextPipeline, build_text, read_word, write_word
from frameloom.builders.vae import build_vae
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.training import InversionSection
from frameloom.core.device import pick_device
from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.core.files import digest_value
from frameloom.core.logging import get_logger
from frameloom.core.progress import ProgressBar
from frameloom.core.random import stream
from frameloom.data.media.writing import write_image
from frameloom.models.text.textual_inversion import add_word, clip_encoders, start_vectors
from frameloom.sampling.pipeline import Pipeline, generate
from frameloom.training.task import TrainedPart

_log = get_logger(__name__)


def build_word(
    section: InversionSection,
    denoiser: LoadedDenoiser,
    text: TextPipeline,
    captions: Sequence[str],
    *,
    seed: int,
    device: torch.device,
) -> tuple[nn.ParameterDict, TrainedPart]:
    """Freeze the denoiser and teach the text encoders the word: a parameter for each, which follows from `seed`."""
    if not any(section.placeholder in caption for caption in captions):
        raise ConfigError(
            f"inversion.templates is {section.templates}, but no caption has '{section.placeholder}', so it would "
            "not be learnt; write it into the captions, or choose object, style or face"
        )
    denoiser.model.requires_grad_(False)
    given = _read_start(section) if section.weights else {}
    vectors = nn.ParameterDict()
    for number, (name, encoder) in enumerate(clip_encoders(text.encoders).items()):
        start_VD = given.get(name)
        if start_VD is None:
            draws = stream(seed, "new word", number)
            start_VD = start_vectors(encoder, section.num_vectors, initializer=section.initializer, generator=draws)
        vectors[name] = nn.Parameter(start_VD.to(device, torch.float32))
        add_word(encoder, section.placeholder, vectors[name])
        encoder.learns = True
    base = digest_value([denoiser.digest, text.fingerprint()])
    _log.info("inversion: %d numbers train", sum(part.numel() for part in vectors.values()))

    def state() -> dict[str, Any]:
        return {"placeholder": section.placeholder, "num_vectors": section.num_vectors, "base": base}

    def check(saved: Mapping[str, Any], where: str) -> None:
        for name, value in state().items():
            if saved[name] != value:
                what = "other models" if name == "base" else f"inversion.{name} {saved[name]}"
                raise CheckpointError(
                    f"{where}: was learnt with {what}, the recipe has {value}; put it back, or start a new run with "
                    "--name"
                )

    def export(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        word = LearntWord(section.placeholder, {name: tensors[name] for name in vectors})
        write_word(folder, word, family=denoiser.family.name, base={"sha256": base})

    return vectors, TrainedPart("inversion", lambda: dict(vectors.items()), state(), check, export)


def _read_start(section: InversionSection) -> Mapping[str, Tensor]:
    word = read_word(Path(section.weights or ""))
    found = {len(part) for part in word.vectors.values()}
    if found != {section.num_vectors}:
        raise ConfigError(
            f"inversion.weights: '{section.weights}' has {', '.join(map(str, sorted(found)))} vectors, but "
            f"inversion.num_vectors is {section.num_vectors}; write the same"
        )
    return word.vectors


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
    device, seed = pick_device(recipe.train.device), recipe.seed
    vae = build_vae(recipe.vae, seed=seed).model.to(device).eval()
    text = build_text(recipe.text, recipe.model).to(device)
    denoiser = build_denoiser(recipe.model, latent_channels=vae.latent_channels, text=text, seed=seed)
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
