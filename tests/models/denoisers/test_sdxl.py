"""SDXL's UNet: the contract, diffusers as the yardstick, conditions, sizes. Key maps are in test_sdxl_keys.py."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.random import stream
from frameloom.models.denoisers.base import build_fresh
from frameloom.models.denoisers.sdxl.config import SIZES, SDXLConfig
from frameloom.models.denoisers.sdxl.model import AESTHETIC_SCORE, SDXLUNet, diffusers_arguments
from frameloom.models.denoisers.sdxl.weights import detect_layout, export_original, load_original
from frameloom.models.registry import get_denoiser
from frameloom.models.text.base import TextStates
from tests.models.denoisers.contract import DenoiserContract

SMALL = SDXLConfig(
    in_channels=4,
    context_in_dim=24,
    vec_in_dim=12,
    model_channels=16,
    channel_mult=(1, 2),
    transformer_depth=(1, 2),
    attention_resolutions=(2,),
    num_res_blocks=1,
    num_head_channels=16,
    norm_groups=4,
    size_embed_dim=8,
)

build = partial(build_fresh, SDXLUNet)
# What the published folders say of themselves, in diffusers' words.
PUBLISHED: dict[str, dict[str, Any]] = {
    "base": {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "projection_class_embeddings_input_dim": 2816,
    },
    "refiner": {
        "block_out_channels": (384, 768, 1536, 1536),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": 4,
        "attention_head_dim": (6, 12, 24, 24),
        "cross_attention_dim": 1280,
        "projection_class_embeddings_input_dim": 2560,
    },
}
ALIKE = {"use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256}


def build_awake(config: SDXLConfig = SMALL, seed: int = 0) -> SDXLUNet:
    model = build(config)
    generator = stream(seed, "test weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def make_inputs(config: SDXLConfig = SMALL, size: tuple[int, int] = (4, 6)) -> tuple[Tensor, Tensor, TextStates]:
    generator = stream(0, "test inputs", *size)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    text = TextStates(draw(2, 5, config.context_in_dim), torch.ones(2, 5, dtype=torch.bool), draw(2, config.vec_in_dim))
    return draw(2, config.in_channels, 1, *size), torch.tensor([0.257, 0.9]), text


def predict(model: nn.Module, sizes: list[float] | None = None) -> Tensor:
    given = {} if sizes is None else {"sizes": torch.tensor([sizes, sizes])}
    config: SDXLConfig = model.architecture  # type: ignore[assignment]
    with torch.no_grad():
        noisy, timestep, text = make_inputs(config)
        return model(noisy, timestep, {**text.conditions(), **given})


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


class TestSDXL(DenoiserContract):
    family_name = "sdxl"
    overrides: ClassVar[dict[str, Any]] = {
        "model_channels": 16,
        "channel_mult": [1, 2],
        "transformer_depth": [1, 1],
        "attention_resolutions": [2],
        "num_head_channels": 16,
        "norm_groups": 4,
    }
    latent_sizes: ClassVar[list[tuple[int, int, int]]] = [(1, 4, 4), (1, 4, 8), (1, 8, 4), (1, 5, 7), (1, 1, 1)]
    default_size = (1, 4, 4)
    longest_clip = 1
    takes = ("sizes",)
    rule_cases: ClassVar[list[tuple[tuple[int, int, int], str]]] = [((3, 4, 4), r"3 frames.*clips must have 1 frame")]


@pytest.mark.parametrize("size", ["base", "refiner"])
def test_published_sizes_have_the_keys_and_shapes_of_diffusers_own_model(size: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        theirs = diffusers.UNet2DConditionModel(**PUBLISHED[size], **ALIKE)
        ours = build(SIZES[size])
    expected = {key: tensor.shape for key, tensor in theirs.state_dict().items()}
    assert {key: tensor.shape for key, tensor in ours.state_dict().items()} == expected
    assert [ours.config[key] for key in ALIKE] == list(ALIKE.values())
    for name in ("norm_eps", "flip_sin_to_cos", "freq_shift", "act_fn", "norm_num_groups"):
        assert ours.config[name] == theirs.config[name]


@pytest.mark.parametrize(
    ("size", "num_parameters", "num_entries"),
    [("tiny", 3_172_676, 330), ("base", 2_567_463_684, 1680), ("refiner", 2_259_526_660, 1220)],
)
def test_sizes_have_the_stated_counts(size: str, num_parameters: int, num_entries: int) -> None:
    with torch.device("meta"):
        model = build(SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert len(model.state_dict()) == num_entries


def test_base_has_seventy_transformer_blocks_of_two_attentions() -> None:
    with torch.device("meta"):
        model = build(SIZES["base"])
    blocks = model.blocks()
    kinds = [type(block).__name__ for block in blocks]
    assert kinds.count("BasicTransformerBlock") == 70
    assert kinds.count("ResnetBlock2D") == 17
    assert len(model.attn_processors) == 140
    assert model.mid_block.attentions[0].transformer_blocks[0].attn1.heads == 20


def make_twin(model: SDXLUNet) -> nn.Module:
    """diffusers' own class with its own attention and the same weights."""
    diffusers = pytest.importorskip("diffusers")
    twin: nn.Module = diffusers.UNet2DConditionModel(**diffusers_arguments(model.architecture))
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
def test_diffusers_computes_the_same(size: tuple[int, int]) -> None:
    model = build_awake()
    noisy, timestep, text = make_inputs(size=size)
    sizes = torch.tensor([[700.0, 1333, 5, 9, 1024, 960], [512, 512, 0, 0, 512, 512]])

    def run_twin(index: list[int], values: Tensor) -> Tensor:
        conditions = {"text_embeds": text.pooled_BD, "time_ids": values}
        with torch.no_grad():
            return make_twin(model)(
                noisy[:, :, 0], torch.tensor(index), text.tokens_BKD, added_cond_kwargs=conditions
            ).sample

    with torch.no_grad():
        ours = model(noisy, timestep, {**text.conditions(), **{"sizes": sizes}})[:, :, 0]
    assert difference(ours, run_twin([257, 900], sizes)) <= 1e-5
    assert difference(ours, run_twin([256, 900], sizes)) > 1e-4
    assert difference(ours, run_twin([257, 900], sizes.flip(1))) > 1e-4


