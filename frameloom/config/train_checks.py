"""Rules of the loop's keys and of number formats: each yields every mistake that it finds."""

from __future__ import annotations

from collections.abc import Iterator

from frameloom.config.problems import Problem
from frameloom.config.schema import Recipe
from frameloom.config.train_settings import LossScaleSection
from frameloom.config.yaml_values import KeyPath, format_value


def check_train(recipe: Recipe) -> Iterator[Problem]:
    yield from _check_length(recipe)
    yield from _check_loss_scale(recipe)
    yield from _check_precision(recipe)
    yield from _check_profile(recipe)
    yield from _check_trained_text(recipe)


def _check_length(recipe: Recipe) -> Iterator[Problem]:
    steps, epochs = recipe.train.steps, recipe.train.epochs
    if steps is None and epochs is None:
        text = "train needs the key 'steps': optimizer steps of the whole run; or 'epochs': passes over the data"
        yield Problem(("train",), f"{text}; e.g. steps: 1000")
    elif steps is not None and epochs is not None:
        text = f"train.epochs is {epochs}, and train.steps is {steps} too; a run has one length"
        yield Problem(("train", "epochs"), f"{text}: remove one of them, or write null", (("train", "steps"),))


def _check_loss_scale(recipe: Recipe) -> Iterator[Problem]:
    scale = recipe.train.loss_scale
    if scale is None:
        return
    path: KeyPath = ("train", "loss_scale")
    if scale.mode == "static":
        for name in ("factor", "window", "minimum"):
            value = getattr(scale, name)
            if value != LossScaleSection.model_fields[name].default:
                text = f"train.loss_scale.{name} is {format_value(value)}, but a static scale does not change"
                yield Problem((*path, name), f"{text}; remove it, or set mode: dynamic", ((*path, "mode"),))
    elif scale.minimum > scale.initial:
        text = f"train.loss_scale.minimum is {format_value(scale.minimum)}, above the first scale"
        yield Problem(
            (*path, "minimum"), f"{text} {format_value(scale.initial)}; make it smaller", ((*path, "initial"),)
        )


def _check_precision(recipe: Recipe) -> Iterator[Problem]:
    """What each part of a run can be computed in."""
    train, also = recipe.train, (("train", "precision"),)
    if train.weights_precision not in ("fp32", train.precision):
        text = f"train.weights_precision is {train.weights_precision}, but train.precision is {train.precision}"
        yield Problem(("train", "weights_precision"), f"{text}; weights are fp32, or of the same format", also)
    if recipe.task == "autoencoder":
        for path, value in (
            (("train", "weights_precision"), train.weights_precision),
            (("vae", "precision"), recipe.vae.precision),
        ):
            if value != "fp32":
                text = f"{'.'.join(path)} is {value}, but task autoencoder trains the autoencoder itself"
                yield Problem(path, f"{text}, with weights in fp32; use train.precision", (("task",),))
    if recipe.vae.fp32_norms and recipe.vae.precision == "fp32":
        text = "vae.fp32_norms is true, but vae.precision is fp32, so all of it is"
        yield Problem(("vae", "fp32_norms"), f"{text}; remove it, or set vae.precision", (("vae", "precision"),))


def _check_profile(recipe: Recipe) -> Iterator[Problem]:
    profile, steps = recipe.train.profile, recipe.train.steps
    if profile is not None and steps is not None and profile.start + profile.steps - 1 > steps:
        text = f"train.profile records steps {profile.start} to {profile.start + profile.steps - 1}"
        yield Problem(
            ("train", "profile"),
            f"{text}, but the run has only train.steps {steps}; start earlier",
            (("train", "steps"),),
        )


def _check_trained_text(recipe: Recipe) -> Iterator[Problem]:
    """An encoder that trains has other states at every step, so nothing that is computed once can stand for them."""
    trained = [index for index, encoder in enumerate(recipe.text.encoders) if encoder.train]
    for index, encoder in enumerate(recipe.text.encoders):
        path: KeyPath = ("text", "encoders", str(index))
        if encoder.lr is not None and not encoder.train:
            text = f"text.encoders.{index}.lr is {format_value(encoder.lr)}, but the encoder does not train"
            yield Problem((*path, "lr"), f"{text}; remove it, or set train: true")
        if encoder.train and encoder.name == "minilm":
            yield Problem(
                (*path, "train"), f"text.encoders.{index}.train is true, but minilm is always frozen; remove it"
            )
        elif encoder.train and encoder.precision not in (("fp32", None) if "clip" in encoder.name else ("fp32",)):
            found = f"is {encoder.precision}" if encoder.precision else "is left to the encoder, which is bf16"
            text = f"text.encoders.{index}.train is true, but its precision {found}"
            yield Problem((*path, "precision"), f"{text}; an encoder trains in fp32: write that")
    reasons: tuple[tuple[KeyPath, object, str], ...] = (
        (("task",), recipe.task != "denoiser", "task is not denoiser"),
        (("text", "rescale"), recipe.text.rescale, "text.rescale is true, which is measured once"),
        (("data", "cache", "text"), recipe.data.cache.text, "data.cache.text holds captions as they were encoded once"),
        (("data", "cache", "foreign"), recipe.data.cache.foreign, "data.cache.foreign brings encoded captions"),
        (("lora",), recipe.lora, "with lora only the adapters train"),
        (("inversion",), recipe.inversion, "with inversion only a word is learnt"),
        (("train", "park_encoders"), recipe.train.park_encoders, "train.park_encoders sends it away between steps"),
    )
    for path, is_wrong, reason in reasons if trained else ():
        if is_wrong:
            text = f"text.encoders.{trained[0]}.train is true, but {reason}"
            yield Problem(path, f"{text}; remove one of them", (("text", "encoders", str(trained[0]), "train"),))
