"""OpenSoraT2V of Open-Sora-Plan 1.3: the contract, the original's tensors, sizes, masks, compilation."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.denoisers.base import Conditions, build_fresh
from frameloom.models.denoisers.opensora_plan.config import SIZES, OpenSoraPlanConfig
from frameloom.models.denoisers.opensora_plan.model import OpenSoraT2V
from frameloom.models.denoisers.opensora_plan.skiparse import turn_table
from frameloom.models.layers.positions import rotate
from frameloom.models.registry import get_denoiser
from frameloom.models.text.base import TextStates
from tests.models.denoisers.contract import DenoiserContract
from tests.parity.cases import ParityCase, ParityOutput, read_golden
from tests.parity.harness import find_runner
from tests.parity.opensora_plan_transformers import published_scales

GOLDENS = Path(__file__).parents[2] / "goldens" / "open-sora-plan"
CASES = sorted(path.stem for path in GOLDENS.glob("opensora_*_v13*.safetensors"))
MANIFEST = json.loads((GOLDENS / "state_dict_manifest.json").read_text())
SMALL = OpenSoraPlanConfig(
    in_channels=4, context_in_dim=20, num_layers=4, num_attention_heads=2, attention_head_dim=12, sparse1d=True
)

build = partial(build_fresh, OpenSoraT2V)


def read_case(name: str) -> ParityCase:
    return read_golden(GOLDENS / f"{name}.safetensors", GOLDENS)


def run(case: ParityCase) -> list[ParityOutput]:
    runner = find_runner(case)
    assert runner is not None
    return runner.run(case)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "test tensor", *shape))


def build_awake(config: OpenSoraPlanConfig, seed: int = 0) -> OpenSoraT2V:
    model = build(config)
    generator = stream(seed, "test weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


class TestOpenSoraPlan(DenoiserContract):
    family_name = "opensora_plan"
    overrides: ClassVar[dict[str, Any]] = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 12}
    latent_sizes: ClassVar[list[tuple[int, int, int]]] = [(1, 4, 4), (3, 4, 8), (2, 8, 4), (4, 8, 8)]
    uses_pooled = False
    takes: ClassVar[tuple[str, ...]] = ("dropout_seeds",)
    rule_cases: ClassVar[list[tuple[tuple[int, int, int], str]]] = [
        ((1, 5, 4), r"5x4 cells.*multiples of 2.*pixels that are multiples of 16")
    ]


class TestOpenSoraPlanFull(TestOpenSoraPlan):
    """Full attention in every layer: how the published training begins."""

    overrides: ClassVar[dict[str, Any]] = TestOpenSoraPlan.overrides | {"sparse1d": False}


class TestOpenSoraPlanInpaint(TestOpenSoraPlan):
    overrides: ClassVar[dict[str, Any]] = TestOpenSoraPlan.overrides | {"inpaint": True}
    takes: ClassVar[tuple[str, ...]] = ("cond_latents", "dropout_seeds")

    def give(self, noisy_BCFHW: Tensor) -> Conditions:
        beside_BCFHW = draw(1, noisy_BCFHW.shape[1] + 4, *noisy_BCFHW.shape[2:])
        return {"cond_latents": beside_BCFHW.expand(len(noisy_BCFHW), -1, -1, -1, -1)}


@pytest.mark.parametrize("name", CASES)
def test_golden_comparison_sees_a_changed_weight(name: str) -> None:
    case = read_case(name)
    key = "transformer_blocks.2.attn1.to_q.weight"
    for result in run(replace(case, weights=case.weights | {key: 1.5 * case.weights[key]})):
        assert result.ours is not None
        assert difference(result.ours, result.expected) > 10 * result.tolerance, result.name


def test_golden_cases_tell_full_from_skiparse_layers() -> None:
    case = read_case("opensora_t2v_v13_sparse")
    settings = case.config["model"] | {"sparse1d": False}
    results = {result.name: result for result in run(replace(case, config=case.config | {"model": settings}))}
    ours, expected = results["video_nopad.sample"].ours, results["video_nopad.sample"].expected
    assert ours is not None and difference(ours, expected) > 1e-2


def test_the_published_cache_hands_a_scale_on_to_axes_of_the_same_length() -> None:
    scales = (1.0, 2.0, 1.5)
    assert published_scales(scales, [(3, 4, 5)]) == scales
    assert published_scales(scales, [(4, 4, 6)]) == (1.0, 1.0, 1.5)
    assert published_scales(scales, [(4, 4, 4)]) == (1.0, 1.0, 1.0)
    assert published_scales(scales, [(4, 4, 6), (3, 4, 5)]) == (1.0, 1.0, 1.5)


@pytest.mark.parametrize(
    ("size", "published", "num_parameters", "num_entries"),
    [
        ("2b", "OpenSoraT2V_v1_3-2B/122", 2_771_981_600, 687),
        ("2b-inpaint", "OpenSoraInpaint_v1_3-2B/122", 2_782_713_632, 693),
    ],
)
def test_released_sizes_have_the_published_keys_and_shapes(
    size: str, published: str, num_parameters: int, num_entries: int
) -> None:
    with torch.device("meta"):
        model = build(SIZES[size])
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    assert shapes == MANIFEST[published]["keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert MANIFEST[published]["n_parameters"] == num_parameters and len(shapes) == num_entries


@pytest.mark.parametrize(("size", "num_parameters"), [("tiny", 739_712), ("tiny-inpaint", 762_944)])
def test_small_sizes_have_the_stated_counts(size: str, num_parameters: int) -> None:
    with torch.device("meta"):
        model = build(SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_layers_at_both_ends_see_all_tokens() -> None:
    patterns = [SIZES["2b"].pattern(layer) for layer in range(32)]
    assert patterns == ["full"] * 2 + ["single", "group"] * 14 + ["full"] * 2
    assert {replace(SIZES["2b"], sparse1d=False).pattern(layer) for layer in range(32)} == {"full"}


def test_noise_level_is_a_whole_index_in_float32() -> None:
    """999 is the last index; in bf16 it would be 1000."""
    seen: list[Tensor] = []
    model = build(SMALL).to(torch.bfloat16)
    model.adaln_single.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    text = TextStates(draw(3, 5, 20), torch.ones(3, 5, dtype=torch.bool), draw(3, 6))
    timestep = (torch.tensor([0, 501, 999]).double() / 1000).float()
    with torch.no_grad():
        model(draw(3, 4, 1, 4, 4), timestep, text.conditions())
    assert seen[0].dtype == torch.float32 and seen[0].tolist() == [0, 501, 999]


def test_padding_of_a_caption_is_not_seen() -> None:
    noisy, text, mask = draw(2, 4, 2, 8, 8), draw(2, 5, 20), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    other = torch.where(mask[..., None], text, 9.0)
    model, timestep, whole = build_awake(SMALL), torch.full((2,), 0.5), torch.ones_like(mask)
    with torch.no_grad():
        one, two, three, four = (
            model(noisy, timestep, {"text": states, "text_mask": seen})
            for states, seen in ((text, mask), (other, mask), (text, whole), (other, whole))
        )
    assert difference(one, two) < 1e-5
    assert difference(three, four) > 1e-2


def test_rotation_is_the_published_one_up_to_the_order_of_channels() -> None:
    """Products of queries and keys against v * cos + half_turned(v) * sin within each third of a head."""
    grid, scales, head_dim = (2, 3, 4), (1.0, 2.0, 1.5), 12
    q, k = draw(1, 24, 2, head_dim, seed=0), draw(1, 24, 2, head_dim, seed=1)
    table = turn_table(grid, head_dim, scales)
    ours = torch.einsum("bnhd,bmhd->bhnm", rotate(q, table, parts=3), rotate(k, table, parts=3))
    positions = torch.cartesian_prod(*(torch.arange(count).float() for count in grid)) / torch.tensor(scales)
    angles = positions[:, :, None] * torch.tensor([1.0, 10_000**-0.5])
    cos, sin = (part.repeat(1, 1, 2).view(1, 24, 1, head_dim) for part in (angles.cos(), angles.sin()))

    def turn(heads: Tensor) -> Tensor:
        first, second = heads.unflatten(-1, (3, 2, 2)).unbind(-2)
        return heads * cos + torch.stack([-second, first], dim=-2).flatten(-3) * sin

    expected = torch.einsum("bnhd,bmhd->bhnm", turn(q), turn(k))
    assert difference(ours, expected) < 1e-5
    assert difference(torch.einsum("bnhd,bmhd->bhnm", q, k), expected) > 0.1


def test_interpolated_positions_are_those_of_a_smaller_picture() -> None:
    fine, coarse = turn_table((1, 8, 8), 12, (1.0, 2.0, 2.0)), turn_table((1, 4, 4), 12, (1.0, 1.0, 1.0))
    assert torch.allclose(fine.view(8, 8, -1)[::2, ::2], coarse.view(4, 4, -1))
    assert not torch.allclose(turn_table((1, 8, 8), 12, (1.0, 1.0, 1.0)), fine)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_layer": 64}, "did you mean 'num_layers'"),
        ({"context_in_dim": 64}, "follows from the autoencoder"),
        ({"num_layers": True}, "should be like"),
        ({"num_layers": 0}, "must be at least 1"),
        ({"attention_head_dim": 16}, "a multiple of 6"),
        ({"interpolation_scale_h": 0.0}, "must be above 0"),
        ({"sparse_n": 0}, "must be at least 1"),
    ],
)
def test_a_wrong_setting_is_refused(overrides: dict[str, Any], message: str) -> None:
    configure = get_denoiser("opensora_plan").configure
    with pytest.raises(ConfigError, match=message):
        configure("tiny", latent_channels=8, text_width=384, pooled_width=384, overrides=overrides)


class TestWrongShapes:
    def denoise(self, noisy: Tensor, given: Conditions | None = None, **changes: Any) -> None:
        text = TextStates(draw(1, 5, 20), torch.ones(1, 5, dtype=torch.bool), draw(1, 6))
        build(replace(SMALL, **changes))(noisy, torch.ones(1), {**text.conditions(), **(given or {})})

    def test_sides_that_patches_do_not_tile_name_the_rule(self) -> None:
        with pytest.raises(ConfigError, match="opensora_plan denoiser: a latent of 4x3 cells"):
            SMALL.num_tokens((1, 4, 3))

    def test_latents_of_another_autoencoder_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="has 8 channels, the model takes 4"):
            self.denoise(draw(1, 8, 1, 4, 4))

    def test_a_condition_with_other_channels_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"masked latent \(4 channels\), then the mask \(4\)"):
            self.denoise(draw(1, 4, 1, 4, 4), {"cond_latents": draw(1, 5, 1, 4, 4)}, inpaint=True)
