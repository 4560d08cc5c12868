"""CogVideoX-Fun: the contract, the original's tensors, sizes, published files, shapes that are refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from frameloom.builders.published import find_config_reader
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.random import stream
from frameloom.models.denoisers.base import build_fresh
from frameloom.models.denoisers.cogvideox_fun.config import SIZES, CogVideoXFunConfig
from frameloom.models.denoisers.cogvideox_fun.model import CogVideoXFunTransformer
from frameloom.models.denoisers.cogvideox_fun.weights import (
    export_original,
    load_original,
    read_config,
    write_published,
)
from frameloom.models.registry import get_denoiser
from frameloom.models.text.base import TextStates
from tests.models.denoisers.contract import DenoiserContract
from tests.parity.cases import ParityCase, ParityOutput, read_golden
from tests.parity.cogvideox_fun_transformer import name_rotary
from tests.parity.harness import find_runner

GOLDENS = Path(__file__).parents[2] / "goldens" / "cogvideox-fun"
MODEL_CASES = sorted(path.name for path in GOLDENS.glob("transformer_*.safetensors"))
ROTARY = CogVideoXFunConfig(
    num_attention_heads=2,
    num_layers=2,
    attention_head_dim=16,
    in_channels=4,
    time_embed_dim=12,
    context_in_dim=20,
    max_text_seq_length=5,
    sample_height=4,
    sample_width=6,
    sample_frames=13,
    use_rotary_positional_embeddings=True,
)

build = partial(build_fresh, CogVideoXFunTransformer)
ADDED = replace(ROTARY, use_rotary_positional_embeddings=False)
LEARNED = replace(ROTARY, use_learned_positional_embeddings=True)
PAIRED = replace(ROTARY, patch_size_t=2, sample_height=8, sample_width=8)
KINDS = {"rotary": ROTARY, "added": ADDED, "learned": LEARNED, "paired": PAIRED}


def read_case(name: str) -> ParityCase:
    return read_golden(GOLDENS / name, GOLDENS)


def run(case: ParityCase) -> list[ParityOutput]:
    runner = find_runner(case)
    assert runner is not None
    return runner.run(case)


def build_awake(config: CogVideoXFunConfig, seed: int = 0) -> CogVideoXFunTransformer:
    model = build(config)
    generator = stream(seed, "test weights")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model


def predict(
    model: CogVideoXFunTransformer,
    size: tuple[int, int, int] = (2, 4, 6),
    beside: Tensor | None = None,
    timestep: tuple[float, float] = (0.3, 0.999),
) -> Tensor:
    generator = stream(0, "test inputs")
    noisy = torch.randn(2, model.config.in_channels, *size, generator=generator)
    text = torch.randn(2, 5, model.config.context_in_dim, generator=generator)
    states = TextStates(text, torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 0))
    with torch.no_grad():
        given = {} if beside is None else {"cond_latents": beside}
        return model(noisy, torch.tensor(timestep), {**states.conditions(), **given})


def difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


class TestCogVideoXFun(DenoiserContract):
    family_name = "cogvideox_fun"
    overrides: ClassVar[dict[str, Any]] = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "time_embed_dim": 16,
    }
    uses_pooled = False
    takes: ClassVar[tuple[str, ...]] = ("dropout_seeds",)


class TestCogVideoXFun2B(TestCogVideoXFun):
    """Positions are added, and a mask and a masked latent stand beside."""

    overrides: ClassVar[dict[str, Any]] = TestCogVideoXFun.overrides | {
        "use_rotary_positional_embeddings": False,
        "max_text_seq_length": 5,
        "condition": "inpaint",
    }
    takes: ClassVar[tuple[str, ...]] = ("cond_latents", "dropout_seeds")


class TestCogVideoXFunV15(TestCogVideoXFun):
    """Two latent frames per token."""

    overrides: ClassVar[dict[str, Any]] = TestCogVideoXFun.overrides | {
        "patch_size_t": 2,
        "condition": "control",
        "sample_height": 32,
        "sample_width": 32,
    }
    longest_clip = 13
    latent_sizes: ClassVar[list[tuple[int, int, int]]] = [(2, 4, 4), (4, 4, 8), (2, 8, 4)]
    takes: ClassVar[tuple[str, ...]] = ("cond_latents", "dropout_seeds")
    rule_cases: ClassVar[list[tuple[tuple[int, int, int], str]]] = [
        *TestCogVideoXFun.rule_cases,
        ((3, 4, 4), r"3 latent frames.*a multiple of 2; choose a clip of 1, 5, 13, 21"),
        ((2, 200, 4), r"100x2 patches are more than"),
    ]


@pytest.mark.parametrize("name", MODEL_CASES)
def test_golden_comparison_sees_a_changed_weight(name: str) -> None:
    case = read_case(name)
    key = "transformer_blocks.0.attn1.norm_k.weight"
    outputs = {result.name: result for result in run(replace(case, weights=case.weights | {key: -case.weights[key]}))}
    first = next(name.partition(".")[0] for name in outputs if name.endswith("patch_embed"))
    for state, is_changed in (
        ("patch_embed", False),
        ("temb", False),
        ("block0.attn.hidden_states", True),
        ("sample", True),
    ):
        result = outputs[f"{first}.{state}"]
        assert result.ours is not None
        assert (difference(result.ours, result.expected) > 1e-4) == is_changed, state


def expect_keys(config: CogVideoXFunConfig) -> dict[str, tuple[int, ...]]:
    """The published inventory, written out from its table."""
    width, inputs = config.width, config.input_channels
    linear = config.patch_size_t > 1
    keys = {
        "patch_embed.proj.weight": (width, inputs * 8) if linear else (width, inputs, 2, 2),
        "patch_embed.proj.bias": (width,),
        "patch_embed.text_proj.weight": (width, 4096),
        "patch_embed.text_proj.bias": (width,),
        "time_embedding.linear_1.weight": (512, width),
        "time_embedding.linear_1.bias": (512,),
        "time_embedding.linear_2.weight": (512, 512),
        "time_embedding.linear_2.bias": (512,),
        "norm_final.weight": (width,),
        "norm_final.bias": (width,),
        "norm_out.linear.weight": (2 * width, 512),
        "norm_out.linear.bias": (2 * width,),
        "norm_out.norm.weight": (width,),
        "norm_out.norm.bias": (width,),
        "proj_out.weight": (128 if linear else 64, width),
        "proj_out.bias": (128 if linear else 64,),
    }
    for index in range(config.num_layers):
        block = f"transformer_blocks.{index}."
        for norm in ("norm1", "norm2"):
            keys |= {f"{block}{norm}.linear.weight": (6 * width, 512), f"{block}{norm}.linear.bias": (6 * width,)}
            keys |= {f"{block}{norm}.norm.{leaf}": (width,) for leaf in ("weight", "bias")}
        for norm in ("norm_q", "norm_k"):
            keys |= {f"{block}attn1.{norm}.{leaf}": (64,) for leaf in ("weight", "bias")}
        for layer in ("to_q", "to_k", "to_v", "to_out.0"):
            keys |= {f"{block}attn1.{layer}.weight": (width, width), f"{block}attn1.{layer}.bias": (width,)}
        keys |= {f"{block}ff.net.0.proj.weight": (4 * width, width), f"{block}ff.net.0.proj.bias": (4 * width,)}
        keys |= {f"{block}ff.net.2.weight": (width, 4 * width), f"{block}ff.net.2.bias": (width,)}
    return keys


@pytest.mark.parametrize(
    ("size", "num_parameters", "num_keys"),
    [
        ("2b", 1_693_783_872, 736),
        ("2b-inpaint", 1_693_914_432, 736),
        ("2b-control", 1_693_906_752, 736),
        ("5b", 5_570_283_072, 1024),
        ("5b-inpaint", 5_570_491_968, 1024),
        ("5b-1.1-inpaint", 5_570_491_968, 1024),
        ("5b-control", 5_570_479_680, 1024),
        ("5b-1.5", 5_570_676_352, 1024),
        ("5b-1.5-inpaint", 5_571_094_144, 1024),
    ],
)
def test_a_published_size_has_the_published_keys(size: str, num_parameters: int, num_keys: int) -> None:
    with torch.device("meta"):
        model = build(SIZES[size])
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert shapes == expect_keys(SIZES[size])
    assert len(shapes) == num_keys
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_tiny_is_tiny() -> None:
    assert sum(parameter.numel() for parameter in build(SIZES["tiny"]).parameters()) == 1_710_368


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_survives_its_published_form(kind: str) -> None:
    model, other = build_awake(KINDS[kind]), build_awake(KINDS[kind], seed=1)
    assert difference(predict(other), predict(model)) > 1e-2
    load_original(other, export_original(model))
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    with torch.device("meta"):
        shapes = build(KINDS[kind])
    load_original(shapes, export_original(model))
    assert torch.equal(predict(shapes), predict(model))


@pytest.mark.parametrize("condition", ["inpaint", "control"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_to_video_file_becomes_a_conditioned_model(kind: str, condition: Any) -> None:
    source = build_awake(KINDS[kind])
    model = build_awake(replace(KINDS[kind], condition=condition), seed=1)
    load_original(model, source.state_dict())
    beside = torch.randn(2, model.config.cond_channels, 2, 4, 6, generator=stream(0, "test beside"))
    assert difference(predict(model, beside=beside), predict(source)) <= 1e-6
    awake = build_awake(replace(KINDS[kind], condition=condition))
    assert difference(predict(awake, beside=beside), predict(awake)) > 1e-2


@pytest.mark.parametrize("kind", ["rotary", "paired"])
def test_inputs_that_a_model_lacks_are_cut_off_with_a_warning(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = build_awake(replace(KINDS[kind], condition="inpaint")), build(KINDS[kind])
    monkeypatch.setattr(logging.getLogger("frameloom"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        load_original(model, source.state_dict())
    assert "the last ones are cut off" in caplog.text
    assert difference(predict(model), predict(source)) <= 1e-6


def test_a_stray_table_is_left_out_and_a_learned_one_is_not() -> None:
    model = build(ADDED)
    load_original(model, build_awake(ADDED).state_dict() | {"pos_embedding": torch.zeros(1)})
    learned = build_awake(LEARNED)
    plain = {key: value for key, value in learned.state_dict().items() if "pos_embedding" not in key}
    with pytest.raises(CheckpointError, match=r"1 missing \(patch_embed.pos_embedding\)"):
        load_original(build(LEARNED), plain)
    load_original(build(ROTARY), learned.state_dict())


def test_a_file_that_does_not_fit_is_refused_with_a_list() -> None:
    tensors = build_awake(ROTARY).state_dict()
    tensors["proj_out.weight"] = torch.zeros(3, 3)
    tensors["extra.weight"] = torch.zeros(1)
    del tensors["norm_final.bias"]
    with pytest.raises(CheckpointError) as error:
        load_original(build(ROTARY), tensors)
    message = str(error.value)
    assert "1 missing (norm_final.bias)" in message
    assert "1 unexpected (extra.weight)" in message
    assert "proj_out.weight is 3x3, the model has 16x32" in message


def test_a_convolution_does_not_become_a_linear_layer() -> None:
    with pytest.raises(CheckpointError, match=r"patch_embed.proj.weight is 32x4x2x2, the model has 32x32"):
        load_original(build(PAIRED), build(ROTARY).state_dict())


OTHER_VALUES: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.3},
    "plain norms": {"norm_elementwise_affine": False, "norm_eps": 0.1},
    "sines first": {"flip_sin_to_cos": False},
    "shifted": {"freq_shift": 1},
    **{name: {"timestep_activation_fn": name} for name in ("gelu", "mish", "relu")},
}


@pytest.mark.parametrize("kind", [*KINDS, *OTHER_VALUES])
def test_diffusers_computes_the_same_from_a_sharded_export(kind: str, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = build_awake(replace(ROTARY, **OTHER_VALUES[kind]) if kind in OTHER_VALUES else KINDS[kind]).eval()
    if kind in OTHER_VALUES:
        assert read_config(write_published(model.config)) == model.config
        plain = build(ROTARY).eval()
        if kind != "plain norms":
            plain.load_state_dict(model.state_dict())
        assert torch.equal(predict(plain), predict(model)) == (kind == "dropout")
    settings = {key: value for key, value in write_published(model.config).items() if not key.startswith("_")}
    settings.pop("add_noise_in_inpaint_model")  # a key of CogVideoX-Fun alone
    other = diffusers.CogVideoXTransformer3DModel(**settings).eval()
    other.load_state_dict(export_original(model))
    # The base grid: diffusers has other rules for positions elsewhere.
    noisy = torch.randn(2, 4, 4, 4, 6, generator=stream(0, "test noisy"))
    text, index = torch.randn(2, 5, 20, generator=stream(0, "test text")), torch.tensor([3, 999])
    tables = name_rotary(model, (4, 4, 6))
    with torch.no_grad():
        theirs = other(
            noisy, text, index, image_rotary_emb=tuple(tables.values()) if tables else None, return_dict=False
        )[0]
        ours = model(noisy.transpose(1, 2), index / 1000, {"text": text}).transpose(1, 2)
    assert difference(ours, theirs) <= 1e-5
    other.save_pretrained(tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    again = build(model.config)
    load_original(again, {key: value for shard in shards for key, value in load_file(shard).items()})
    assert torch.equal(predict(again), predict(model))


@pytest.mark.parametrize("size", SIZES)
def test_a_published_config_describes_the_model(size: str) -> None:
    config = SIZES[size]
    assert read_config(write_published(config), mask_scale=config.mask_scale) == config


def test_the_config_of_v15_inpaint_is_read_as_published() -> None:
    published = {
        "_class_name": "CogVideoXTransformer3DModel",
        "_diffusers_version": "0.31.0.dev0",
        "add_noise_in_inpaint_model": True,
        "in_channels": 33,
        "out_channels": 16,
        "num_attention_heads": 48,
        "num_layers": 42,
        "patch_bias": False,
        "patch_size_t": 2,
        "sample_frames": 85,
        "sample_height": 384,
        "sample_width": 680,
        "use_rotary_positional_embeddings": True,
        "activation_fn": "gelu-approximate",
    }
    assert read_config(published, mask_scale=0.7) == SIZES["5b-1.5-inpaint"]


def test_recipes_and_conversions_find_the_reader_of_a_published_config() -> None:
    assert find_config_reader(get_denoiser("cogvideox_fun")) is read_config


@pytest.mark.parametrize(
    ("published", "message"),
    [
        ({"ofs_embed_dim": 512}, "ofs_embed_dim is 512; only None"),
        ({"activation_fn": "gelu"}, "activation_fn is 'gelu'"),
        ({"num_layer": 2}, "did you mean 'num_layers'"),
        ({"in_channels": 20}, r"known are 16 \(text to video\), 33 \(inpaint\) and 32 \(control\)"),
    ],
)
def test_a_config_of_another_model_is_refused(published: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(published)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_layer": 2}, "did you mean 'num_layers'"),
        ({"in_channels": 33}, "follows from the autoencoder"),
        ({"num_layers": 0}, "must be at least 1"),
        ({"timestep_activation_fn": "tanh"}, "choose one of silu, gelu, mish, relu"),
        ({"freq_shift": 64}, "must be below 64"),
        ({"condition": "depth"}, "choose one of none, inpaint, control"),
        ({"attention_head_dim": 24}, "need a multiple of 16"),
        ({"use_rotary_positional_embeddings": False, "patch_size_t": 2}, "needs rotary positions alone"),
        (
            {"use_rotary_positional_embeddings": False, "use_learned_positional_embeddings": True},
            "no published model is like that",
        ),
        ({"sample_height": 1}, "hold no token"),
    ],
)
def test_a_wrong_setting_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_denoiser("cogvideox_fun").configure(
            "tiny", latent_channels=8, text_width=384, pooled_width=0, overrides=overrides
        )


def test_without_a_condition_a_model_sees_zeros() -> None:
    model = build_awake(replace(ROTARY, condition="control"))
    assert torch.equal(predict(model), predict(model, beside=torch.zeros(2, 4, 2, 4, 6)))
    assert difference(predict(model), predict(model, beside=torch.ones(2, 4, 2, 4, 6))) > 1e-2


def test_timesteps_are_whole_indices_in_any_precision() -> None:
    steps = (torch.arange(1000, dtype=torch.float64) / 1000).float()
    assert torch.equal((steps * 1000).round(), torch.arange(1000.0))
    model = build_awake(ROTARY).to(torch.bfloat16)
    assert torch.equal(predict(model, timestep=(0.3, 0.999)), predict(model, timestep=(0.3002, 0.9988)))
    # In bfloat16 both would be 1000.
    assert not torch.equal(predict(model, timestep=(0.3, 0.999)), predict(model, timestep=(0.3, 0.997)))


def test_an_image_of_v15_is_not_the_first_frame_of_a_repeated_clip() -> None:
    model = build_awake(PAIRED)
    image = torch.randn(1, 4, 1, 4, 6, generator=stream(0, "test image"))
    conditions, timestep = {"text": torch.ones(1, 5, 20)}, torch.tensor([0.5])
    with torch.no_grad():
        alone = model(image, timestep, conditions)
        padded = model(torch.cat([image, torch.zeros_like(image)], dim=2), timestep, conditions)
        repeated = model(torch.cat([image, image], dim=2), timestep, conditions)
    assert alone.shape == image.shape
    assert torch.equal(alone, padded[:, :, :1])
    assert difference(alone, repeated[:, :, :1]) > 1e-3
