"""LatteT2V: the contract, the original's tensors, joint clips and images, layouts of published files, sizes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.random import stream
from frameloom.distributed.sequence_parallel import SequenceGroup
from frameloom.models.denoisers.base import Conditions, build_fresh, use_sequence_group
from frameloom.models.denoisers.latte import model as blocks
from frameloom.models.denoisers.latte.config import SIZES, LatteConfig
from frameloom.models.denoisers.latte.model import LatteT2V, frame_table, picture_table, turn_table
from frameloom.models.denoisers.latte.weights import detect_layout, export_original, load_original
from frameloom.models.layers.dropout import KeyedDropout
from frameloom.models.registry import get_denoiser
from frameloom.models.text.base import TextStates
from tests.models.denoisers.contract import DenoiserContract
from tests.parity.cases import read_case
from tests.parity.harness import CaseResult, run_case

GOLDENS = Path(__file__).parents[2] / "goldens" / "open-sora-plan"
CASES = ["latte_v11", "latte_v11_rope", "latte_v11_compress_kv"]
SMALL = LatteConfig(
    context_in_dim=20, num_layers=2, num_attention_heads=2, attention_head_dim=8, sample_size=(8, 8), video_length=5
)

build = partial(build_fresh, LatteT2V)
ROPE = replace(SMALL, use_rope=True)
COMPRESSED = replace(SMALL, compress_kv_factor=2)


def denoise(
    model: LatteT2V, noisy: Tensor, timestep: Tensor, text: TextStates, given: Conditions | None = None
) -> Tensor:
    return model(noisy, timestep, {**text.conditions(), **(given or {})})


def of_images(text: TextStates) -> Conditions:
    return {"image_text": text.tokens_BKD, "image_text_mask": text.mask_BK}


def shake(model: LatteT2V, seed: int = 0) -> LatteT2V:
    generator = stream(seed, "latte test")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def build_awake(config: LatteConfig, seed: int = 0) -> LatteT2V:
    return shake(build(config, stream(seed, "latte test weights")), seed)


def draw(name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(0, name, *shape))


def make_text(name: str, batch: int, tokens: int = 5, length: int | None = None) -> TextStates:
    mask = (torch.arange(tokens) < (tokens if length is None else length)).expand(batch, -1)
    return TextStates(draw(name, batch, tokens, 20), mask, torch.zeros(batch, 1))


def predict(model: LatteT2V, frames: int = 3, text: TextStates | None = None, given: Any = None) -> Tensor:
    timestep = torch.tensor([0.25, 0.75])
    with torch.no_grad():
        states = make_text("text", 2) if text is None else text
        prediction: Tensor = denoise(model, draw("noisy", 2, 4, frames, 4, 8), timestep, states, given)
    return prediction


def difference(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).abs().max())


class TestLatte(DenoiserContract):
    family_name = "latte"
    overrides: ClassVar[dict[str, Any]] = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
    # More than one place and frame: a query with a single key learns nothing.
    default_size = (4, 4, 8)
    uses_pooled = False
    takes = ("image_text", "image_text_mask", "dropout_seeds")


class TestLatteWithRope(TestLatte):
    overrides: ClassVar[dict[str, Any]] = TestLatte.overrides | {"num_layers": 1, "use_rope": True, "learn_sigma": True}


class TestLatteCompressed(TestLatte):
    overrides: ClassVar[dict[str, Any]] = TestLatte.overrides | {"num_layers": 1, "compress_kv_factor": 2}


# --- goldens ---


def run_golden(name: str, **weights: Tensor) -> CaseResult:
    case = read_case(GOLDENS / f"{name}.safetensors", name=name)
    case.weights.update(weights)
    return run_case(case)


@pytest.mark.parametrize("name", CASES)
def test_a_changed_weight_is_above_tolerance(name: str) -> None:
    key = "temporal_transformer_blocks.1.attn1.to_v.weight"
    weight = read_case(GOLDENS / f"{name}.safetensors", name=name).weights[key]
    assert not run_golden(name, **{key: weight * 1.01}).is_good


def test_the_two_published_joint_results_differ_by_the_temporal_positions() -> None:
    case = read_case(GOLDENS / "latte_v11.safetensors", name="case")
    with_positions, without = (case.outputs[f"joint_train_{kind}.sample"] for kind in ("ckpt", "nockpt"))
    assert difference(with_positions[:, :, :5], without[:, :, :5]) > 1
    assert difference(with_positions[:, :, 5:], without[:, :, 5:]) < 1e-5


# --- clips, images, masks ---


@pytest.mark.parametrize("config", [SMALL, ROPE, COMPRESSED])
def test_a_joint_batch_equals_its_clip_and_its_images_alone(config: LatteConfig) -> None:
    model = build_awake(config)
    noisy, timestep = draw("joint", 2, 4, 7, 4, 8), torch.tensor([0.2, 0.6])
    text, images = make_text("clip text", 2, length=3), make_text("image text", 4, length=4)
    with torch.no_grad():
        joint = denoise(model, noisy, timestep, text, of_images(images))
        clip = denoise(model, noisy[:, :, :5], timestep, text)
        assert difference(joint[:, :, :5], clip) <= 1e-5
        for sample in range(2):
            for image in range(2):
                row = slice(2 * sample + image, 2 * sample + image + 1)
                own = TextStates(images.tokens_BKD[row], images.mask_BK[row], images.pooled_BD[row])
                frame = noisy[sample : sample + 1, :, 5 + image : 6 + image]
                alone = denoise(model, frame, timestep[sample : sample + 1], own)
                assert difference(joint[sample : sample + 1, :, 5 + image : 6 + image], alone) <= 1e-5
        as_clip = denoise(model, noisy, timestep, text)
        assert difference(joint, as_clip) > 1e-2


def test_frames_of_a_clip_see_each_other_and_images_do_not() -> None:
    model = build_awake(SMALL)
    noisy, timestep, text = draw("clip", 1, 4, 3, 4, 4), torch.tensor([0.5]), make_text("text", 1)
    changed = noisy.clone()
    changed[:, :, 2] += 1
    images = of_images(make_text("image text", 2))
    with torch.no_grad():
        apart = denoise(model, noisy, timestep, text) - denoise(model, changed, timestep, text)
        joint = denoise(model, noisy, timestep, text, images) - denoise(model, changed, timestep, text, images)
    assert apart[:, :, 0].abs().max() > 1e-3
    assert joint[:, :, :2].abs().max() <= 1e-6
    assert joint[:, :, 2].abs().max() > 1e-3


def test_places_in_several_groups_see_the_same_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = build_awake(ROPE), []
    whole = predict(model)
    model.temporal_transformer_blocks[0].attn1.attend.register_forward_hook(lambda *call: calls.append(call))
    monkeypatch.setattr(blocks, "_MOST_HEADS", 3 * SMALL.num_attention_heads)
    assert difference(predict(model), whole) <= 1e-6
    assert len(calls) == 3  # of 8 places


def test_masked_text_has_no_say() -> None:
    model = build_awake(SMALL)
    text = make_text("text", 2, length=3)
    other = TextStates(text.tokens_BKD.clone(), text.mask_BK, text.pooled_BD)
    other.tokens_BKD[:, 3:] += 5
    assert difference(predict(model, text=text), predict(model, text=other)) <= 1e-6
    other.tokens_BKD[:, 2] += 5
    assert difference(predict(model, text=text), predict(model, text=other)) > 1e-2


def test_variance_channels_are_left_out_by_the_family_alone() -> None:
    model = build_awake(SMALL)
    noisy, timestep, text = draw("noisy", 1, 4, 2, 4, 4), torch.tensor([0.5]), make_text("text", 1)
    with torch.no_grad():
        whole = model.predict(noisy, timestep, text.conditions())
        assert whole.shape == (1, 8, 2, 4, 4)
        assert torch.equal(denoise(model, noisy, timestep, text), whole[:, :4])


def test_timesteps_are_whole_indices_in_float32() -> None:
    model = build_awake(SMALL).to(torch.bfloat16)
    noisy, text = draw("noisy", 1, 4, 2, 4, 4), make_text("text", 1)
    with torch.no_grad():
        late, later, same = (denoise(model, noisy, torch.tensor([value]), text) for value in (0.998, 0.999, 0.9992))
    assert torch.equal(later, same)
    assert not torch.equal(late, later)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (of_images(make_text("image", 3)), "at least one frame must belong to the clip"),
        (of_images(make_text("image", 1, tokens=4)), "encoded to the same length"),
    ],
)
def test_conditions_that_do_not_fit_are_refused(given: Conditions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        denoise(build(SMALL), torch.zeros(1, 4, 3, 4, 4), torch.zeros(1), make_text("text", 1), given)


# --- positions ---


def test_other_grids_are_stretched_onto_the_known_one() -> None:
    config = replace(SMALL, num_attention_heads=2, attention_head_dim=16, sample_size=(8, 8))
    known, fine = picture_table(config, 4, 4), picture_table(config, 8, 4)
    assert torch.allclose(fine[::2], known)
    assert difference(fine[:4], known) > 0.1
    # The column comes first.
    assert torch.equal(known[0, :, :16], known[3, :, :16])
    assert torch.equal(known[:, 0, 16:], known[:, 3, 16:])


@pytest.mark.parametrize(("length", "scale"), [(5, 1), (17, 1), (32, 2), (33, 2), (56, 3), (129, 8)])
def test_temporal_positions_are_compressed_with_the_length(length: int, scale: int) -> None:
    config = replace(SMALL, video_length=length)
    assert config.scale_1d == scale
    plain, compressed = (frame_table(each, 2 * scale) for each in (replace(config, video_length=1), config))
    assert torch.allclose(compressed[scale], plain[1])
    assert replace(config, interpolation_scale_1d=1.5).scale_1d == 1.5


def test_compressed_rotary_positions_are_cut_to_whole_numbers() -> None:
    table = turn_table(replace(ROPE, attention_head_dim=8), (4, 1), 2)
    assert torch.equal(table[0], table[1]) and torch.equal(table[2], table[3])
    assert difference(table[1].real, table[2].real) > 0.1


def test_any_length_runs_and_order_of_frames_matters() -> None:
    model = build_awake(SMALL)
    for frames in (1, 2, 5, 9):
        assert predict(model, frames).shape == (2, 4, frames, 4, 8)
    noisy, timestep, text = draw("noisy", 1, 4, 3, 4, 4), torch.tensor([0.5]), make_text("text", 1)
    with torch.no_grad():
        forward, backward = (denoise(model, x, timestep, text) for x in (noisy, noisy.flip(2)))
    assert difference(forward, backward.flip(2)) > 1e-2


# --- compilation ---


# --- published files ---


def test_full_size_keys_and_shapes_equal_the_manifest() -> None:
    manifest = json.loads((GOLDENS / "state_dict_manifest.json").read_text())
    for name in ("LatteT2V-XL/122", "LatteT2V-XL/122 compress_kv_factor=2"):
        with torch.device("meta"):
            model = build(LatteConfig.from_original(manifest[name]["config"]))
        assert {key: list(tensor.shape) for key, tensor in model.state_dict().items()} == manifest[name]["keys"]
        assert sum(parameter.numel() for parameter in model.parameters()) == manifest[name]["n_parameters"]


def test_the_released_size_is_that_of_the_manifest() -> None:
    manifest = json.loads((GOLDENS / "state_dict_manifest.json").read_text())
    assert LatteConfig.from_original(manifest["LatteT2V-XL/122"]["config"]) == SIZES["xl"]


@pytest.mark.parametrize(
    ("size", "num_parameters", "num_entries"),
    [("tiny", 1_608_080, 118), ("xl", 1_057_246_880, 968), ("xl-513", 1_057_246_880, 968)],
)
def test_sizes_have_the_stated_counts(size: str, num_parameters: int, num_entries: int) -> None:
    with torch.device("meta"):
        model = build(SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert len(model.state_dict()) == num_entries


@pytest.mark.parametrize("config", [SMALL, COMPRESSED])
@pytest.mark.parametrize("layout", ["original", "mindspore"])
def test_a_model_survives_every_layout_to_the_bit(layout: Any, config: LatteConfig) -> None:
    model, other = build_awake(config), build_awake(config, seed=1)
    tensors = export_original(model, layout)
    assert detect_layout(tensors) == layout
    assert difference(predict(other), predict(model)) > 1e-2
    load_original(other, tensors)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_mindspore_names_are_those_of_its_converter() -> None:
    names = export_original(build(COMPRESSED), "mindspore")
    assert {"blocks.0.spatial_block.attn2.to_q.weight", "blocks.1.temp_block.attn1.norm.gamma"} <= names.keys()
    assert not any("transformer_blocks" in name for name in names)


@pytest.mark.parametrize("prefix", ["module.", "_backbone."])
def test_wrapper_prefixes_and_an_absent_unused_table_are_no_obstacle(prefix: str) -> None:
    model, other = build_awake(SMALL), build_awake(SMALL, seed=1)
    tensors = {prefix + key: value for key, value in export_original(model, "diffusers").items()}
    assert not any("y_embedding" in key for key in tensors)
    load_original(other, tensors)
    assert torch.equal(predict(other), predict(model))


def test_a_plain_file_starts_compression_as_the_mean_of_neighbours() -> None:
    plain = build_awake(SMALL)
    model = build_awake(COMPRESSED)
    load_original(model, plain.state_dict())
    weights = model.state_dict()
    assert torch.equal(weights["transformer_blocks.1.attn1.sr.weight"], torch.full((16, 1, 2, 2), 0.25))
    assert torch.equal(weights["temporal_transformer_blocks.1.attn1.sr.weight"], torch.full((16, 1, 2), 0.5))
    assert torch.equal(weights["transformer_blocks.1.attn1.norm.weight"], torch.ones(16))
    assert "transformer_blocks.0.attn1.sr.weight" not in weights
    fresh = build(COMPRESSED).state_dict()
    keys = [key for key in weights if ".sr." in key or ".attn1.norm." in key]
    assert len(keys) == 8 and all(torch.equal(weights[key], fresh[key]) for key in keys)


def test_a_file_that_does_not_fit_is_refused_with_a_list() -> None:
    tensors = build_awake(SMALL).state_dict()
    tensors["pos_embed.proj.weight"] = torch.zeros(16, 8, 2, 2)
    tensors["extra.weight"] = torch.zeros(1)
    del tensors["proj_out.bias"]
    with pytest.raises(CheckpointError) as error:
        load_original(build(SMALL), tensors)
    message = str(error.value)
    assert "1 missing (proj_out.bias)" in message
    assert "1 unexpected (extra.weight)" in message
    assert "pos_embed.proj.weight is 16x8x2x2, the model has 16x4x2x2" in message


def test_a_compressed_file_needs_a_compressed_model() -> None:
    with pytest.raises(CheckpointError, match=r"8 unexpected \(temporal_transformer_blocks.1.attn1.norm.bias"):
        load_original(build(SMALL), build(COMPRESSED).state_dict())


def test_a_file_of_another_family_is_refused() -> None:
    with pytest.raises(CheckpointError, match="none of its 1 tensors"):
        load_original(build(SMALL), {"double_blocks.0.weight": torch.zeros(1)})


def test_a_meta_model_works_after_loading() -> None:
    source = build_awake(SMALL)
    with torch.device("meta"):
        model = build(SMALL)
    load_original(model, source.state_dict())
    assert torch.equal(predict(model), predict(source))


@pytest.mark.parametrize("change", [{}, {"attention_bias": False}, {"norm_eps": 0.5}])
def test_diffusers_latte_computes_the_same(change: dict[str, Any]) -> None:
    from diffusers import LatteTransformer3DModel

    config = replace(SMALL, **change)
    theirs = LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=16,
        attention_bias=config.attention_bias,
        sample_size=8,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=config.norm_eps,
        caption_channels=20,
        video_length=3,
    ).eval()
    model = build_awake(config)
    theirs.load_state_dict(export_original(model, "diffusers"))
    noisy, timestep, text = draw("noisy", 2, 4, 3, 8, 8), torch.tensor([100, 700]), make_text("text", 2)
    with torch.no_grad():
        expected = theirs(
            noisy,
            timestep=timestep,
            encoder_hidden_states=text.tokens_BKD,
            enable_temporal_attentions=True,
            return_dict=False,
        )[0]
        ours = model.predict(noisy, timestep / 1000, text.conditions())
        assert difference(ours, expected) <= 2e-5
        assert difference(model.predict(noisy, timestep / 1000 + 0.02, text.conditions()), expected) > 0.01


def test_it_drops_where_diffusers_does_and_not_in_a_sequence_group() -> None:
    from diffusers import LatteTransformer3DModel

    model = build(replace(SMALL, dropout=0.1))
    names = {name for name, module in model.named_modules() if isinstance(module, KeyedDropout) and module.share}
    theirs = LatteTransformer3DModel(
        2, 8, 4, 8, 2, 0.1, 16, sample_size=8, patch_size=2, norm_type="ada_norm_single", caption_channels=20
    )
    dropping = {name for name, part in theirs.named_modules() if isinstance(part, torch.nn.Dropout) and part.p}
    ours = {"drop_self": "attn1.to_out.1", "drop_cross": "attn2.to_out.1"}
    renamed = {
        ".".join([*name.split(".")[:2], ours.get(".".join(rest := name.split(".")[2:]), ".".join(rest))])
        for name in names
    }
    assert renamed == dropping
    seeds = torch.arange(2)
    use_sequence_group(get_denoiser("latte"), model, SequenceGroup(0, 2))
    text = make_text("text", 2)
    with pytest.raises(ConfigError, match=r"dropout is 0.1 and parallel.sequence 2"):
        model(
            draw("noisy", 2, 4, 3, 8, 8),
            torch.tensor([0.1, 0.7]),
            {**text.conditions(), "dropout_seeds": seeds},
        )


def test_diffusers_cannot_hold_the_options() -> None:
    for config in (ROPE, COMPRESSED):
        with pytest.raises(CheckpointError, match="write the original layout"):
            export_original(build(config), "diffusers")


# --- config ---


@pytest.mark.parametrize("name", CASES)
def test_published_config_survives_the_round_trip(name: str) -> None:
    config = LatteConfig.from_original(read_case(GOLDENS / f"{name}.safetensors", name=name).config["model"])
    assert LatteConfig.from_original(config.to_original()) == config
    assert LatteConfig(**json.loads(json.dumps(asdict(config)))) == config
    assert config != SIZES["xl"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_layer": 2}, "did you mean 'num_layers'"),
        ({"in_channels": 8}, "follows from the autoencoder"),
        ({"num_layers": 0}, "must be at least 1"),
        ({"num_layers": "2"}, "should be like"),
        ({"sample_size": [8]}, "two whole numbers"),
        ({"attention_head_dim": 9, "num_attention_heads": 2}, "multiple of 4"),
        ({"attention_head_dim": 6, "use_rope": True}, "with use_rope"),
        ({"use_rope": True, "compress_kv_factor": 2}, "exclude each other"),
    ],
)
def test_a_wrong_setting_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_denoiser("latte").configure("tiny", latent_channels=4, text_width=8, pooled_width=8, overrides=overrides)


@pytest.mark.parametrize("change", [{"dropout": 0.1}, {"norm_eps": 1e-3}, {"attention_bias": False}])
def test_values_that_the_published_code_computes_with_are_read_and_written(change: dict[str, Any]) -> None:
    values = read_case(GOLDENS / "latte_v11.safetensors", name="case").config["model"]
    config = LatteConfig.from_original(values | change)
    assert config == replace(LatteConfig.from_original(values), **change)
    assert LatteConfig.from_original(config.to_original()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layer": 2}, "did you mean 'num_layers'"),
        ({"norm_type": "layer_norm"}, "only 'ada_norm_single' is built here"),
        ({"patch_size_t": 2}, "only 1 is built here"),
        ({"out_channels": 6}, "once or twice 4"),
        ({"cross_attention_dim": 8}, "heads times head width, 32"),
    ],
)
def test_a_published_config_of_another_kind_is_refused(change: dict[str, Any], message: str) -> None:
    values = read_case(GOLDENS / "latte_v11.safetensors", name="case").config["model"]
    with pytest.raises(ConfigError, match=message):
        LatteConfig.from_original(values | change)
