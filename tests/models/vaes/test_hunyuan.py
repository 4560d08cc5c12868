"""B batch, C channels, F frames, H height, W width."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from frameloom.core.errors import ConfigError
from frameloom.models.registry import get_vae
from frameloom.models.vaes.hunyuan.config import SIZES, HunyuanConfig
from frameloom.models.vaes.hunyuan.model import FrameCausalAttention
from tests.models.vaes.contract import VAEContract, draw_clip
from tests.parity.cases import read_case
from tests.parity.harness import run_case

GOLDENS = Path(__file__).parents[2] / "goldens" / "open-sora-v2"


class TestHunyuan(VAEContract):
    family_name = "hunyuan"
    narrow: ClassVar = {"block_channels": (4, 8, 8, 8), "latent_channels": 4, "norm_groups": 1}
    clip = (9, 16, 8)
    wrong_frames = 8
    # Faster, it only learns the mean of all pixels.
    num_steps, learn_rate = 40, 1e-4


def build_golden(**overrides):
    case = read_case(GOLDENS / "hunyuan_vae.safetensors", name="hunyuan_vae")
    config = dataclasses.replace(HunyuanConfig.from_original(case.config), **overrides)
    model = get_vae("hunyuan").build(config).eval()
    get_vae("hunyuan").load_original(model, case.weights)
    return model, case


def build_diffusers(model):
    from diffusers import AutoencoderKLHunyuanVideo

    config = model.config
    other = AutoencoderKLHunyuanVideo(
        latent_channels=config.latent_channels,
        block_out_channels=config.block_channels,
        layers_per_block=config.layers_per_block,
        norm_num_groups=config.norm_groups,
    ).eval()
    return other


# --- goldens ---


# --- against diffusers ---


def test_full_size_keys_and_shapes_equal_those_of_diffusers_and_their_number_is_the_published_one():
    with torch.device("meta"):
        model = get_vae("hunyuan").build(SIZES["opensora2"])
        other = build_diffusers(model)
    ours = {key: tensor.shape for key, tensor in model.state_dict().items()}
    assert ours == {key: tensor.shape for key, tensor in other.state_dict().items()}
    assert len(ours) == 248
    assert sum(parameter.numel() for parameter in model.parameters()) == 246_478_803


def test_the_hunyuanvideo_size_cuts_as_diffusers_does_by_default():
    size = SIZES["hunyuanvideo"]
    settings = {name: getattr(size, name) for name in ("temporal_tiling", "spatial_tiling", "tile_frames")}
    model, _ = build_golden(tile_px=256, **settings)
    other = build_diffusers(model)
    other.load_state_dict(model.state_dict())
    pixels = draw_clip(1, 3, 29, 16, 8)
    whole, _ = build_golden()
    with torch.no_grad():
        ours, theirs = model.encode_raw(pixels), other._encode(pixels)
        assert (ours - theirs).abs().max() < 1e-5
        assert (ours - whole.encode_raw(pixels)).abs().max() > 1e-2
        latent = ours[:, :4]
        assert (model.decode(latent) - other.decode(latent).sample).abs().max() < 2e-5


def test_attention_never_asks_for_a_mask_and_equals_the_masked_one():
    from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import prepare_causal_attention_mask

    layer = FrameCausalAttention(8, 4)
    x = draw_clip(2, 8, 3, 2, 3)
    with torch.no_grad():
        tokens = layer.group_norm(x).flatten(2).transpose(1, 2)
        q, k, v = layer.to_q(tokens), layer.to_k(tokens), layer.to_v(tokens)
        mask = prepare_causal_attention_mask(3, 6, torch.float32, x.device)
        seen = torch.softmax(q @ k.transpose(1, 2) * 8**-0.5 + mask, dim=-1) @ v
        expected = x + layer.to_out[0](seen).transpose(1, 2).unflatten(2, (3, 2, 3))
        unmasked = x + layer.to_out[0](torch.softmax(q @ k.transpose(1, 2) * 8**-0.5, dim=-1) @ v).transpose(
            1, 2
        ).unflatten(2, (3, 2, 3))
        assert torch.allclose(layer(x), expected, atol=1e-6)
        assert not torch.allclose(layer(x), unmasked, atol=1e-3)


# --- tiles ---


def test_no_layer_sees_more_than_a_tile():
    model, _ = build_golden(spatial_tiling=True, temporal_tiling=True)
    seen = []
    model.encoder.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[2:])))
    with torch.no_grad():
        raw = model.encode_raw(draw_clip(1, 3, 37, 72, 40))
    assert raw.shape == (1, 8, 10, 9, 5)
    assert {max(sizes) for sizes in zip(*seen, strict=True)} == {17, 32}


@pytest.mark.parametrize(("size", "num_tiles"), [((256, 256), 1), ((192, 336), 2), ((264, 256), 4)])
def test_published_tiles_start_when_a_side_is_longer_than_256(size, num_tiles):
    config = SIZES["opensora2"]
    assert config.spatial_tiling and not config.temporal_tiling
    (tiles, _), (decoded, _) = (config.cuts(decoding=decoding).space for decoding in (False, True))
    assert (tiles.size, tiles.stride, tiles.keep, tiles.blend) == (256, 192, 24, 8)
    assert decoded.blend == 64
    rows, columns = (len(tiles.starts(side)) for side in size)
    assert (rows * columns if max(size) > tiles.size else 1) == num_tiles


# --- config ---


def test_both_published_spellings_are_read():
    theirs = {"_class_name": "AutoencoderKLHunyuanVideo", "scaling_factor": 0.476986, "temporal_compression_ratio": 4}
    assert HunyuanConfig.from_original(theirs) == HunyuanConfig()
    assert HunyuanConfig.from_original(SIZES["opensora2"].to_original()) == SIZES["opensora2"]
    assert SIZES["opensora2"] != HunyuanConfig()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"latent_chanels": 4}, "did you mean 'latent_channels'"),
        ({"act_fn": "gelu"}, "only 'silu' is supported"),
        ({"block_out_channels": [8, 8, 8]}, "give 4"),
        ({"block_out_channels": [8, 8, 8, 9], "norm_num_groups": 4}, "9 channels"),
        ({"sample_size": 100, "use_spatial_tiling": True}, "multiples of 8"),
        ({"sample_tsize": 6, "use_temporal_tiling": True}, "multiples of 4"),
    ],
)
def test_wrong_configs_are_refused_with_what_would_be_right(values, words):
    with pytest.raises(ConfigError) as error:
        HunyuanConfig.from_original(values)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "key", ["encoder.mid_block.attentions.0.to_k.weight", "decoder.up_blocks.3.resnets.1.conv2.conv.bias"]
)
def test_a_changed_weight_is_above_tolerance(key):
    case = read_case(GOLDENS / "hunyuan_vae.safetensors", name="hunyuan_vae")
    case.weights[key].flatten()[0] += 0.05
    case = dataclasses.replace(case, outputs={name: case.outputs[name] for name in ("f9.moments", "t3.decoded")})
    assert not run_case(case).is_good
