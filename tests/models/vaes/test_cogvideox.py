"""B batch, C channels, F frames, H height, W width."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from frameloom.core.errors import ConfigError
from frameloom.models.layers.causal_conv import Chunk, prepend_past
from frameloom.models.vaes.base import load_original
from frameloom.models.vaes.cogvideox.config import SIZES, CogVideoXConfig
from frameloom.models.vaes.cogvideox.model import CogVideoXVAE, bounds_with_rest_first, enlarge, modulate
from tests.models.vaes.contract import VAEContract, draw_clip
from tests.parity.cases import read_case
from tests.parity.harness import run_case

GOLDENS = Path(__file__).parents[2] / "goldens" / "cogvideox-fun"


class TestCogVideoX(VAEContract):
    family_name = "cogvideox"
    narrow: ClassVar = {"block_channels": (4, 8, 8, 8), "latent_channels": 4, "norm_groups": 2}
    clip = (9, 16, 8)
    wrong_frames = 8


def read_golden():
    return read_case(GOLDENS / "vae.safetensors", name="vae")


def build_golden(**overrides) -> CogVideoXVAE:
    case = read_golden()
    given = {key: value for key, value in case.config.items() if key != "tiling_for_tiled_variant"}
    model = CogVideoXVAE(dataclasses.replace(CogVideoXConfig.from_original(given), **overrides)).eval()
    load_original(model, case.weights)
    return model


def build_diffusers(config: CogVideoXConfig):
    from diffusers import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX(
        latent_channels=config.latent_channels,
        block_out_channels=config.block_channels,
        layers_per_block=config.layers_per_block,
        norm_num_groups=config.norm_groups,
        norm_eps=config.norm_eps,
    ).eval()


# --- goldens ---


# --- against diffusers ---


def test_full_size_keys_and_shapes_equal_those_of_diffusers_and_their_number_is_the_published_one():
    with torch.device("meta"):
        model = CogVideoXVAE(SIZES["2b"])
        other = build_diffusers(SIZES["2b"])
    ours = {key: tensor.shape for key, tensor in model.state_dict().items()}
    assert ours == {key: tensor.shape for key, tensor in other.state_dict().items()}
    assert len(ours) == 436
    assert sum(parameter.numel() for parameter in model.parameters()) == 215_583_907


@pytest.mark.parametrize("chunk_frames", [4, 8])
def test_encoding_equals_diffusers_for_both_published_chunks(chunk_frames):
    model = build_golden(encode_chunk_frames=chunk_frames)
    other = build_diffusers(model.config)
    other.load_state_dict(model.state_dict())
    other.num_sample_frames_batch_size = chunk_frames
    with torch.no_grad():
        for num_frames in (1, 5, 9, 13, 21):
            clip = draw_clip(1, 3, num_frames, 16, 8)
            assert (model.encode_raw(clip) - other._encode(clip)).abs().max() < 1e-5


def test_norms_have_the_epsilon_of_the_config_where_diffusers_has_it():
    """Pixels are so dark that an epsilon counts; in the decoder it must have no effect."""
    usual, model = build_golden(decode_first_alone=False), build_golden(decode_first_alone=False, norm_eps=1e-3)
    other = build_diffusers(model.config)
    other.load_state_dict(model.state_dict())
    clip, latent = 0.01 * draw_clip(1, 3, 9, 16, 8), draw_clip(1, 4, 3, 2, 1)
    with torch.no_grad():
        assert (model.encode_raw(clip) - other._encode(clip)).abs().max() < 1e-5
        assert (usual.encode_raw(clip) - other._encode(clip)).abs().max() > 1e-3
        assert (model.decode(latent) - other.decode(latent).sample).abs().max() < 1e-5
        assert torch.equal(model.decode(latent), usual.decode(latent))
    assert CogVideoXConfig.from_original(dict(other.config)).norm_eps == 1e-3
    assert model.config.to_original()["norm_eps"] == 1e-3


def test_the_split_of_diffusers_is_a_switch():
    auto, alone = build_golden(decode_first_alone=False), build_golden()
    other = build_diffusers(auto.config)
    other.load_state_dict(auto.state_dict())
    with torch.no_grad():
        for num_latents in (1, 2, 3, 4, 5):
            latent = draw_clip(1, 4, num_latents, 2, 1)
            theirs = other.decode(latent).sample
            assert (auto.decode(latent) - theirs).abs().max() < 1e-5
            assert auto.decode(latent).shape[2] == (4 * num_latents - 3 if num_latents % 2 else 4 * num_latents)
            assert alone.decode(latent).shape[2] == 4 * num_latents - 3
            if num_latents in (3, 5):
                assert (alone.decode(latent) - theirs).abs().max() > 1e-2


# --- chunks ---


@pytest.mark.parametrize(
    ("num_frames", "size", "bounds"),
    [(1, 8, [0, 1]), (5, 8, [0, 5]), (9, 8, [0, 9]), (17, 8, [0, 9, 17]), (13, 4, [0, 5, 9, 13]), (21, 8, [0, 13, 21])],
)
def test_the_first_chunk_takes_what_is_left_over(num_frames, size, bounds):
    assert bounds_with_rest_first(num_frames, size) == bounds


def test_chunks_change_the_result_and_a_long_chunk_is_the_whole_clip():
    clip = draw_clip(1, 3, 17, 16, 8)
    with torch.no_grad():
        by_size = {size: build_golden(encode_chunk_frames=size).encode_raw(clip) for size in (4, 8, 16, 1000)}
    assert torch.equal(by_size[16], by_size[1000])
    assert all((by_size[size] - by_size[16]).abs().max() > 1e-3 for size in (4, 8))


def test_the_first_latent_is_that_of_the_first_frame_as_an_image():
    model = build_golden()
    latent = draw_clip(1, 4, 5, 2, 2)
    with torch.no_grad():
        frames, image = model.decode(latent), model.decode(latent[:, :, :1])
    assert torch.equal(frames[:, :, :1], image)
    assert not torch.equal(frames[:, :, 1:2], image)


def test_no_layer_gets_more_frames_than_a_chunk_and_memory_of_chunks_is_freed():
    model = build_golden()
    seen, alive, most_alive = [], [], []

    def watch(module, args):
        seen.append(args[0].shape[2])
        alive.append(weakref.ref(args[1]))
        most_alive.append(sum(chunk() is not None for chunk in alive))

    model.decoder.register_forward_pre_hook(watch)
    with torch.no_grad():
        model.decode(draw_clip(1, 4, 9, 2, 2))
    assert seen == [1, 2, 2, 2, 2]
    assert max(most_alive) <= 2


def test_without_gradients_what_was_remembered_goes_when_it_is_used():
    first = Chunk(None, leads=True, is_last=False)
    second = Chunk(first, leads=False, is_last=True)
    frames = draw_clip(1, 1, 3, 1, 1)
    with torch.no_grad():
        prepend_past(frames, "conv", first, kernel=3)
        held = first._written["conv"]
        assert held.untyped_storage().nbytes() == 2 * 4
        joined = prepend_past(frames, "conv", second, kernel=3)
    assert torch.equal(joined[:, :, :2], frames[:, :, 1:])
    assert not first._written and not second._written


def test_modulation_equals_the_published_one_on_the_enlarged_latent():
    for leads, num_frames in ((True, 5), (True, 1), (False, 8)):
        x, scale, offset = draw_clip(2, 3, num_frames, 4, 8), *draw_clip(2, 2, 3, 2, 2, 4).unbind(0)
        num_latents = {5: 2, 1: 1, 8: 2}[num_frames]
        scale, offset = scale[:, :, :num_latents], offset[:, :, :num_latents]
        large = [enlarge(part, x.shape[2:], leads=leads) for part in (scale, offset)]
        assert torch.equal(modulate(x, scale, offset, leads=leads), x * large[0] + large[1])
    assert not torch.equal(x * large[0] + large[1], x)


# --- tiles ---


def test_published_tiles_have_the_published_numbers():
    config = dataclasses.replace(SIZES["5b"], tiling=True)
    encoded, decoded = (config.cuts(decoding=decoding).space for decoding in (False, True))
    tiles = [part for pair in zip(encoded, decoded, strict=True) for part in pair]
    assert [(part.size, part.stride, part.keep, part.blend) for part in tiles] == [
        (240, 200, 25, 5),
        (30, 25, 200, 40),
        (360, 288, 36, 9),
        (45, 36, 288, 72),
    ]


# --- config ---


def test_published_config_survives_the_round_trip():
    case = read_golden()
    given = {key: value for key, value in case.config.items() if key != "tiling_for_tiled_variant"}
    config = CogVideoXConfig.from_original(given)
    assert CogVideoXConfig.from_original(config.to_original()) == config
    assert config.scale == (1.15258426,) * 4
    assert CogVideoXConfig.from_original({"scaling_factor": 0.7}) == SIZES["5b"] != SIZES["2b"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"encode_chunk_frames": 6}, "multiple of 4"),
        ({"decode_chunk_latents": 0}, "1 or more"),
        ({"decode_chunk_latents": 3, "decode_first_alone": False}, "multiple of 2"),
        ({"block_channels": (128, 256)}, "give 4"),
        ({"block_channels": (128, 256, 256, 500)}, "32 groups"),
        ({"tiling": True, "tile_height_px": 250}, "multiples of 8"),
        ({"scale": (1.0, 2.0)}, "2 numbers for 16 latent channels"),
    ],
)
def test_wrong_configs_are_refused_with_what_would_be_right(fields, words):
    with pytest.raises(ConfigError) as error:
        CogVideoXConfig(**fields)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"use_quant_conv": True}, "only False is supported"),
        ({"layers_per_blok": 3}, "did you mean 'layers_per_block'"),
    ],
)
def test_published_configs_of_other_models_are_refused(values, words):
    with pytest.raises(ConfigError) as error:
        CogVideoXConfig.from_original(values)
    assert words in str(error.value)


@pytest.mark.parametrize("key", ["encoder.conv_out.conv.bias", "decoder.up_blocks.1.resnets.0.norm2.conv_b.conv.bias"])
def test_a_changed_weight_is_above_tolerance(key):
    case = read_golden()
    case.weights[key][0] += 0.05
    case = dataclasses.replace(case, outputs={name: case.outputs[name] for name in ("f13.moments", "t4.decoded")})
    assert not run_case(case).is_good
