"""The discriminator, LPIPS and what they add to the loss of an autoencoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.random import stream
from frameloom.models.registry import VAES
from frameloom.models.vaes.discriminator import (
    Discriminator,
    DiscriminatorConfig,
    build_discriminator,
    load_discriminator,
)
from frameloom.models.vaes.losses import (
    AdversarialSettings,
    balance_gradients,
    discriminator_loss,
    generator_term,
    reconstruction_nll,
)
from frameloom.models.vaes.lpips import LPIPS, load_lpips
from tests.parity.cases import read_case
from tests.parity.harness import run_case

GOLDENS = Path(__file__).parents[2] / "goldens" / "open-sora-plan"
CASES = ["discriminator3d", "vae_gan_losses", "lpips_recipe"]
TINY = DiscriminatorConfig(channels=4, num_layers=2)


@pytest.mark.parametrize("name", CASES)
def test_disturbed_inputs_are_out_of_tolerance(name: str) -> None:
    case = read_case(GOLDENS / f"{name}.safetensors", name=name)
    changed = {key: value * 1.01 for key, value in case.inputs.items()}
    assert not run_case(dataclasses.replace(case, inputs=changed)).is_good


def test_the_published_size_has_the_published_parameters() -> None:
    with torch.device("meta"):
        counts = [
            sum(parameter.numel() for parameter in Discriminator(DiscriminatorConfig(num_layers=layers)).parameters())
            for layers in (4, 3)
        ]
    assert counts == [11_744_641, 4_665_729]


def test_the_picture_discriminator_is_the_published_patchgan() -> None:
    """Isola et al. 2017: 4x4 kernels; the logits of a 256 px picture are 30x30, each of a patch of 70 px."""
    with torch.device("meta"):
        model = build_discriminator(DiscriminatorConfig(kind="2d", num_layers=3))
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_765_633
    narrow = build_discriminator(DiscriminatorConfig(kind="2d", channels=2, num_layers=3))
    assert narrow(torch.zeros(1, 3, 2, 256, 256)).shape == (2, 1, 30, 30)


def test_the_discriminator_of_open_sora_2_has_the_published_keys() -> None:
    with torch.device("meta"):
        model = build_discriminator(DiscriminatorConfig(num_layers=5, dropout=0.3))
    places = {int(name.split(".")[1]) for name in model.state_dict()}
    assert places == {0, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22}


def test_dropout_follows_from_the_generator_it_is_given() -> None:
    clip = torch.rand(2, 3, 5, 8, 8, generator=stream(1, "clip"))
    model = build_discriminator(dataclasses.replace(TINY, dropout=0.5), stream(0, "d"))
    state = torch.get_rng_state()
    first, again, other = (model(clip, stream(seed, "dropout")) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())
    plain = build_discriminator(TINY, stream(0, "d"))
    tensors = dict(zip(model.state_dict(), plain.state_dict().values(), strict=True))
    model.load_state_dict(tensors)
    assert torch.equal(model.eval()(clip, stream(1, "dropout")), plain.eval()(clip))


@pytest.mark.parametrize("name", VAES)
def test_the_last_layer_of_an_autoencoder_is_the_one_before_the_pixels(name: str) -> None:
    """Doubling it and its bias, and nothing else, doubles what a decoder gives: no layer comes after it."""
    family = VAES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = family.build(family.sizes["tiny"]).eval()
    weight = vae.last_layer()
    layer = next(module for module in vae.modules() if getattr(module, "weight", None) is weight)
    latent = torch.randn(1, vae.latent_channels, 2, 2, 2, generator=stream(0, "latent"))
    with torch.no_grad():
        if name == "wfvae":  # its low bands are added afterwards
            for branch in (vae.decoder.connect_l1[-1], vae.decoder.connect_l2[-1]):
                branch.weight.zero_(), branch.bias.zero_()
        before = vae.decode(latent)
        weight.mul_(2)
        layer.bias.mul_(2)
        assert torch.allclose(vae.decode(latent), 2 * before, rtol=1e-4, atol=1e-5)
    assert float(before.abs().max()) > 0


def test_fresh_weights_follow_from_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (build_discriminator(TINY, stream(seed, "d")).state_dict() for seed in (1, 1, 2))
    # Layers draw from the global generator when they are made; what they drew must not matter.
    torch.set_rng_state(state)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["main.0.weight"], other["main.0.weight"])
    assert float(first["main.0.weight"].std()) == pytest.approx(0.02, rel=0.2)


def test_weights_of_another_size_are_refused_with_a_list() -> None:
    wrong = Discriminator(DiscriminatorConfig(channels=8, num_layers=2)).state_dict()
    with pytest.raises(CheckpointError, match="discriminator's weights does not fit"):
        load_discriminator(Discriminator(TINY), wrong)
    with pytest.raises(CheckpointError, match="weights of LPIPS"):
        load_lpips(LPIPS(), {})


def test_turns_and_start() -> None:
    settings = AdversarialSettings(start=10)
    assert [settings.trains_discriminator(step) for step in (9, 10, 11, 12)] == [False, False, True, False]
    assert [settings.factor_at(step) for step in (9, 10)] == [0.0, 1.0]
    assert [settings.trains_autoencoder(step) for step in (9, 10, 11, 12)] == [True, True, False, True]
    both = AdversarialSettings(start=10, update="both")
    assert [both.trains_discriminator(step) for step in (9, 10, 11)] == [False, True, True]
    assert all(both.trains_autoencoder(step) for step in (9, 10, 11))
    with pytest.raises(ConfigError, match="'hinge' or 'vanilla'"):
        AdversarialSettings(loss="other")  # type: ignore[arg-type]


def test_the_weight_makes_both_gradients_alike() -> None:
    layer = torch.ones(4, requires_grad=True)
    ratio = balance_gradients((3 * layer).sum(), (0.5 * layer).sum(), layer)
    assert float(ratio) == pytest.approx(6.0, rel=1e-3)
    assert not ratio.requires_grad
    assert float(balance_gradients(layer.sum(), 0 * layer.sum(), layer)) == 1e4


def test_a_discriminator_learns_to_tell_two_kinds_apart() -> None:
    generator = stream(0, "clips")
    model = build_discriminator(TINY, stream(0, "d")).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    settings = AdversarialSettings()
    losses = []
    for step in range(20):
        real, made = (torch.randn(4, 3, 5, 8, 8, generator=generator) + offset for offset in (1.0, -1.0))
        loss = discriminator_loss(model(real), model(made), settings, step)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 < losses[0]


def test_the_generators_term_flows_back_to_the_decoder() -> None:
    layer = nn.Conv3d(3, 3, 1)
    model = build_discriminator(TINY, stream(0, "d"))
    clip = torch.rand(1, 3, 5, 8, 8, generator=stream(1, "clip"))
    made = layer(clip)
    settings = AdversarialSettings(start=1)
    nll = (made - clip).abs().sum()
    assert float(generator_term(model(made), nll, layer.weight, settings, 0).loss) == 0
    term = generator_term(model(made), nll, layer.weight, settings, 1)
    (grad,) = torch.autograd.grad(term.loss, layer.weight, retain_graph=True)
    (of_nll,) = torch.autograd.grad(nll, layer.weight)
    assert float(grad.norm()) == pytest.approx(0.5 * float(of_nll.norm()), rel=0.01)


def test_lpips_has_finite_gradients_where_no_feature_fires() -> None:
    model = LPIPS()
    for parameter in model.parameters():
        parameter.zero_()
    picture = torch.zeros(1, 3, 32, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(model(picture, torch.ones(1, 3, 32, 32)).sum(), picture)
    assert bool(torch.isfinite(grad).all())


def test_a_perceptual_distance_counts_once_for_every_number_of_its_frame() -> None:
    clip, result = torch.zeros(2, 3, 4, 5, 6), torch.ones(2, 3, 4, 5, 6)
    plain = reconstruction_nll(clip, result)
    assert float(plain) == 90
    assert float(reconstruction_nll(clip, result, perceptual_BF=torch.full((2, 4), 0.5))) == 135
    weights = torch.tensor([[2.0] * 4, [0.0] * 4])
    assert float(reconstruction_nll(clip, result, weight_BF=weights)) == float(plain)
