"""Weights in half precision: every family runs and learns with them, norms stay float32, autoencoders stay near.

Shape letters: B batch, C channels, F frames, H height, W width, K text tokens, D width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from frameloom.builders.vae import build_vae
from frameloom.config.schema.models import VAESection
from frameloom.core.random import stream
from frameloom.models.precision import DTYPES, Precision, find_norms
from frameloom.models.registry import DENOISERS, VAES, get_denoiser
from frameloom.models.text.base import TextStates


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(3, "inputs", *shape))


def predict(name: str, model: nn.Module) -> Tensor:
    text = TextStates(draw(1, 5, 24), torch.ones(1, 5, dtype=torch.bool), draw(1, 12))
    takes_sizes = "sizes" in DENOISERS[name].supported_conditions
    given = {"sizes": torch.full((1, 6), 64.0)} if takes_sizes else {}
    frames = 1 if name == "sdxl" else 2
    return model(draw(1, 4, frames, 8, 8), torch.tensor([0.3]), {**text.conditions(), **given})


def build(name: str) -> nn.Module:
    family = get_denoiser(name)
    config = family.configure("tiny", latent_channels=4, text_width=24, pooled_width=12, overrides={})
    model = family.build(config, generator=stream(0, "weights"))
    generator = stream(0, "shake")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", DENOISERS)
def test_a_family_runs_and_learns_with_half_weights(name: str, precision: str) -> None:
    dtype, model = DTYPES[precision], build(name)
    with torch.no_grad():
        full = predict(name, model)
    Precision(precision, precision).cast_trained(model)
    norms = {id(parameter) for norm in find_norms(model) for parameter in norm.parameters(recurse=False)}
    assert {value.dtype for value in model.parameters() if id(value) in norms} <= {torch.float32}
    assert {value.dtype for value in model.parameters() if id(value) not in norms} == {dtype}
    with Precision(precision).autocast("cpu"):
        half = predict(name, model)
        half.float().square().mean().backward()
    error = (half.float() - full).norm() / full.norm()
    assert 0 < error < (0.1 if precision == "bf16" else 0.02)
    grads = [value.grad for value in model.parameters() if value.grad is not None]
    assert len(grads) > len(list(model.parameters())) / 2 and all(grad.isfinite().all() for grad in grads)


def test_what_is_kept_and_buffers_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    Precision(weights="bf16", fp32_norms=False).cast_trained(model, keep=list(model[2].parameters()))
    assert [part.weight.dtype for part in model] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]
    assert model[3].running_mean.dtype == torch.float32


def test_wide_norms_compute_in_float32() -> None:
    narrow = nn.LayerNorm(64).to(torch.bfloat16)
    x_BD = draw(4, 64).to(torch.bfloat16) * 100
    wide = nn.Sequential(nn.LayerNorm(64))
    Precision.frozen("bf16", fp32_norms=True).cast_frozen(wide)
    seen: list[torch.dtype] = []
    wide[0].register_forward_pre_hook(lambda module, given: seen.append(given[0].dtype))
    assert wide(x_BD).dtype == narrow(x_BD).dtype == torch.bfloat16 and seen == [torch.float32]
    assert wide[0].weight.dtype == torch.float32


@pytest.mark.parametrize("name", VAES)
def test_a_half_autoencoder_is_float32_outside_and_near_the_full_one(name: str) -> None:
    frames = 1 if name == "kl" else 4 if name == "dc_ae" else 5
    pixels = draw(1, 3, frames, 32, 32).clamp(-1, 1)
    full = build_vae(VAESection(name=name), seed=0)
    half = build_vae(VAESection(name=name, precision="bf16", fp32_norms=True), seed=0)
    with torch.no_grad():
        means = [loaded.model.eval().encode(pixels).mean_BCFHW for loaded in (full, half)]
        decoded = [loaded.model.decode(means[0]) for loaded in (full, half)]
    for reference, ours in (means, decoded):
        assert ours.dtype == torch.float32 and 0 < (ours - reference).norm() / reference.norm() < 0.1
    assert {value.dtype for norm in find_norms(half.model) for value in norm.parameters()} <= {torch.float32}
    assert torch.bfloat16 in {value.dtype for value in half.model.parameters()}
    assert torch.equal(full.model.normalize(means[0]), half.model.normalize(means[0]))


def test_a_cache_can_tell_autoencoders_of_other_precision() -> None:
    settings = [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"precision": "bf16", "fp32_norms": True}]
    digests = [build_vae(VAESection(name="wfvae", **item), seed=0).digest for item in settings]
    assert len(set(digests)) == 4 and digests[0] == build_vae(VAESection(name="wfvae"), seed=0).digest