def test_refiner_is_told_an_aesthetic_score_in_place_of_the_target_size() -> None:
    config = SDXLConfig(**{**vars(SMALL), "aesthetic": True})
    model = build_awake(config)
    noisy, timestep, text = make_inputs(config)
    values = torch.tensor([[32.0, 48, 0, 0, AESTHETIC_SCORE]] * 2)
    with torch.no_grad():
        expected = make_twin(model)(
            noisy[:, :, 0],
            timestep.mul(1000).round(),
            text.tokens_BKD,
            added_cond_kwargs={"text_embeds": text.pooled_BD, "time_ids": values},
        ).sample
    assert difference(predict(model)[:, :, 0], expected) <= 1e-5
    assert difference(predict(model, [32, 48, 0, 0, 9, 9]), predict(model)) == 0
    assert difference(predict(model, [32, 49, 0, 0, 32, 48]), predict(model)) > 1e-4


def test_neutral_sizes_are_those_of_the_picture_uncropped() -> None:
    model = build_awake()
    assert torch.equal(predict(model), predict(model, [32, 48, 0, 0, 32, 48]))
    for place in range(6):
        sizes = [32.0, 48, 0, 0, 32, 48]
        sizes[place] += 3
        assert difference(predict(model), predict(model, sizes)) > 1e-4


def test_sizes_do_not_pass_through_half_precision() -> None:
    """1333 and 1336 are one number in bfloat16."""
    model = build_awake().to(torch.bfloat16)
    one, other = (predict(model, [width, width, 0, 0, 64, 64]) for width in (1333.0, 1336.0))
    assert difference(one, other) > 1e-3


