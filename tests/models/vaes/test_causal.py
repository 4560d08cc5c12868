"""CausalVAE: the original's tensors, tiles, published and image weights, sizes.

B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.random import stream
from frameloom.models.registry import get_vae
from frameloom.models.vaes.causal.config import SIZES, CausalVAEConfig
from frameloom.models.vaes.causal.model import CausalVAE
from frameloom.models.vaes.causal.weights import export_original, load_original
from tests.models.vaes.contract import VAEContract, draw_clip
from tests.parity.cases import read_case
from tests.parity.harness import run_case
from tests.parity.weights import draw_recipe_weight

GOLDENS = Path(__file__).parents[2] / "goldens" / "open-sora-plan"
CASES = [
    "causalvae_v11",
    "causalvae_v11_release_topology_recipe",
    "causalvae_v12",
    "causalvae_v12_wide_recipe",
]
SMALL = {"hidden_size": 4, "hidden_size_mult": (1, 1, 2, 2), "num_res_blocks": 1, "norm_groups": 2}
NARROW = dataclasses.replace(SIZES["v1.2"], **SMALL)
TOPOLOGIES = {name: dataclasses.replace(SIZES[name], **SMALL) for name in ("v1.0", "v1.1", "v1.2")}


def draw_weights(model: CausalVAE, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        key: torch.from_numpy(draw_recipe_weight(key, tuple(tensor.shape), seed=seed))
        for key, tensor in model.state_dict().items()
    }


def build(config: CausalVAEConfig, seed: int = 0) -> CausalVAE:
    model = CausalVAE(config).eval()
    load_original(model, draw_weights(model, seed))
    return model


def difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).abs().max())


class TestCausalVAE(VAEContract):
    family_name = "causal"
    narrow: ClassVar = SMALL
    clip = (9, 16, 24)
    wrong_frames = 6


# --- goldens ---


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"encoder_attention": "AttnBlock3DFix"}, "video9.moments"),
        ({"encoder_temporal_downsample": ["", "TimeDownsample2x", "TimeDownsample2x", ""]}, "video9.moments"),
        ({"decoder_temporal_upsample": ["", "TimeUpsample2x", "TimeUpsample2x", ""]}, "latent2.decoded"),
    ],
)
def test_another_topology_with_the_same_keys_is_above_tolerance(change: dict[str, Any], output: str) -> None:
    case = read_case(GOLDENS / "causalvae_v11.safetensors", name="case")
    case.config["model"].update(change)
    alone = dataclasses.replace(case, outputs={output: case.outputs[output]})
    assert [row.verdict for row in run_case(alone).outputs] == ["above tolerance"]


def test_another_overlap_is_above_tolerance() -> None:
    case = read_case(GOLDENS / "causalvae_v12.safetensors", name="case")
    case.config["run"]["tiled"]["tile_overlap_factor"] = 0.5
    results = {row.name: row.verdict for row in run_case(case).outputs}
    assert results["tiled.moments"] == results["tiled.decoded_from_tiled_mean"] == "above tolerance"
    assert results["video9.moments"] == "ok"


# --- state dict and published weights ---


@pytest.mark.parametrize("name", ["CausalVAE_v1.1_release_json (loss module removed)", "CausalVAE_v1.2_defaults"])
def test_full_size_keys_and_shapes_equal_the_manifest(name: str) -> None:
    manifest = json.loads((GOLDENS / "state_dict_manifest.json").read_text())[name]
    with torch.device("meta"):
        model = CausalVAE(CausalVAEConfig.from_original(manifest["config"]))
    assert {key: list(tensor.shape) for key, tensor in model.state_dict().items()} == manifest["keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) == manifest["n_parameters"]


def test_the_json_in_the_repository_of_version_1_1_is_the_older_model() -> None:
    manifest = json.loads((GOLDENS / "state_dict_manifest.json").read_text())
    config = manifest["CausalVAE_v1.1_release_json (loss module removed)"]["config"]
    assert CausalVAEConfig.from_original(config) == SIZES["v1.0"] != SIZES["v1.1"]


@pytest.mark.parametrize(
    ("size", "encoder", "decoder", "entries"),
    [
        ("v1.0", 93_816_456, 135_353_347, 248),
        ("v1.1", 97_349_258, 149_510_149, 260),
        ("v1.2", 94_399_368, 144_790_531, 248),
    ],
)
def test_sizes_have_the_published_numbers_of_parameters(size: str, encoder: int, decoder: int, entries: int) -> None:
    with torch.device("meta"):
        model = CausalVAE(SIZES[size])
    assert sum(parameter.numel() for parameter in model.encoder.parameters()) == encoder
    assert sum(parameter.numel() for parameter in model.decoder.parameters()) == decoder
    assert len(model.state_dict()) == entries
    assert (model.strides, model.latent_channels) == ((4, 8, 8), 4)


def test_released_keys_are_those_of_the_facts() -> None:
    with torch.device("meta"):
        old, new = (CausalVAE(SIZES[size]).state_dict() for size in ("v1.1", "v1.2"))
    shapes = {key: tuple(tensor.shape) for key, tensor in (new | old).items()}
    assert shapes["encoder.conv_in.weight"] == (128, 3, 3, 3)
    assert shapes["encoder.down.1.time_downsample.mix_factor"] == (1,)
    assert shapes["encoder.down.2.time_downsample.conv.weight"] == (512, 512, 3, 3, 3)
    assert shapes["decoder.up.3.time_upsample.conv.conv.weight"] == (512, 512, 3, 3, 3)
    assert old["encoder.down.1.downsample.conv.weight"].shape == (256, 256, 3, 3)
    assert new["encoder.down.1.downsample.conv.conv.weight"].shape == (256, 256, 3, 3, 3)
    assert old["decoder.up.2.upsample.conv.conv.weight"].shape == (512, 512, 1, 3, 3)
    assert new["decoder.up.2.upsample.conv.conv.weight"].shape == (512, 512, 3, 3, 3)
    assert not any("time_" in key for key in new)


def test_every_spelling_of_a_published_file_loads() -> None:
    weights = draw_weights(CausalVAE(NARROW))
    loss = {"loss.logvar": torch.zeros(()), "loss.discriminator.main.0.weight": torch.zeros(64, 3, 3, 3, 3)}
    clip = draw_clip(1, 3, 5, 8, 8)
    with torch.no_grad():
        expected = build(NARROW).encode_raw(clip)
        for tensors in (weights, weights | loss, {f"module.{key}": tensor for key, tensor in weights.items()}):
            other = build(NARROW, seed=1)
            assert not torch.equal(other.encode_raw(clip), expected)
            load_original(other, tensors)
            assert torch.equal(other.encode_raw(clip), expected)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_exported_weights_load_to_the_bit(name: str) -> None:
    model, other = build(TOPOLOGIES[name]), build(TOPOLOGIES[name], seed=1)
    tensors = export_original(model)
    assert not all(torch.equal(value, other.state_dict()[key]) for key, value in tensors.items())
    load_original(other, tensors)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in tensors.items())


def test_a_file_of_the_other_release_is_refused() -> None:
    with pytest.raises(CheckpointError, match="time_upsample"):
        load_original(CausalVAE(TOPOLOGIES["v1.2"]), draw_weights(CausalVAE(TOPOLOGIES["v1.1"])))


# --- start from an image autoencoder ---


def build_image_vae() -> Any:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=4,
    ).eval()
    generator = stream(0, "image vae")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize("name", ["v1.0", "v1.2"])
def test_inflated_image_weights_treat_an_image_as_the_image_autoencoder_does(name: str) -> None:
    """Version 1.2 enlarges pictures linearly and not by repetition in two levels, so only its encoder agrees."""
    images = build_image_vae()
    model = build(TOPOLOGIES[name])
    image = draw_clip(2, 3, 1, 16, 24)
    with torch.no_grad():
        expected = images.encode(image[:, :, 0]).latent_dist.parameters
        assert difference(model.encode_raw(image)[:, :, 0], expected) > 0.1
        load_original(model, images.state_dict())
        assert difference(model.encode_raw(image)[:, :, 0], expected) <= 1e-5
        decoded = images.decode(expected[:, :4]).sample
        gap = difference(model.decode(expected[:, :4, None])[:, :, 0], decoded)
    assert gap <= 1e-5 if name == "v1.0" else gap > 1e-2


def test_inflation_leaves_the_layers_of_time_as_they_start() -> None:
    model = CausalVAE(TOPOLOGIES["v1.1"])
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    load_original(model, build_image_vae().state_dict())
    unchanged = {key for key, tensor in model.state_dict().items() if torch.equal(tensor, before[key])}
    assert unchanged == {key for key in before if ".time_" in key}
    kernel = model.state_dict()["decoder.conv_in.conv.weight"]
    assert not kernel[:, :, :2].any() and kernel[:, :, 2].all()


def test_image_weights_of_another_width_are_refused_by_name() -> None:
    tensors = build_image_vae().state_dict()
    del tensors["encoder.mid_block.attentions.0.to_q.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing \(encoder.mid.attn_1.q.conv.weight\)"):
        load_original(CausalVAE(NARROW), tensors)
    wide = dataclasses.replace(NARROW, hidden_size=8)
    with pytest.raises(CheckpointError, match="of another shape"):
        load_original(CausalVAE(wide), build_image_vae().state_dict())


# --- the model's own claims ---


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_gradients_reach_every_parameter(name: str) -> None:
    model = build(TOPOLOGIES[name]).train()
    clip = draw_clip(1, 3, 9, 16, 16)
    moments, _ = model.encode_with_coefficients(clip)
    pixels, _ = model.decode_with_coefficients(moments.sample(torch.ones_like(moments.mean_BCFHW)))
    ((pixels - clip).square().sum() + moments.kl_B().sum()).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_an_attention_of_the_corrected_kind_keeps_frames_apart(name: str) -> None:
    attention = build(TOPOLOGIES[name]).encoder.mid.attn_1
    clip = draw_clip(1, 8, 3, 2, 2)
    # The norm spans all frames, so a change must keep its statistics: swap two frames.
    with torch.no_grad():
        plain, swapped = attention(clip), attention(clip[:, :, [0, 2, 1]])
    gap = difference(plain[:, :, [0, 2, 1]], swapped)
    assert gap > 1e-3 if attention.mixes_frames else gap <= 1e-6
    assert attention.mixes_frames == (name == "v1.0")


def build_tiny(*, started: bool) -> CausalVAE:
    family = get_vae("causal")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family.build(SIZES["tiny"])
    if started:
        assert family.start is not None
        family.start(model)
    assert isinstance(model, CausalVAE)
    return model


def make_square() -> torch.Tensor:
    clip = torch.full((1, 3, 5, 32, 32), -0.5)
    clip[:, 0, :, 8:24, 4:20] = 0.8
    return clip


def test_the_tiny_size_starts_with_the_colours_and_only_then() -> None:
    clip = make_square()
    errors = []
    for started in (True, False):
        model = build_tiny(started=started)
        with torch.no_grad():
            errors.append(float((model.decode(model.encode(clip).mode()) - clip).abs().mean()))
    assert errors[0] < 0.15 < 0.3 < errors[1]


def test_narrow_norm_groups_leave_weights_as_drawn() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CausalVAE(NARROW)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    get_vae("causal").start(model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


# --- config and table ---


@pytest.mark.parametrize("name", CASES)
def test_published_config_survives_the_round_trip(name: str) -> None:
    config = CausalVAEConfig.from_original(read_case(GOLDENS / f"{name}.safetensors", name=name).config["model"])
    assert CausalVAEConfig.from_original(config.to_original()) == config
    assert CausalVAEConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert config not in SIZES.values()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_sizes": 4}, "did you mean 'hidden_size'"),
        ({"encoder_conv_in": "Conv3d"}, "choose from 'CausalConv3d', 'Conv2d'"),
        ({"encoder_resnet_blocks": ["ResnetBlock3D"]}, "1 entries; hidden_size_mult has 4 levels"),
        ({"attn_resolutions": [16]}, "only [] is supported"),
        ({"dropout": 0.1}, "only 0.0 is supported"),
        ({"hidden_size": 48}, "32 norm groups"),
        ({"num_res_blocks": 0}, "at least 1"),
        ({"decoder_temporal_upsample": ["", "", "", "TimeUpsample2x"]}, "they must agree"),
        ({"use_quant_layer": False, "embed_dim": 8}, "must equal z_channels"),
        ({"scale": [0.1, 0.2]}, "2 numbers for 4 latent channels"),
    ],
)
def test_wrong_configs_are_refused_with_what_would_be_right(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        CausalVAEConfig.from_original(values)
    assert words in str(error.value)


def test_without_quant_layer_there_is_none() -> None:
    model = CausalVAE(dataclasses.replace(NARROW, use_quant_layer=False))
    assert not any("quant" in key for key in model.state_dict())
    with torch.no_grad():
        assert model.decode(model.encode(draw_clip(1, 3, 5, 8, 8)).mode()).shape == (1, 3, 5, 8, 8)
