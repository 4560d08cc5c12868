"""Lengths, number formats and the loop's other keys: mistakes are told before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.training import is_due, memory_bytes
from frameloom.core.errors import ConfigError

MISTAKES = {
    "two lengths": (["--train.epochs", "3"], "train.epochs is 3, and train.steps is 100 too"),
    "no length": (["--train.steps", "null"], "train needs the key 'steps'"),
    "no epochs": (["--train.steps", "null", "--train.epochs", "0"], "whole number of at least 1"),
    "epochs misspelt": (["--train.save_every", "2 epocs"], "or of epochs: 500, 1 epoch, 2 epochs"),
    "no interval": (["--train.save_every", "0 epochs"], "train.save_every is '0 epochs'"),
    "window of a static scale": (
        ["--train.loss_scale", "{mode: static, window: 10}"],
        "train.loss_scale.window is 10, but a static scale does not change",
    ),
    "a minimum above the start": (["--train.loss_scale", "{initial: 8, minimum: 16}"], "above the first scale 8"),
    "a factor that does nothing": (["--train.loss_scale", "{factor: 1}"], "train.loss_scale.factor is 1"),
    "half weights in full precision": (["--train.weights_precision", "bf16"], "but train.precision is fp32"),
    "two halves": (
        ["--train.weights_precision", "bf16", "--train.precision", "fp16"],
        "weights are fp32, or of the same format",
    ),
    "norms of a full autoencoder": (["--vae.fp32_norms", "true"], "vae.precision is fp32, so all of it is"),
    "a frozen autoencoder that trains": (
        ["--task", "autoencoder", "--vae.precision", "bf16", "--vae.weights", "null"],
        "task autoencoder trains the autoencoder itself",
    ),
    "profile after the end": (["--train.profile", "{start: 99}"], "records steps 99 to 101, but the run has only"),
    "profile without end": (["--train.profile", "{steps: 1000}"], "train.profile.steps is 1000"),
    "a rate without training": (["--text.encoders.0.lr", "1e-5"], "but the encoder does not train"),
    "minilm trains": (["--text.encoders.0.train", "true"], "minilm is always frozen"),
    "t5 in bf16": (
        ["--text.encoders", "[{name: t5, path: ., train: true}]"],
        "its precision is left to the encoder, which is bf16",
    ),
    "trained and cached": (
        ["--text.encoders", "[{name: clip_l, path: ., train: true}]", "--data.cache.text", "cache"],
        "data.cache.text holds captions as they were encoded once",
    ),
    "trained beside adapters": (
        ["--text.encoders", "[{name: clip_l, path: ., train: true}]", "--lora", "{}"],
        "with lora only the adapters train",
    ),
    "more than the device": (["--train.max_device_memory", "1.5"], "0.9, 30GB, 800MB"),
    "memory in words": (["--train.max_device_memory", "30 gigabytes"], "0.9, 30GB, 800MB"),
}
RIGHT = {
    "epochs": ["--train.steps", "null", "--train.epochs", "3", "--train.save_every", "1 epoch"],
    "fp16": ["--train.precision", "fp16", "--train.loss_scale", "{initial: 1024, mode: static}"],
    "scaled bf16": ["--train.precision", "bf16", "--train.loss_scale", "{window: 100, minimum: 0.5}"],
    "half weights": ["--train.precision", "bf16", "--train.weights_precision", "bf16"],
    "half autoencoder": ["--vae.precision", "fp16", "--vae.fp32_norms", "true"],
    "profile": ["--train.profile", "{start: 98}", "--train.deterministic", "true"],
    "a trained text encoder": ["--text.encoders", "[{name: clip_l, path: ., train: true, lr: 1e-6}]"],
    "memory": ["--train.max_device_memory", "30GB"],
    "share of memory": ["--train.max_device_memory", "0.5"],
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_refused_with_the_way_out(recipe_file: Path, case: str) -> None:
    overrides, message = MISTAKES[case]
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file, overrides)
    assert message in str(caught.value) and len(caught.value.problems) == 1


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_is_taken(recipe_file: Path, case: str) -> None:
    load_recipe(recipe_file, RIGHT[case])


def test_an_interval_counts_steps_or_ends_of_epochs() -> None:
    assert [step for step in range(1, 10) if is_due(4, step=step, epoch=0, position=step)] == [4, 8]
    # Five steps an epoch: the step that ends one leaves the run at position 0 of the next.
    ends = [(step, step // 5, step % 5) for step in range(1, 21)]
    due = [step for step, epoch, position in ends if is_due("2 epochs", step=step, epoch=epoch, position=position)]
    assert due == [10, 20]
    assert is_due("1 epoch", step=5, epoch=1, position=0) and not is_due("1 epoch", step=6, epoch=1, position=1)


def test_amounts_of_memory_are_read() -> None:
    assert memory_bytes("30GB") == 30 * 2**30 and memory_bytes("1.5 GB") == 3 * 2**29 and memory_bytes("8MB") == 2**23