def test_every_index_of_the_objective_reaches_the_unet_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    model = build_awake().to(torch.bfloat16)
    own = model.time_proj.forward
    monkeypatch.setattr(model.time_proj, "forward", lambda index: (seen.append(index), own(index))[1])
    index = torch.arange(1000)
    noisy = torch.zeros(1000, 4, 1, 1, 1)
    text = TextStates(torch.zeros(1000, 1, 24), torch.ones(1000, 1, dtype=torch.bool), torch.zeros(1000, 12))
    with torch.no_grad():
        model(noisy, (index.double() / 1000).float(), text.conditions())
    assert torch.equal(seen[0], index.float())


def test_a_model_without_a_pooled_vector_sees_tokens_and_sizes() -> None:
    config = SDXLConfig(**{**vars(SMALL), "vec_in_dim": 0})
    model = build_awake(config)
    assert difference(predict(model), predict(model, [9, 48, 0, 0, 32, 48])) > 1e-4


def test_a_fresh_model_predicts_nothing_and_an_awake_one_something() -> None:
    assert not predict(build(SMALL)).any()
    assert predict(build_awake()).abs().max() > 1e-2


@pytest.mark.parametrize("layout", ["diffusers", "single", "bare"])
def test_a_model_survives_every_published_layout(layout: Any) -> None:
    model, other = build_awake(), build_awake(seed=1)
    tensors = export_original(model, layout)
    assert detect_layout(tensors) == layout
    assert difference(predict(model), predict(other)) > 1e-3
    load_original(other, tensors)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("layout", ["diffusers", "single", "bare"])
def test_a_damaged_file_of_any_layout_is_refused(layout: Any) -> None:
    complete = export_original(build_awake(), layout)
    model = build(SMALL)
    for key in list(complete)[::7]:
        with pytest.raises(CheckpointError, match=r"does not fit.*1 missing"):
            load_original(model, {name: value for name, value in complete.items() if name != key})
    load_original(model, complete)


def test_the_other_parts_of_a_single_file_are_passed_over_and_nothing_else() -> None:
    tensors = export_original(build_awake(), "single")
    others = ("first_stage_model.quant_conv.weight", "conditioner.embedders.1.model.logit_scale")
    load_original(build(SMALL), tensors | {key: torch.zeros(1) for key in others})
    for strange in ("model_ema.decay", "model.diffusion_model.strange.weight", "lora.weight"):
        with pytest.raises(CheckpointError, match=f"1 unexpected .*{strange}"):
            load_original(build(SMALL), tensors | {strange: torch.zeros(1)})


def test_a_file_of_another_family_is_refused() -> None:
    with pytest.raises(CheckpointError, match="none of its 1 tensors"):
        load_original(build(SMALL), {"double_blocks.0.weight": torch.zeros(1)})


def test_a_published_file_loads_onto_meta_shapes() -> None:
    with torch.device("meta"):
        model = build(SMALL)
    source = build_awake()
    load_original(model, export_original(source, "single"))
    assert torch.equal(predict(model), predict(source))


def test_sizes_are_fitted_to_the_encoders() -> None:
    config = get_denoiser("sdxl").configure("base", latent_channels=8, text_width=100, pooled_width=50, overrides={})
    assert (config.in_channels, config.context_in_dim, config.vec_in_dim) == (8, 100, 50)
    assert diffusers_arguments(config)["projection_class_embeddings_input_dim"] == 50 + 6 * 256
    assert get_denoiser("sdxl").text_join == "concat"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model_chanels": 64}, "did you mean 'model_channels'"),
        ({"in_channels": 64}, "follows from the autoencoder"),
        ({"num_res_blocks": True}, "should be like"),
        ({"num_res_blocks": 0}, "at least 1"),
        ({"channel_mult": [1, 0, 2]}, "at least 1"),
        ({"channel_mult": [1, 2]}, "one number for each level"),
        ({"attention_resolutions": [8]}, "attention_resolutions has 8; the levels have"),
        ({"norm_groups": 5}, "32 channels is not a multiple of norm_groups 5"),
        ({"num_head_channels": 48}, "64 channels is not a multiple of num_head_channels 48"),
        ({"size_embed_dim": 15}, "must be even"),
    ],
)
def test_a_wrong_setting_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_denoiser("sdxl").configure("tiny", latent_channels=8, text_width=384, pooled_width=384, overrides=overrides)
