"""Adapters beside the layers of every family: chosen by name, nothing at first, and the same when merged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.random import stream
from frameloom.models.lora.adapters import (
    Adapter,
    add_adapters,
    check_layers,
    choose_layers,
    default_layers,
    linear_layers,
    merge_adapters,
    to_adapters,
)
from frameloom.models.registry import DENOISERS, get_denoiser
from frameloom.models.spec import DenoiserSpec
from frameloom.models.text.base import TextStates

# Adapted layers and numbers at rank 4, by the fact sheets of the published trainers.
PUBLISHED = {
    ("sdxl", "base"): (560, 5_806_080),
    ("cogvideox_fun", "2b"): (245, None),
    ("cogvideox_fun", "5b"): (341, None),
    ("cogvideox_fun", "5b-1.5"): (342, None),
}


def build(name: str) -> tuple[DenoiserSpec, nn.Module]:
    """A tiny model without zero-initialised layers, which would hide what stands before them."""
    family = get_denoiser(name)
    model = family.build(family.configure("tiny", latent_channels=4, text_width=16, pooled_width=8, overrides={}))
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=stream(0, "shake")))
    return family, model.eval()


def predict(family: DenoiserSpec, model: nn.Module) -> Tensor:
    frames = 1 if family.name == "sdxl" else 3
    draws = stream(1, "inputs")
    noisy = torch.randn(2, 4, frames, 8, 8, generator=draws)
    words = torch.randn(2, 16, 16, generator=draws)
    text = TextStates(words, torch.ones(2, 16, dtype=torch.bool), torch.randn(2, 8, generator=draws))
    return model(noisy, torch.tensor([0.3, 0.8]), text.conditions())


def adapt(family: DenoiserSpec, model: nn.Module, *, seed: int = 0) -> list[str]:
    layers = default_layers(model, family.lora_targets, model.blocks())
    add_adapters(model, layers, rank=4, alpha=2.0, generator=stream(seed, "lora weights"))
    return layers


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize(("family", "size"), PUBLISHED)
def test_layers_are_those_of_the_published_trainers(family: str, size: str) -> None:
    record = get_denoiser(family)
    with torch.device("meta"):
        model = record.build(record.sizes[size])
    layers = default_layers(model, record.lora_targets, model.blocks())
    count, numbers = PUBLISHED[family, size]
    assert len(layers) == count
    if numbers is not None:
        add_adapters(model, layers, rank=4, alpha=4.0, generator=stream(0, "lora weights"))
        assert sum(parameter.numel() for parameter in trained(model).values()) == numbers


@pytest.mark.parametrize("name", DENOISERS)
def test_fresh_adapters_change_no_bit_and_all_of_them_learn(name: str) -> None:
    family, model = build(name)
    # Listened to, a layer is called by itself, as one with an adapter is: fused with others it rounds otherwise.
    adapted = default_layers(model, family.lora_targets, model.blocks())
    listeners = [model.get_submodule(layer).register_forward_hook(lambda *_: None) for layer in adapted]
    before = predict(family, model)
    for listener in listeners:
        listener.remove()
    layers = adapt(family, model)
    after = predict(family, model)
    # Adding zeros leaves some of the UNet's tensors in another order in memory, for which convolutions may have another
    # kernel, and that another rounding.
    assert (after - before).abs().max() <= (1e-6 if name == "sdxl" else 0)
    after.square().mean().backward()
    own = trained(model)
    assert len(own) == 2 * len(layers) and all("lora_" in key for key in own)
    ups = [value for key, value in own.items() if "lora_B" in key]
    assert all(up.grad is not None and up.grad.any() for up in ups)
    assert all(value.grad is None for value in model.parameters() if not value.requires_grad)
    with torch.no_grad():
        for up in ups:
            up.add_(up.grad, alpha=1.0)
    assert not torch.equal(before, predict(family, model))


@pytest.mark.parametrize("name", DENOISERS)
def test_merged_equals_beside_within_rounding(name: str) -> None:
    family, model = build(name)
    plain = predict(family, model)
    adapt(family, model)
    with torch.no_grad():
        for value in trained(model).values():
            value.add_(0.05 * torch.randn(value.shape, generator=stream(3, "training")))
        beside = predict(family, model)
        _, merged = build(name)
        adapters = to_adapters(trained(model), alpha=2.0)
        merge_adapters(merged, adapters)
        error = (predict(family, merged) - beside).abs().max()
        change = (plain - beside).abs().max()
        assert error <= 2e-5 * beside.abs().max() and error < change / 100
        merge_adapters(merged, adapters, strength=-1.0)
        torch.testing.assert_close(predict(family, merged), plain, rtol=1e-4, atol=1e-4)


def test_adapters_follow_from_the_stream_and_from_nothing_else() -> None:
    torch.manual_seed(1)
    first = build("opensora2")
    adapt(*first)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, other = build("opensora2"), build("opensora2")
    adapt(*again)
    adapt(*other, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    downs = [[value for key, value in trained(model).items() if "lora_A" in key] for _, model in (first, again, other)]
    assert all(torch.equal(one, two) for one, two in zip(downs[0], downs[1], strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(downs[0], downs[2], strict=True))


def test_a_name_is_the_whole_path_or_its_end_and_never_more() -> None:
    _, model = build("sdxl")
    ends = choose_layers(model, ["attn1.to_q"], where="lora.targets")
    assert ends and all(name.endswith(".attn1.to_q") for name in ends)
    both = choose_layers(model, ["attn?.to_q"], where="lora.targets")
    assert len(both) == 2 * len(ends)
    one = choose_layers(model, [ends[0]], where="lora.targets")
    assert one == [ends[0]]
    add_adapters(model, one, rank=2, alpha=2.0, generator=stream(0, "lora weights"))
    assert len(trained(model)) == 2


def test_a_pattern_that_matches_nothing_names_the_nearest_layer() -> None:
    _, model = build("sdxl")
    with pytest.raises(ConfigError, match=r"lora.targets: 'too_q' matches no layer.*did you mean 'to_q'\?"):
        choose_layers(model, ["to_k", "too_q"], where="lora.targets")
    with pytest.raises(ConfigError, match=r"did you mean 'attn1.to_q'\?"):
        choose_layers(model, ["atn1.to_q"], where="lora.targets")
    with pytest.raises(ConfigError, match=r"'conv_in' names conv_in, a Conv2d.*remove it"):
        choose_layers(model, ["conv_in"], where="lora.targets")
    with pytest.raises(ConfigError, match=r"names .*attn1, a Attention.*write 'attn1\.\*'"):
        choose_layers(model, ["attn1"], where="lora.targets")


def test_adapters_of_another_shape_are_listed() -> None:
    _, model = build("opensora2")
    layers = linear_layers(model)
    name = "img_in"
    wrong = Adapter(torch.zeros(2, 3), torch.zeros(5, 2), None)
    right = Adapter(torch.zeros(2, layers[name].in_features), torch.zeros(layers[name].out_features, 2), None)
    check_layers(layers, {name: right}, where="x.safetensors")
    with pytest.raises(CheckpointError, match=r"2 of 2 adapters \(img_in has 2x3 and 5x2 .*, nowhere is no linear"):
        check_layers(layers, {name: wrong, "nowhere": wrong}, where="x.safetensors")
