"""Rules between the keys of the autoencoder's losses, told before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.rules.check import check_files
from frameloom.core.errors import ConfigError

RECIPE = """\
name: tiny
task: autoencoder
data:
  manifest: clips.parquet
  buckets:
    64px: {9: [1.0, 4]}
train:
  steps: 100
"""
JUDGED = "autoencoder: {discriminator: {}}\n"
RIGHT = {
    "a discriminator": JUDGED,
    "both at each step": "autoencoder: {discriminator: {update: both, lr: 1e-4}}\ntrain: {steps: 9, ema: {every: 2}}\n",
    "an average of odd steps": f"{JUDGED}train: {{steps: 9, ema: {{every: 3}}}}\n",
    "no average": f"{JUDGED}train: {{steps: 9, ema: null}}\n",
    "perceptual distance": "autoencoder: {lpips: {weights: vgg.safetensors, weight: 0.1}}\n",
    "decoder alone": "autoencoder: {train_only: decoder, discriminator: {}}\n",
    "encoder alone": "autoencoder: {train_only: encoder, discriminator: {adaptive: false}}\n",
    "an image autoencoder": "vae: {name: causal, weights: sd.safetensors, inflate: true}\n",
}
WRONG = {
    "no weights of LPIPS": ("autoencoder: {lpips: {}}\n", "autoencoder.lpips.weights is null", "frameloom convert"),
    "frozen last layer": (
        "autoencoder: {train_only: encoder, discriminator: {}}\n",
        "autoencoder.discriminator.adaptive is true, but it compares gradients",
        "set it to false",
    ),
    "an average of even steps": (
        f"{JUDGED}train: {{steps: 9, ema: {{every: 4}}}}\n",
        "train.ema.every is 4",
        "write 3 or 5",
    ),
    "inflation of another kind": (
        "vae: {name: wfvae, weights: sd.safetensors, inflate: true}\n",
        "wfvae cannot start from an image autoencoder",
        "choose vae.name causal",
    ),
    "inflation of nothing": ("vae: {name: causal, inflate: true}\n", "vae.weights is null", "name the weights"),
    "slices of a batch that trains": ("vae: {mini_batch: 2}\n", "vae.mini_batch is 2", "train.accumulate"),
    "a spelling": ("autoencoder: {discriminator: {updates: both}}\n", "'updates'", "update"),
    "a dropout of all": ("autoencoder: {discriminator: {dropout: 1}}\n", "autoencoder.discriminator.dropout is 1"),
    "a weight below 0": ("autoencoder: {lpips: {weights: a, weight: -1}}\n", "autoencoder.lpips.weight is -1"),
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT.keys())
def test_what_is_right_passes(write: Callable[[str, str], Path], text: str) -> None:
    load_recipe(join(write, text))


@pytest.mark.parametrize(("text", "fragments"), [(text, rest) for text, *rest in WRONG.values()], ids=WRONG.keys())
def test_mistakes_are_told_with_the_way_out(write: Callable[[str, str], Path], text: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(join(write, text))
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


def test_weights_of_the_judges_must_be_there(write: Callable[[str, str], Path], monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("clips.parquet", "lpips_vgg.safetensors"):
        write(name, "")
    text = "autoencoder: {lpips: {weights: lpips_vg.safetensors}, discriminator: {weights: d.safetensors}}\n"
    with pytest.raises(ConfigError) as caught:
        check_files(load_recipe(join(write, text)))
    assert "autoencoder.lpips.weights is 'lpips_vg.safetensors', which does not exist" in str(caught.value)
    assert "did you mean 'lpips_vgg.safetensors'?" in str(caught.value)
    assert "autoencoder.discriminator.weights is 'd.safetensors'" in str(caught.value)
    check_files(load_recipe(join(write, "autoencoder: {lpips: {weights: lpips_vgg.safetensors}}\n")))


def join(write: Callable[[str, str], Path], text: str) -> Path:
    """The recipe with sections added or replaced."""
    own = [line.split(":")[0] for line in text.splitlines()]
    kept = RECIPE.split("train:\n")[0] if "train" in own else RECIPE
    return write("my.yaml", kept + text)
