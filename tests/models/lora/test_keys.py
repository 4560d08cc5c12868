"""LoRA files of other programs: their keys, both ways, against diffusers' own readers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.loaders.lora_conversion_utils import (
    _convert_non_diffusers_lora_to_diffusers,
    _maybe_map_sgm_blocks_to_diffusers,
)
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError
from frameloom.core.random import stream
from frameloom.models.lora.adapters import Adapter, default_layers, linear_layers, merge_adapters
from frameloom.models.lora.keys import NOTES, LoraNames, parse_alpha, read_adapters, write_diffusers, write_kohya
from frameloom.models.registry import DENOISERS, get_denoiser


def build(name: str) -> nn.Module:
    family = get_denoiser(name)
    model = family.build(family.configure("tiny", latent_channels=4, text_width=16, pooled_width=8, overrides={}))
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=stream(0, "shake")))
    return model.eval()


def draw_adapters(name: str, model: nn.Module, *, alpha: float = 2.0) -> dict[str, Adapter]:
    family, draws, layers = get_denoiser(name), stream(0, "adapters"), linear_layers(model)
    chosen = default_layers(model, family.lora_targets, model.blocks())
    return {
        layer: Adapter(
            0.1 * torch.randn(4, layers[layer].in_features, generator=draws),
            0.1 * torch.randn(layers[layer].out_features, 4, generator=draws),
            alpha,
        )
        for layer in chosen
    }


def read(name: str, model: nn.Module, tensors: dict[str, Tensor], alpha: float | None = None) -> dict[str, Adapter]:
    names = get_denoiser(name).lora_names
    return read_adapters(tensors, linear_layers(model), names, alpha=alpha, where="x.safetensors")


def assert_same(one: dict[str, Adapter], other: dict[str, Adapter]) -> None:
    assert one.keys() == other.keys()
    for layer, adapter in one.items():
        assert torch.equal(adapter.down_RI, other[layer].down_RI) and torch.equal(adapter.up_OR, other[layer].up_OR)
        assert adapter.alpha == other[layer].alpha


@pytest.mark.parametrize("name", DENOISERS)
def test_both_layouts_round_trip(name: str) -> None:
    model = build(name)
    adapters, names = draw_adapters(name, model), get_denoiser(name).lora_names
    assert_same(adapters, read(name, model, write_kohya(adapters, linear_layers(model), names)))
    tensors, notes = write_diffusers(adapters, names)
    assert_same(adapters, read(name, model, tensors, parse_alpha(notes[NOTES], where="notes")))
    assert_same(
        {layer: Adapter(one.down_RI, one.up_OR, None) for layer, one in adapters.items()}, read(name, model, tensors)
    )


def test_keys_are_those_of_the_published_files() -> None:
    cog, sdxl = build("cogvideox_fun"), build("sdxl")
    kohya = write_kohya(
        draw_adapters("cogvideox_fun", cog), linear_layers(cog), get_denoiser("cogvideox_fun").lora_names
    )
    assert kohya["lora_unet__transformer_blocks_0_attn1_to_out_0.lora_up.weight"].shape[1] == 4
    assert float(kohya["lora_unet__patch_embed_text_proj.alpha"]) == 2.0
    assert len(kohya) == 3 * len(linear_layers(cog))
    unet = write_kohya(draw_adapters("sdxl", sdxl), linear_layers(sdxl), get_denoiser("sdxl").lora_names)
    assert all(key.startswith(("lora_unet_input", "lora_unet_middle_block_1", "lora_unet_output")) for key in unet)
    peft, _ = write_diffusers(draw_adapters("sdxl", sdxl), get_denoiser("sdxl").lora_names)
    assert all(key.startswith("unet.") and key.endswith((".lora_A.weight", ".lora_B.weight")) for key in peft)


def test_diffusers_reads_our_kohya_file_of_sdxl_to_the_same_layers() -> None:
    model = build("sdxl")
    adapters = draw_adapters("sdxl", model)
    kohya = write_kohya(adapters, linear_layers(model), get_denoiser("sdxl").lora_names)
    mapped = _maybe_map_sgm_blocks_to_diffusers(dict(kohya), model.config)
    converted, alphas = _convert_non_diffusers_lora_to_diffusers(mapped)
    assert_same({k: Adapter(a.down_RI, a.up_OR, None) for k, a in adapters.items()}, read("sdxl", model, converted))
    assert len(alphas) == len(adapters) and set(alphas.values()) == {2.0}


def predict_sdxl(model: Any) -> Tensor:
    draws = stream(1, "inputs")
    noisy, words = torch.randn(2, 4, 8, 8, generator=draws), torch.randn(2, 16, 16, generator=draws)
    with torch.no_grad():
        conditions = {"text": words, "pooled": torch.randn(2, 8, generator=draws)}
        return model(noisy[:, :, None], torch.tensor([0.3, 0.8]), conditions)[:, :, 0]


def test_diffusers_loads_our_file_and_computes_what_we_compute() -> None:
    plain, ours, theirs = build("sdxl"), build("sdxl"), build("sdxl")
    adapters = draw_adapters("sdxl", ours)
    tensors, notes = write_diffusers(adapters, get_denoiser("sdxl").lora_names)
    theirs.load_lora_adapter(tensors, prefix="unet", metadata=json.loads(notes[NOTES]))
    merge_adapters(ours, adapters)
    torch.testing.assert_close(predict_sdxl(ours), predict_sdxl(theirs), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(predict_sdxl(ours), predict_sdxl(plain), rtol=1e-2, atol=1e-3)


def test_diffusers_loads_our_file_into_its_cogvideox() -> None:
    model = build("cogvideox_fun")
    adapters = draw_adapters("cogvideox_fun", model)
    tensors, notes = write_diffusers(adapters, get_denoiser("cogvideox_fun").lora_names)
    config: Any = model.config
    theirs = CogVideoXTransformer3DModel(
        num_attention_heads=config.num_attention_heads,
        attention_head_dim=config.attention_head_dim,
        in_channels=config.in_channels,
        out_channels=config.in_channels,
        time_embed_dim=config.time_embed_dim,
        text_embed_dim=config.context_in_dim,
        num_layers=config.num_layers,
        patch_size=config.patch_size,
    )
    theirs.load_lora_adapter(tensors, prefix="transformer", metadata=json.loads(notes[NOTES]))
    loaded = {name: value for name, value in theirs.named_parameters() if "lora_" in name}
    assert len(loaded) == 2 * len(adapters)
    for layer, one in adapters.items():
        found = [value for name, value in loaded.items() if name.startswith(f"{layer}.lora_")]
        assert {tuple(value.shape) for value in found} == {tuple(one.down_RI.shape), tuple(one.up_OR.shape)}
        assert any(torch.equal(value, one.down_RI) for value in found)


@pytest.mark.parametrize(
    ("down", "up"),
    [
        ("base_model.model.{layer}.lora_A.weight", "base_model.model.{layer}.lora_B.weight"),
        ("{layer}.lora_A.default.weight", "{layer}.lora_B.default.weight"),
        ("unet.{layer}.lora.down.weight", "unet.{layer}.lora.up.weight"),
        ("lora_unet_{flat}.lora_down.weight", "lora_unet_{flat}.lora_up.weight"),
        ("model.diffusion_model.{single}.lora_A.weight", "model.diffusion_model.{single}.lora_B.weight"),
        ("unet.{parent}.processor.to_out_lora.down.weight", "unet.{parent}.processor.to_out_lora.up.weight"),
    ],
)
def test_layouts_of_other_programs_are_read(down: str, up: str) -> None:
    model = build("sdxl")
    layer = "mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0"
    single = get_denoiser("sdxl").lora_names.single(linear_layers(model))[layer]
    assert single == "middle_block.1.transformer_blocks.0.attn2.to_out.0"
    words = {"layer": layer, "flat": layer.replace(".", "_"), "single": single, "parent": layer[: -len(".to_out.0")]}
    one = draw_adapters("sdxl", model)[layer]
    found = read("sdxl", model, {down.format(**words): one.down_RI, up.format(**words): one.up_OR})
    assert_same({layer: Adapter(one.down_RI, one.up_OR, None)}, found)


def test_what_does_not_fit_is_listed() -> None:
    model = build("cogvideox_fun")
    tensors = write_kohya(draw_adapters("cogvideox_fun", model), linear_layers(model), LoraNames())
    te = "lora_te_encoder_block_0_layer_0_SelfAttention_q.lora_down.weight"
    with pytest.raises(CheckpointError, match=rf"x.safetensors does not fit.*1 of {len(tensors) + 1} keys.*\({te}\)"):
        read("cogvideox_fun", model, {**tensors, te: torch.zeros(2, 2)})
    half = dict(tensors)
    del half["lora_unet_proj_out.lora_up.weight"]
    with pytest.raises(CheckpointError, match=r"1 layers have only one half of an adapter \(proj_out\)"):
        read("cogvideox_fun", model, half)
    with pytest.raises(CheckpointError, match="holds no tensors"):
        read("cogvideox_fun", model, {})
    with pytest.raises(CheckpointError, match=rf"{len(tensors)} of {len(tensors)} keys belong to no linear layer"):
        read("opensora2", build("opensora2"), tensors)


def test_settings_that_change_the_meaning_are_refused() -> None:
    assert parse_alpha('{"unet.lora_alpha": 8, "unet.use_dora": false}', where="x") == 8
    assert parse_alpha("{}", where="x") is None
    for text, words in (
        ('{"use_rslora": true}', "use_rslora"),
        ('{"lora_alpha": -1}', "lora_alpha is -1"),
        ("[1]", "not a JSON object"),
        ("{", "not a JSON object"),
    ):
        with pytest.raises(CheckpointError, match=words):
            parse_alpha(text, where="x")
