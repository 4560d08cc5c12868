"""B batch, C channels, F frames, H height, W width."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from frameloom.builders.vae import configure_vae
from frameloom.config.schema.recipe import VAESection
from frameloom.core.errors import ConfigError
from frameloom.models.vaes.base import EncodePolicy
from frameloom.models.vaes.wfvae.config import SIZES, WFVAEConfig
from frameloom.models.vaes.wfvae.model import WFVAE
from frameloom.models.vaes.wfvae.wavelet import Haar
from frameloom.models.vaes.wfvae.weights import load_original
from tests.models.vaes.contract import VAEContract, draw_clip
from tests.parity.cases import read_case
from tests.parity.harness import CaseResult, run_case
from tests.parity.vaes import HAAR_TOLERANCE, WFVAE_TOLERANCE
from tests.parity.weights import draw_recipe_weight

GOLDENS = Path(__file__).parents[2] / "goldens" / "open-sora-plan"
MODEL_CASES = ["wfvae_layernorm", "wfvae_nearest_noattn", "wfvae_888_variant", "wfvae_groupnorm_recipe"]
NARROW = WFVAEConfig(
    latent_channels=4,
    base_channels=4,
    encoder_res_blocks=1,
    decoder_res_blocks=1,
    encoder_flow_channels=4,
    decoder_flow_channels=4,
    connect_res_blocks=1,
)


def draw_weights(model: WFVAE, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        key: torch.from_numpy(draw_recipe_weight(key, tuple(tensor.shape), seed=seed))
        for key, tensor in model.state_dict().items()
        if "wavelet" not in key
    }


def build(config: WFVAEConfig, seed: int = 0) -> WFVAE:
    model = WFVAE(config).eval()
    load_original(model, draw_weights(model, seed))
    return model


class TestWFVAE(VAEContract):
    family_name = "wfvae"
    narrow: ClassVar = dataclasses.asdict(NARROW)
    clip = (9, 16, 24)
    wrong_frames = 6


# --- goldens ---


@cache
def run_golden(name: str) -> CaseResult:
    return run_case(read_case(GOLDENS / f"{name}.safetensors", name=name))


def test_only_statistics_and_groupnorm_pieces_are_not_compared():
    for name in MODEL_CASES:
        result = run_golden(name)
        left_out = [output.name for output in result.outputs if output.max_abs_error is None]
        assert all("max_abs_diff" in output or name == "wfvae_groupnorm_recipe" for output in left_out)


def test_pieces_equal_the_whole_where_the_published_ones_do_not():
    result = run_golden("wfvae_layernorm")
    output = next(row for row in result.outputs if row.name == "chunk_lossy21.decoded_from_unchunked_mean")
    assert output.verdict == "deviation"
    assert "equals the unchunked" in output.note
    assert output.max_abs_error <= WFVAE_TOLERANCE


@pytest.mark.parametrize("key", ["decoder.layer.0.conv1.conv.weight", "encoder.wavelet_tranform_l2.g_conv.conv.weight"])
def test_a_changed_weight_is_above_tolerance(key):
    case = read_case(GOLDENS / "wfvae_layernorm.safetensors", name="case")
    case.weights[key][0, 0, 0, 0, 0] += 0.05
    assert not run_case(case).is_good


def test_haar_goldens_are_within_tolerance_and_exact_taps_are_not():
    case = read_case(GOLDENS / "haar_wavelets.safetensors", name="case")
    result = run_case(case)
    assert result.is_good
    assert result.num_compared == len(case.outputs)
    exact = case.outputs["x3d_9.fwd3d"] / 0.3536 * 8**-0.5
    assert (exact - case.outputs["x3d_9.fwd3d"]).abs().max() > HAAR_TOLERANCE


def test_haar_there_and_back_gains_what_the_published_taps_gain():
    pixels = draw_clip(1, 3, 9, 8, 8, dtype=torch.float64)
    back = Haar(in_time=True, inverse=True).double()(Haar(in_time=True).double()(pixels))
    assert torch.allclose(back, pixels * 8 * 0.3536**2, atol=1e-6)
    assert not torch.allclose(back, pixels, atol=1e-6)


# --- state dict and published weights ---


@pytest.mark.parametrize("name", ["WFVAE_4dim", "WFVAE_8dim_default_energy"])
def test_full_size_keys_and_shapes_equal_the_manifest(name):
    manifest = json.loads((GOLDENS / "state_dict_manifest.json").read_text())[name]
    with torch.device("meta"):
        model = WFVAE(WFVAEConfig.from_original(manifest["config"]))
    assert {key: list(tensor.shape) for key, tensor in model.state_dict().items()} == manifest["keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) == manifest["n_parameters"]


def test_released_size_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = WFVAE(SIZES["8ch"])
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in model.parameters()) == 147_347_724
    assert sum(parameter.numel() for parameter in trainable) == 147_347_660
    assert (len(model.state_dict()), len(trainable)) == (244, 220)


def test_every_spelling_of_a_published_file_loads():
    model = WFVAE(NARROW)
    weights = draw_weights(model)
    filters = {key: tensor for key, tensor in model.state_dict().items() if "wavelet" in key}
    later = {key.replace("tranform", "transform"): tensor for key, tensor in filters.items()}
    spellings = [
        weights,
        weights | filters,
        weights | later | {"encoder.wavelet_transform_in.h_conv.conv.weight": torch.zeros(1, 1, 2, 2, 2)},
        {f"module.{key}": tensor for key, tensor in weights.items()},
    ]
    clip = draw_clip(1, 3, 5, 8, 8)
    with torch.no_grad():
        expected = build(NARROW).encode_raw(clip)
        for tensors in spellings:
            other = build(NARROW, seed=1)
            assert not torch.equal(other.encode_raw(clip), expected)
            load_original(other, tensors)
            assert torch.equal(other.encode_raw(clip), expected)


# --- pieces ---

VARIANTS = [
    NARROW,
    dataclasses.replace(NARROW, time_interpolation="nearest"),
    dataclasses.replace(NARROW, level1_temporal=True),
    dataclasses.replace(NARROW, level1_temporal=True, level2_temporal=False),
]


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("num_latents", range(1, 9))
def test_pieces_equal_the_whole_for_every_length_and_size(config, num_latents):
    model = build(config).double()
    stride = model.strides[0]
    clip = draw_clip(1, 3, 1 + stride * (num_latents - 1), 8, 16, dtype=torch.float64)
    with torch.no_grad():
        raw = model.encode_raw(clip)
        latent = raw[:, :4]
        pixels = model.decode(latent)
        assert latent.shape[2] == model.latent_frames(clip.shape[2]) == num_latents
        assert pixels.shape == clip.shape
        for size in (1, 2, 3):
            model.use(EncodePolicy(chunk_frames=size * stride))
            assert (model.encode_raw(clip) - raw).abs().max() < 1e-11
            assert (model.decode(latent) - pixels).abs().max() < 1e-11


def test_pieces_without_memory_differ_from_the_whole():
    model = build(NARROW).double()
    latent = draw_clip(1, 4, 5, 1, 2, dtype=torch.float64)
    with torch.no_grad():
        apart = torch.cat([model.decode(latent[:, :, :3]), model.decode(latent[:, :, 3:])], dim=2)
        assert (apart - model.decode(latent)[:, :, : apart.shape[2]]).abs().max() > 1e-3


def test_no_layer_gets_more_frames_than_a_piece_needs():
    model = build(NARROW)
    seen = []
    model.encoder.down2[1].conv1.conv.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[2]))
    model.use(EncodePolicy(chunk_frames=8))
    with torch.no_grad():
        model.encode(draw_clip(1, 3, 41, 8, 8))
    assert len(seen) == 5
    assert max(seen) <= 8 // 2 + 1 + 2


def test_piece_sizes_and_norms_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="multiple of 4"):
        WFVAE(NARROW).use(EncodePolicy(chunk_frames=6))
    wide = dataclasses.replace(
        NARROW, base_channels=32, encoder_flow_channels=32, decoder_flow_channels=32, norm="groupnorm"
    )
    with torch.device("meta"):
        model = WFVAE(wide)
    with pytest.raises(ConfigError, match="groupnorm"):
        model.use(EncodePolicy(chunk_frames=4))


# --- the model's own claims ---


def test_the_first_latent_is_that_of_the_first_frame_as_an_image():
    model = build(NARROW).double()
    clip = draw_clip(2, 3, 9, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        whole, image = model.encode_raw(clip), model.encode_raw(clip[:, :, :1])
        assert (whole[:, :, :1] - image).abs().max() < 1e-12
        assert (whole[:, :, 1:2] - image).abs().max() > 1e-3
        assert (model.decode(whole[:, :4])[:, :, :1] - model.decode(image[:, :4])).abs().max() < 1e-12


def test_coefficients_come_with_the_plain_results():
    model = build(NARROW)
    clip = draw_clip(2, 3, 9, 16, 16)
    with torch.no_grad():
        moments, encoded = model.encode_with_coefficients(clip)
        pixels, decoded = model.decode_with_coefficients(moments.mode())
        assert torch.equal(moments.mean_BCFHW, model.encode(clip).mean_BCFHW)
        assert torch.equal(pixels, model.decode(moments.mode()))
    assert [tuple(level.shape) for level in encoded] == [(2, 12, 5, 4, 4), (2, 24, 3, 2, 2)]
    assert [level.shape for level in decoded] == [level.shape for level in encoded]


def test_normalize_is_shift_then_scale_and_denormalize_undoes_it():
    model = build(dataclasses.replace(NARROW, scale=(0.5, 0.6, 0.7, 0.8), shift=(1.0, 2.0, 3.0, 4.0)))
    latent = draw_clip(1, 4, 2, 1, 1)
    normal = model.normalize(latent)
    assert torch.allclose(normal[:, 1], (latent[:, 1] - 2.0) * 0.6)
    assert torch.allclose(model.denormalize(normal), latent, atol=1e-6)
    assert "scale" not in model.state_dict()


# --- config and table ---


@pytest.mark.parametrize("name", MODEL_CASES)
def test_published_config_survives_the_round_trip(name):
    config = WFVAEConfig.from_original(read_case(GOLDENS / f"{name}.safetensors", name=name).config["model"])
    assert WFVAEConfig.from_original(config.to_original()) == config
    assert WFVAEConfig(**dataclasses.asdict(config)) == config
    assert WFVAEConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert config != SIZES["8ch"]


def test_published_defaults_are_not_the_released_values():
    config = WFVAEConfig.from_original({"_class_name": "WFVAEModel"})
    assert (config.norm, config.time_interpolation, config.connect_res_blocks) == ("groupnorm", "nearest", 1)
    assert config.scale == (0.18215,) * 8


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"latent_dims": 4}, "did you mean 'latent_dim'"),
        ({"norm_type": "layer_norm"}, "did you mean 'layernorm'"),
        ({"l1_dowmsample_block": "Spatial2xTime2x3DDownsample"}, "make all four 2-D or all four 3-D"),
        ({"l2_wavelet": "x"}, "l2_wavelet"),
        ({"scale": [0.1, 0.2]}, "2 numbers for 8 latent channels"),
        ({"base_channels": 20, "norm_type": "groupnorm"}, "32 groups"),
        ({"dropout": 0.1}, "could not repeat its random draws; set it to 0"),
    ],
)
def test_wrong_configs_are_refused_with_what_would_be_right(values, words):
    with pytest.raises(ConfigError) as error:
        WFVAEConfig.from_original(values)
    assert words in str(error.value)


def test_a_recipe_cannot_switch_dropout_on():
    section = VAESection(name="wfvae", overrides={"dropout": 0.1})
    with pytest.raises(ConfigError, match=r"WFVAE: dropout is 0\.1"):
        configure_vae(section, None)
    assert configure_vae(section.model_copy(update={"overrides": {"dropout": 0.0}}), None) == SIZES[section.size]


def test_both_spellings_of_downsample_are_read():
    variant = read_case(GOLDENS / "wfvae_888_variant.safetensors", name="case").config["model"]
    right = {key.replace("dowmsample", "downsample"): value for key, value in variant.items()}
    assert right != variant
    assert WFVAEConfig.from_original(right) == WFVAEConfig.from_original(variant)
