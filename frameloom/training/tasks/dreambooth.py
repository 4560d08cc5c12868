"""DreamBooth: one thing is learnt from a few pictures, while pictures of others of its kind keep the model's prior.

The loss of a sample is L(instance) + weight * L(class). Noise and noise levels of the two are drawn apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from frameloom.builders.data import list_pictures
from frameloom.builders.denoiser import build_denoiser
from frameloom.builders.objective import build_objective
from frameloom.builders.text import build_text
from frameloom.builders.vae import build_vae
from frameloom.config.schema.recipe import Recipe
from frameloom.core.device import pick_device
from frameloom.core.errors import DataError
from frameloom.core.logging import get_logger
from frameloom.core.progress import ProgressBar
from frameloom.data.loading.batch import Batch
from frameloom.data.media.writing import write_image
from frameloom.sampling.pipeline import Request, Sampler, generate
from frameloom.training.tasks.denoiser import WrappedTask

__all__ = ["PriorTask", "make_class_images"]


_log = get_logger(__name__)


@dataclass(frozen=True)
class PriorTask(WrappedTask):
    """For batches whose second half are pictures of the class (see `PairedReader`)."""

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
    sampler = _base_sampler(recipe)
    seeds = [seed for seed in range(section.num_class_images) if not _picture(folder, seed).exists()][:missing]
    with ProgressBar("class pictures", missing) as bar:
        for seed in seeds:
            (result,) = generate(sampler, [Request(section.class_prompt, seed)])
            about = {"prompt": section.class_prompt, "seed": str(seed), **sampler.origin}
            write_image(_picture(folder, seed), result.frames_FHWC[0], metadata=about)
            bar.advance()
    if len(list_pictures(folder)) < section.num_class_images:
        raise DataError(f"{folder}: still holds fewer than {section.num_class_images} pictures; choose another folder")
    return missing


def _picture(folder: Path, seed: int) -> Path:
    return folder / f"class-{seed:05d}.png"


def _base_sampler(recipe: Recipe) -> Sampler:
    device = pick_device(recipe.train.device)
    vae = build_vae(recipe.vae, seed=recipe.seed).model.to(device).eval()
    text = build_text(recipe.text, recipe.model).to(device)
    denoiser = build_denoiser(recipe.model, latent_channels=vae.latent_channels, text=text, seed=recipe.seed)
    denoiser.model.to(device).eval()
    return Sampler(
        denoiser=denoiser,
        vae=vae,
        text=text,
        scaling=None,
        objective=build_objective(recipe.objective),
        settings=recipe.sample.model_copy(update={"frames": 1, "lora": None, "lora_scale": 1.0}),
        origin={"made_for": recipe.name},
        device=device,
    )
