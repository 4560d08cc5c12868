import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

from frameloom.models.vaes.base import Moments
from frameloom.models.vaes.losses import kl_divergence, reconstruction_nll, wavelet_loss

GOLDEN = Path(__file__).parents[2] / "goldens" / "open-sora-plan" / "vae_gan_losses.safetensors"
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def golden():
    with safe_open(GOLDEN, framework="pt") as file:
        runs = {run["name"]: run for run in json.loads(file.metadata()["config"])["run"]}
    return load_file(GOLDEN), runs


def reconstruct(tensors, last_layer):
    return F.conv3d(tensors["in.features"], last_layer, padding=(0, 1, 1))


@pytest.mark.parametrize("name", ["gen", "gen_l2_weights"])
def test_nll_equals_the_published_one(golden, name):
    tensors, runs = golden
    kwargs = runs[name]["kwargs"]
    result = reconstruct(tensors, tensors["in.last_layer"])
    ours = reconstruction_nll(tensors["in.inputs"], result, logvar=kwargs["logvar_init"], kind=kwargs["loss_type"])
    expected = tensors[f"out.{name}.log.train/nll_loss"]
    assert torch.allclose(ours, expected, rtol=RELATIVE, atol=0)
    other = reconstruction_nll(tensors["in.inputs"], result, kind=kwargs["loss_type"])
    assert not torch.allclose(other, expected, rtol=RELATIVE, atol=0)


def test_kl_equals_the_published_one(golden):
    tensors, _ = golden
    moments = Moments.from_raw(tensors["in.moments"])
    assert torch.allclose(moments.kl_B(), tensors["out.kl_elementwise"].sum(1), rtol=RELATIVE)
    assert torch.allclose(kl_divergence(moments), tensors["out.gen.log.train/kl_loss"], rtol=RELATIVE)
    other = Moments.from_raw(tensors["in.moments_other"])
    assert not torch.allclose(kl_divergence(other), tensors["out.gen.log.train/kl_loss"], rtol=RELATIVE)


def test_log_variance_is_clamped_like_the_published_one(golden):
    tensors, _ = golden
    raw = tensors["in.moments_clamp"]
    moments = Moments.from_raw(raw)
    assert torch.equal(moments.logvar_BCFHW, tensors["out.clamp.logvar"])
    assert not torch.equal(moments.logvar_BCFHW, raw.chunk(2, dim=1)[1])
    assert torch.allclose(moments.kl_B(), tensors["out.clamp.kl"].sum(1), rtol=RELATIVE)


def test_sample_and_mode_use_the_published_deviation(golden):
    tensors, _ = golden
    moments = Moments.from_raw(tensors["in.moments"])
    eps = torch.full_like(moments.mean_BCFHW, 2.0)
    assert torch.equal(moments.mode(), tensors["out.mode"])
    assert torch.allclose(moments.sample(eps), tensors["out.mode"] + 2.0 * tensors["out.std"], rtol=RELATIVE, atol=1e-6)


def test_wavelet_loss_equals_the_published_one(golden):
    tensors, _ = golden
    encoded, decoded = (
        [tensors["in.wavelet_0"], tensors["in.wavelet_2"]],
        [tensors["in.wavelet_1"], tensors["in.wavelet_3"]],
    )
    expected = tensors["out.gen_wavelet.log.train/wl_loss"]
    assert torch.allclose(wavelet_loss(encoded, decoded), expected, rtol=RELATIVE, atol=0)
    assert not torch.allclose(wavelet_loss(encoded, encoded), expected, rtol=RELATIVE, atol=0)


def test_total_and_gradients_before_the_discriminator_starts(golden):
    tensors, runs = golden
    kwargs = runs["gen_before_start"]["kwargs"]
    last_layer = tensors["in.last_layer"].clone().requires_grad_()
    raw = tensors["in.moments"].clone().requires_grad_()
    nll = reconstruction_nll(tensors["in.inputs"], reconstruct(tensors, last_layer), logvar=kwargs["logvar_init"])
    loss = nll + kwargs["kl_weight"] * kl_divergence(Moments.from_raw(raw))
    loss.backward()
    assert torch.allclose(loss, tensors["out.gen_before_start.loss"], rtol=RELATIVE, atol=0)
    assert torch.allclose(last_layer.grad, tensors["out.gen_before_start.grad_last_layer"], rtol=1e-4, atol=1e-4)
    assert torch.allclose(raw.grad, tensors["out.gen_before_start.grad_moments"], rtol=RELATIVE, atol=1e-9)
