"""Rules of the autoencoder's section that span several keys."""

from __future__ import annotations

from collections.abc import Iterator

from frameloom.config.problems import Problem
from frameloom.config.schema import Recipe
from frameloom.config.yaml_values import KeyPath
from frameloom.models.registry import VAES

_SECTION = ("autoencoder",)


def check_autoencoder(recipe: Recipe) -> Iterator[Problem]:
    yield from _check_start(recipe)
    if recipe.task != "autoencoder":
        return
    yield from _check_losses(recipe)
    if recipe.vae.mini_batch is not None:
        text = f"vae.mini_batch is {recipe.vae.mini_batch}, but task autoencoder trains on whole micro-batches"
        advice = "remove it, and write smaller batches in data with train.accumulate"
        yield Problem(("vae", "mini_batch"), f"{text}; {advice}", (("task",),))


def _check_start(recipe: Recipe) -> Iterator[Problem]:
    """An image autoencoder as the start of a video one."""
    vae, path = recipe.vae, ("vae", "inflate")
    if not vae.inflate:
        return
    inflating = [name for name, spec in VAES.items() if spec.can_inflate]
    if vae.name not in inflating:
        text = f"vae.inflate is true, but {vae.name} cannot start from an image autoencoder"
        yield Problem(path, f"{text}; choose vae.name {' or '.join(inflating)}, or remove it", (("vae", "name"),))
    if vae.weights is None:
        text = "vae.inflate is true, but vae.weights is null; name the weights of the image autoencoder"
        yield Problem(path, text, (("vae", "weights"),))


def _check_losses(recipe: Recipe) -> Iterator[Problem]:
    section = recipe.autoencoder
    if section.lpips is not None and section.lpips.weights is None:
        text = "autoencoder.lpips.weights is null, but LPIPS needs the weights of VGG16 with the published linear heads"
        advice = (
            "name their .safetensors file (frameloom convert makes one of a pickle), or set autoencoder.lpips: null"
        )
        yield Problem((*_SECTION, "lpips"), f"{text}; {advice}")
    judge = section.discriminator
    if judge is None:
        return
    path: KeyPath = (*_SECTION, "discriminator")
    if judge.adaptive and section.train_only == "encoder":
        text = "autoencoder.discriminator.adaptive compares gradients at the decoder's last layer, which does not train"
        advice = "set it to false, with a weight of your choice"
        yield Problem((*path, "adaptive"), f"{text}; {advice}", ((*_SECTION, "train_only"),))
    every = recipe.train.ema.every if recipe.train.ema else 1
    if judge.turns == "alternate" and every % 2 == 0:
        text = f"train.ema.every is {every}, but only odd steps train the autoencoder, so it would never be averaged"
        advice = f"write {every - 1} or {every + 1}, or autoencoder.discriminator.turns: both"
        yield Problem(("train", "ema", "every"), f"{text}; {advice}", ((*path, "turns"),))
