"""Open-Sora 2.0: the contract, the original's tensors, layouts of published files, sizes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.random import stream
from frameloom.models.denoisers.base import Conditions, build_fresh
from frameloom.models.denoisers.opensora2.blocks import EPS, HeadNorm
from frameloom.models.denoisers.opensora2.config import SIZES, MMDiTConfig
from frameloom.models.denoisers.opensora2.model import MMDiT
from frameloom.models.denoisers.opensora2.weights import (
    convert,
    detect_layout,
    export_original,
    load_original,
    reorder_pairs,
    split_fused,
)
from frameloom.models.registry import get_denoiser
from tests.models.denoisers.contract import DenoiserContract
from tests.parity.cases import ParityCase, ParityOutput, read_golden
from tests.parity.harness import find_runner
from tests.parity.opensora2_transformer import GUIDED_TOLERANCE

GOLDENS = Path(__file__).parents[2] / "goldens" / "open-sora-v2"
MODEL_CASES = sorted(path.stem for path in GOLDENS.glob("mmdit_*.safetensors"))
SMALL = MMDiTConfig(
    in_channels=16,
    vec_in_dim=12,
    context_in_dim=20,
    hidden_size=32,
    num_heads=2,
    depth=1,
    depth_single_blocks=2,
    axes_dim=(4, 6, 6),
    guidance_embed=True,
)

build = partial(build_fresh, MMDiT)


def read_case(name: str) -> ParityCase:
    return read_golden(GOLDENS / f"{name}.safetensors", GOLDENS)


def run(case: ParityCase) -> list[ParityOutput]:
    runner = find_runner(case)
    assert runner is not None
    return runner.run(case)


def build_awake(config: MMDiTConfig, seed: int = 0) -> MMDiT:
    model = build(config)
    generator = stream(seed, "test weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def predict(model: MMDiT) -> Tensor:
    generator = stream(0, "test inputs")
    noisy = torch.randn(2, model.config.latent_channels, 2, 4, 6, generator=generator)
    text = torch.randn(2, 5, model.config.context_in_dim, generator=generator)
    pooled = torch.randn(2, model.config.vec_in_dim, generator=generator)
    with torch.no_grad():
        return model(noisy, torch.tensor([0.3, 0.9]), {"text": text, "pooled": pooled})


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


class TestOpenSora2(DenoiserContract):
    family_name = "opensora2"
    overrides: ClassVar[dict[str, Any]] = {
        "hidden_size": 32,
        "num_heads": 2,
        "axes_dim": [4, 6, 6],
        "depth": 1,
        "depth_single_blocks": 1,
    }


class TestOpenSora2Released(DenoiserContract):
    """The layout of the released model: three projections, half-split rotary."""

    family_name = "opensora2"
    overrides: ClassVar[dict[str, Any]] = TestOpenSora2.overrides | {
        "fused_qkv": False,
        "use_liger_rope": True,
        "qkv_bias": False,
    }


class TestOpenSora2Conditioned(DenoiserContract):
    """With every condition that the family knows."""

    family_name = "opensora2"
    overrides: ClassVar[dict[str, Any]] = TestOpenSora2.overrides | {"cond_embed": True, "guidance_embed": True}
    takes = ("cond_latents", "guidance")

    def give(self, noisy_BCFHW: Tensor) -> Conditions:
        shape = (len(noisy_BCFHW), 1, *noisy_BCFHW.shape[2:])
        return {"cond_latents": torch.cat([torch.ones(shape), noisy_BCFHW], dim=1)}


@pytest.mark.parametrize("name", MODEL_CASES)
def test_golden_comparison_sees_a_changed_weight(name: str) -> None:
    case = read_case(name)
    weights = case.weights | {"double_blocks.0.txt_attn.norm.key_norm.scale": 1.5 * torch.ones(16)}
    outputs = {result.name: result for result in run(replace(case, weights=weights))}
    for state in ("double0.img", "single0.x", "sample"):
        ours = outputs[state].ours
        assert ours is not None
        assert difference(ours, outputs[state].expected) > 1e-3
    ours = outputs["block_in.img"].ours
    assert ours is not None
    assert difference(ours, outputs["block_in.img"].expected) <= 1e-5


def run_changed(case: ParityCase, weights: dict[str, Tensor], **settings: Any) -> float:
    """Distance of the prediction from the golden one, with other weights and settings."""
    changed = replace(case, config=case.config | settings, weights=weights)
    sample = next(result.ours for result in run(changed) if result.name == "sample")
    assert sample is not None
    return difference(sample, case.outputs["sample"])


def test_layouts_are_equivalent_as_recorded() -> None:
    record = json.loads((GOLDENS / "mmdit_equivalences.json").read_text())
    fused, split = read_case("mmdit_flux_like"), read_case("mmdit_split_plain_rope")
    assert run_changed(fused, split_fused(fused.weights), fused_qkv=False) <= GUIDED_TOLERANCE
    reordered = reorder_pairs(split.weights, "half-split")
    assert run_changed(split, reordered, use_liger_rope=True) <= GUIDED_TOLERANCE
    same_weights = next(value for key, value in record.items() if key.startswith("same weights"))
    assert run_changed(split, split.weights, use_liger_rope=True) == pytest.approx(same_weights, abs=1e-4)


def test_forgetting_the_norm_scales_is_not_equivalent() -> None:
    case = read_case("mmdit_split_plain_rope")
    scales = {key: value for key, value in case.weights.items() if key.endswith(".scale")}
    wrong = reorder_pairs(case.weights, "half-split") | scales
    assert run_changed(case, wrong, use_liger_rope=True) > 1e-3


@pytest.mark.parametrize("layout", ["fused", "split", "diffusers"])
@pytest.mark.parametrize("config", [SMALL, replace(SMALL, fused_qkv=False, use_liger_rope=True)])
def test_a_model_survives_every_published_layout(layout: Any, config: MMDiTConfig) -> None:
    model = build_awake(config)
    tensors = export_original(model, layout)
    assert detect_layout(tensors) == layout
    other = build_awake(config, seed=1)
    expected = predict(model)
    assert difference(predict(other), expected) > 1e-2
    load_original(other, tensors)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_published_flux_file_becomes_a_half_split_video_model() -> None:
    flux = build_awake(SMALL)
    video = build(replace(SMALL, fused_qkv=False, use_liger_rope=True, cond_embed=True))
    load_original(video, flux.state_dict())
    assert difference(predict(video), predict(flux)) <= 1e-5
    assert not video.state_dict()["cond_in.weight"].any()


def test_a_guidance_embedding_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(replace(SMALL, guidance_embed=False))
    monkeypatch.setattr(logging.getLogger("frameloom"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        load_original(model, build_awake(SMALL).state_dict())
    assert "guidance embedding is left out" in caplog.text


def test_an_unpublished_pairing_is_said_aloud(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(replace(SMALL, use_liger_rope=True))
    monkeypatch.setattr(logging.getLogger("frameloom"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        load_original(model, build_awake(SMALL).state_dict())
    assert "published fused files have pairwise ones" in caplog.text


def test_explicit_pairing_re_orders_the_same_layout() -> None:
    source = build_awake(SMALL)
    model = build(replace(SMALL, use_liger_rope=True))
    load_original(model, source.state_dict(), pairing="pairwise")
    assert difference(predict(model), predict(source)) <= 1e-5


def test_a_file_that_does_not_fit_is_refused_with_a_list() -> None:
    model = build(SMALL)
    tensors = build_awake(SMALL).state_dict()
    tensors["img_in.weight"] = torch.zeros(32, 64)
    tensors["extra.weight"] = torch.zeros(1)
    del tensors["txt_in.bias"], tensors["single_blocks.1.linear2.weight"]
    with pytest.raises(CheckpointError) as error:
        load_original(model, tensors)
    message = str(error.value)
    assert "2 missing (single_blocks.1.linear2.weight, txt_in.bias)" in message
    assert "1 unexpected (extra.weight)" in message
    assert "img_in.weight is 32x64, the model has 32x16" in message


@pytest.mark.parametrize("layout", ["fused", "split", "diffusers"])
def test_a_damaged_file_of_any_layout_is_refused(layout: Any) -> None:
    complete = export_original(build_awake(SMALL), layout)
    model = build(SMALL)
    for key in complete:
        with pytest.raises(CheckpointError, match="does not fit"):
            load_original(model, {name: value for name, value in complete.items() if name != key})
    load_original(model, complete)


def test_a_file_of_another_family_is_refused() -> None:
    with pytest.raises(CheckpointError, match="none of its 1 tensors"):
        load_original(build(SMALL), {"down_blocks.0.weight": torch.zeros(1)})


def test_a_used_condition_input_cannot_be_written_for_diffusers() -> None:
    model = build_awake(replace(SMALL, cond_embed=True))
    with pytest.raises(CheckpointError, match="no condition input"):
        export_original(model, "diffusers")
    assert "cond_in.weight" in export_original(model, "split")


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, fused_qkv=False, use_liger_rope=True)])
def test_diffusers_flux_computes_the_same(config: MMDiTConfig) -> None:
    diffusers = pytest.importorskip("diffusers")
    flux = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=config.in_channels,
        num_layers=config.depth,
        num_single_layers=config.depth_single_blocks,
        attention_head_dim=config.head_dim,
        num_attention_heads=config.num_heads,
        joint_attention_dim=config.context_in_dim,
        pooled_projection_dim=config.vec_in_dim,
        guidance_embeds=True,
        axes_dims_rope=config.axes_dim,
    ).eval()
    model = build_awake(config)
    flux.load_state_dict(export_original(model, "diffusers"))
    generator = stream(0, "test flux")
    tokens = torch.randn(2, 12, config.in_channels, generator=generator)
    text = torch.randn(2, 5, config.context_in_dim, generator=generator)
    pooled = torch.randn(2, config.vec_in_dim, generator=generator)
    timestep, guidance = torch.tensor([0.3, 0.9]), torch.tensor([4.0, 7.5])
    table = model.rotary.get((2, 2, 3), 5, device=torch.device("cpu"))
    positions = torch.cartesian_prod(torch.arange(2.0), torch.arange(2.0), torch.arange(3.0))
    with torch.no_grad():
        ours = model.predict_tokens(tokens, text, timestep, pooled, table, guidance_B=guidance)
        theirs = flux(
            hidden_states=tokens,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=timestep,
            img_ids=positions,
            txt_ids=torch.zeros(5, 3),
            guidance=guidance,
            return_dict=False,
        )[0]
    assert difference(ours, theirs) <= 2e-5


@pytest.mark.parametrize(
    ("size", "num_parameters", "num_entries"),
    [
        ("tiny", 1_887_904, 80),
        ("small", 10_207_136, 104),
        ("11b", 11_891_390_528, 1082),
        ("11b-dcae", 11_891_971_200, 1082),
        ("flux-dev", 11_901_408_320, 780),
    ],
)
def test_sizes_have_the_stated_counts(size: str, num_parameters: int, num_entries: int) -> None:
    with torch.device("meta"):
        model = build(SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert len(model.state_dict()) == num_entries


def test_a_released_model_loads_onto_meta_shapes() -> None:
    config = replace(SMALL, fused_qkv=False, use_liger_rope=True)
    with torch.device("meta"):
        model = build(config)
    source = build_awake(config)
    load_original(model, source.state_dict())
    assert torch.equal(predict(model), predict(source))


def test_conversion_to_the_own_form_copies_nothing() -> None:
    tensors = build(SMALL).state_dict()
    same = convert(tensors, to="fused", has="pairwise", wants="pairwise")
    assert all(same[key] is tensor for key, tensor in tensors.items())


def test_fresh_models_start_from_a_zero_prediction_only_with_zero_init() -> None:
    assert not predict(build(SMALL)).any()
    assert predict(build(replace(SMALL, init="default"))).abs().max() > 1e-2


def test_fresh_layers_have_the_usual_bounds() -> None:
    layer = build(SMALL).img_in
    for parameter in (layer.weight, layer.bias):
        assert 0.9 < float(parameter.detach().abs().max()) * 16**0.5 <= 1


def test_a_normalized_pooled_vector_has_no_length() -> None:
    model = build_awake(replace(SMALL, normalize_vec=True))
    plain = build_awake(SMALL)

    def predict_from(model: MMDiT, pooled: Tensor) -> Tensor:
        conditions = {"text": torch.ones(1, 5, 20), "pooled": pooled}
        return model(torch.ones(1, 4, 1, 2, 2), torch.ones(1), conditions)

    pooled = torch.randn(1, 12, generator=stream(0, "test pooled"))
    with torch.no_grad():
        assert difference(predict_from(model, pooled), predict_from(model, 7 * pooled)) <= 1e-4
        assert difference(predict_from(plain, pooled), predict_from(plain, 7 * pooled)) > 1e-2


def test_absolute_positions_tell_tokens_of_a_flat_video_apart() -> None:
    """Without blocks, so that nothing else can: rotary positions work inside of attention alone."""
    flat, text, pooled = torch.ones(1, 4, 2, 4, 4), torch.zeros(1, 1, 20), torch.zeros(1, 12)
    rotary_alone = replace(SMALL, depth=0, depth_single_blocks=0)

    def spread_over_tokens(config: MMDiTConfig) -> float:
        with torch.no_grad():
            prediction = build_awake(config)(flat, torch.ones(1), {"text": text, "pooled": pooled})
        return float(prediction[..., ::2, ::2].std((2, 3, 4)).max())  # the same corner of every patch

    assert spread_over_tokens(rotary_alone) < 1e-6
    assert spread_over_tokens(replace(rotary_alone, absolute_positions=True)) > 0.1


def test_released_size_is_fitted_to_the_encoders() -> None:
    configure = get_denoiser("opensora2").configure
    config = configure("11b-dcae", latent_channels=32, text_width=100, pooled_width=50, overrides={"patch_size": 2})
    assert (config.in_channels, config.context_in_dim, config.vec_in_dim) == (128, 100, 50)
    assert config.latent_channels == 32


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hiden_size": 64}, "did you mean 'hidden_size'"),
        ({"in_channels": 64}, "follows from the autoencoder"),
        ({"depth": True}, "should be like"),
        ({"depth": "4"}, "should be like"),
        ({"patch_size": "2"}, "should be like"),
        ({"depth": -1}, "must be at least 0"),
        ({"hidden_size": 130}, "not a multiple of num_heads"),
        ({"hidden_size": 256}, "add up to hidden_size / num_heads = 64"),
        ({"axes_dim": [9, 11, 12]}, "must be even whole"),
        ({"init": "random"}, "choose zero or default"),
    ],
)
def test_a_wrong_setting_is_refused(overrides: dict[str, Any], message: str) -> None:
    configure = get_denoiser("opensora2").configure
    with pytest.raises(ConfigError, match=message):
        configure("tiny", latent_channels=8, text_width=384, pooled_width=384, overrides=overrides)


@pytest.mark.parametrize("dim", [1, 2])
def test_the_norm_of_heads_has_the_numbers_and_gradients_of_its_formula(dim: int) -> None:
    """Heads are parts of a larger tensor, as projections give them, in two orders of memory."""
    generator = stream(0, "test heads")
    norm, exact_scale = HeadNorm(8), torch.rand(8, generator=generator, dtype=torch.float64).requires_grad_()
    norm.scale.data = exact_scale.detach().float()
    joint = torch.randn([5, 3, 3, 4, 8], generator=generator).select(dim, 1)
    ours, exact = joint.requires_grad_(), joint.detach().double().requires_grad_()
    push = torch.randn(ours.shape, generator=generator)
    made = norm(ours)
    formula = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt() * exact_scale
    made.backward(push)
    formula.backward(push.double())
    assert difference(made.detach(), formula.detach()) <= 2e-6
    assert ours.grad is not None and exact.grad is not None and difference(ours.grad, exact.grad) <= 1e-5
    assert norm.scale.grad is not None and exact_scale.grad is not None
    assert difference(norm.scale.grad, exact_scale.grad) <= 1e-5
    assert difference(ours.grad, push) > 0.1
