"""B batch, C channels, F frames, H height, W width."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from frameloom.core.errors import ConfigError, DataError
from frameloom.models.vaes.base import load_original
from frameloom.models.vaes.dc_ae.config import SIZES, DCAEConfig
from frameloom.models.vaes.dc_ae.model import DCAE, ChannelRMSNorm, fold_cells, unfold_cells
from tests.models.vaes.contract import VAEContract, draw_clip
from tests.parity.cases import read_case
from tests.parity.harness import run_case

GOLDENS = Path(__file__).parents[2] / "goldens" / "open-sora-v2"
CASES = ["dcae_f32t4", "dcae_f8t4_tiled"]


class TestDCAE(VAEContract):
    family_name = "dc_ae"
    narrow: ClassVar = {"widths": (4, 8, 8, 8, 32, 32), "attention": (False,) * 5 + (True,), "latent_channels": 16}
    clip = (8, 64, 32)
    wrong_frames = 9
    learn_px = 32
    num_steps = 14


def read_golden(name: str):
    return read_case(GOLDENS / f"{name}.safetensors", name=name)


def read_config(name: str, **overrides) -> DCAEConfig:
    given = read_golden(name).config
    config = DCAEConfig.from_original(given["dotlist"], scaling_factor=given["scaling_factor"])
    return dataclasses.replace(config, **overrides)


def build_golden(name: str = "dcae_f8t4_tiled", **overrides) -> DCAE:
    model = DCAE(read_config(name, **overrides)).eval()
    load_original(model, read_golden(name).weights)
    return model


# --- goldens ---


@pytest.mark.parametrize(
    "key",
    [
        "encoder.stages.2.op_list.0.context_module.main.aggreg.0.1.weight",
        "decoder.stages.1.op_list.0.main.conv.conv.weight",
        "decoder.project_out.op_list.0.bias",
    ],
)
def test_a_changed_weight_is_above_tolerance(key):
    case = read_golden("dcae_f8t4_tiled")
    case.weights[key].flatten()[0] += 0.5
    case = dataclasses.replace(case, outputs={name: case.outputs[name] for name in ("f8.encoded", "t2.decoded")})
    assert not run_case(case).is_good


# --- the published notes ---


def read_notes():
    return json.loads((GOLDENS / "dcae_notes.json").read_text())


def draw_fresh(config: DCAEConfig) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DCAE(config)
    kinds: dict[str, list[torch.Tensor]] = {"conv weight": [], "bias": [], "rms weight": []}
    for module in model.modules():
        if isinstance(module, ChannelRMSNorm | nn.Conv3d):
            kinds["rms weight" if isinstance(module, ChannelRMSNorm) else "conv weight"].append(module.weight)
            kinds["bias"] += [] if module.bias is None else [module.bias]
    return {kind: torch.cat([part.detach().flatten() for part in parts]) for kind, parts in kinds.items()}


@pytest.mark.parametrize("name", CASES)
def test_fresh_weights_follow_the_published_law(name):
    ours = draw_fresh(read_config(name))
    for kind, expected in read_notes()["from_scratch_init_statistics"][name].items():
        numbers = ours[kind]
        # Two independent draws agree within five standard errors.
        error = 5 * math.sqrt(2 / numbers.numel()) * expected["std"]
        assert numbers.numel() == expected["n"]
        assert abs(float(numbers.mean()) - expected["mean"]) <= error
        assert abs(float(numbers.std()) - expected["std"]) <= error / math.sqrt(2)
        assert abs(float(numbers.abs().max()) - expected["max_abs"]) <= 1.5 * expected["std"]
    assert not torch.equal(ours["rms weight"], torch.ones_like(ours["rms weight"]))


def test_lengths_are_accepted_and_refused_as_published():
    model = build_golden()
    for text, verdict in read_notes()["frames_accepted_by_encode"].items():
        clip = torch.zeros(1, 3, int(text.split()[0]), 8, 8)
        if verdict.startswith("accepted"):
            with torch.no_grad():
                assert model.encode(clip).mean_BCFHW.shape[2] == int(verdict.rpartition(" ")[2])
        else:
            with pytest.raises(DataError, match="1, 2 or a multiple of 4"):
                model.encode(clip)


# --- full size ---


def list_keys(config: DCAEConfig) -> set[str]:
    """Key names as the fact sheet writes them down."""
    keys = {"encoder.project_in.conv.weight", "encoder.project_in.conv.bias"}
    keys |= {
        f"{half}.conv.{part}"
        for half in ("encoder.project_out.main.op_list.0", "decoder.project_in.main")
        for part in ("weight", "bias")
    }
    keys |= {f"decoder.project_out.op_list.{layer}.{part}" for layer in ("0", "2.conv") for part in ("weight", "bias")}
    residual = ["conv1.conv.weight", "conv1.conv.bias", "conv2.conv.weight", "conv2.norm.weight", "conv2.norm.bias"]
    attention = [
        *(
            f"context_module.main.{part}.weight"
            for part in ("qkv.conv", "aggreg.0.0", "aggreg.0.1", "proj.conv", "proj.norm")
        ),
        "context_module.main.proj.norm.bias",
        *(
            f"local_module.main.{part}.weight"
            for part in ("inverted_conv.conv", "depth_conv.conv", "point_conv.conv", "point_conv.norm")
        ),
        *(f"local_module.main.{part}.bias" for part in ("inverted_conv.conv", "depth_conv.conv", "point_conv.norm")),
    ]
    last = len(config.widths) - 1
    for half, depths in (("encoder", config.encoder_depths), ("decoder", config.decoder_depths)):
        for stage, depth in enumerate(depths):
            first = 1 if half == "decoder" and stage < last else 0
            names = attention if config.attention[stage] else [f"main.{name}" for name in residual]
            for index in range(first, first + depth):
                keys |= {f"{half}.stages.{stage}.op_list.{index}.{name}" for name in names}
            if stage < last:
                step = f"op_list.{depth}.main.conv" if half == "encoder" else "op_list.0.main.conv.conv"
                keys |= {f"{half}.stages.{stage}.{step}.{part}" for part in ("weight", "bias")}
    return keys


def test_the_released_size_has_the_published_keys_shapes_and_numbers_of_parameters():
    config = SIZES["f32t4c128"]
    with torch.device("meta"):
        model = DCAE(config)
    state = model.state_dict()
    assert set(state) == list_keys(config)
    assert len(state) == 339
    counts = [sum(value.numel() for value in half.parameters()) for half in (model, model.encoder, model.decoder)]
    assert counts == [459_462_147, 220_439_936, 239_022_211]
    block = "encoder.stages.3.op_list.0"
    shapes = {
        "context_module.main.qkv.conv": [1536, 512, 1, 1, 1],
        "context_module.main.aggreg.0.0": [1536, 1, 5, 5, 5],
        "context_module.main.aggreg.0.1": [1536, 32, 1, 1, 1],
        "context_module.main.proj.conv": [512, 1024, 1, 1, 1],
        "local_module.main.inverted_conv.conv": [4096, 512, 1, 1, 1],
        "local_module.main.depth_conv.conv": [4096, 1, 3, 3, 3],
        "local_module.main.point_conv.conv": [512, 2048, 1, 1, 1],
    }
    assert {name: list(state[f"{block}.{name}.weight"].shape) for name in shapes} == shapes
    assert (model.strides, model.causal, model.latent_channels) == ((4, 32, 32), False, 128)


# --- the model's own claims ---


def test_a_sample_is_the_mean_up_to_the_rounding_of_float32():
    model = build_golden("dcae_f32t4")
    with torch.no_grad():
        moments = model.encode(draw_clip(1, 3, 8, 32, 64))
    eps = torch.randn(moments.mean_BCFHW.shape, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(moments.sample(eps), moments.mode(), rtol=0, atol=2e-6)
    assert torch.equal(moments.sample(eps).bfloat16(), moments.mode().bfloat16())
    assert moments.mode().abs().max() > 1


def test_the_published_factor_divides():
    model = build_golden("dcae_f32t4")
    latent = draw_clip(1, 16, 1, 1, 1)
    assert torch.allclose(model.normalize(latent), latent / 0.493)
    assert torch.allclose(model.denormalize(latent), latent * 0.493)


def test_a_latent_frame_alone_gives_one_frame_so_training_refuses_clips_of_four():
    model = build_golden()
    with torch.no_grad():
        latent = model.encode(draw_clip(1, 3, 4, 8, 8)).mode()
        assert model.decode(latent).shape[2] == 1
        for num_frames in (2, 4):
            with pytest.raises(DataError, match="single frames or on 8 and more"):
                model.encode_with_coefficients(draw_clip(1, 3, num_frames, 8, 8))
        assert model.encode_with_coefficients(draw_clip(1, 3, 8, 8, 8))[0].mean_BCFHW.shape[2] == 2


def test_cells_fold_in_the_order_channel_time_height_width_and_unfold_again():
    clip = torch.arange(2 * 2 * 2 * 2).float().view(1, 2, 2, 2, 2)
    folded = fold_cells(clip, (2, 2, 2))
    assert torch.equal(folded.flatten(), torch.arange(16.0))
    wide = draw_clip(2, 3, 4, 6, 8)
    assert torch.equal(unfold_cells(fold_cells(wide, (2, 2, 2)), (2, 2, 2)), wide)
    assert torch.equal(fold_cells(wide, (1, 2, 2))[:, :, 0], nn.functional.pixel_unshuffle(wide[:, :, 0], 2))


def test_no_layer_sees_more_than_a_tile():
    model = build_golden(spatial_tiling=True, temporal_tiling=True)
    seen = []
    model.decoder.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[2:])))
    with torch.no_grad():
        pixels = model.decode(draw_clip(1, 8, 8, 9, 5))
    assert pixels.shape == (1, 3, 32, 72, 40)
    assert {max(sizes) for sizes in zip(*seen, strict=True)} == {4}


def mix(before: torch.Tensor, tile: torch.Tensor, extent: int, *, dim: int) -> None:
    """In place, cell by cell, as published: what follows sees the mixed tile."""
    extent = min(extent, before.shape[dim], tile.shape[dim])
    for cell in range(extent):
        old, new = before.select(dim, before.shape[dim] - extent + cell), tile.select(dim, cell)
        new.copy_(old * (1 - cell / extent) + new * (cell / extent))


def cut_plainly(layers, x, dims: tuple[int, ...], size: int, stride: int, blend: int, keep: int) -> torch.Tensor:
    """Tiles along one or two sides, all in memory, and the published loops over them."""
    last, *first = dims[::-1]
    tops = range(0, x.shape[first[0]], stride) if first else [0]
    grid = []
    for top in tops:
        row = x.narrow(first[0], top, min(size, x.shape[first[0]] - top)) if first else x
        lefts = range(0, x.shape[last], stride)
        grid.append([layers(row.narrow(last, left, min(size, x.shape[last] - left))).clone() for left in lefts])
    for i, row in enumerate(grid):
        for j, tile in enumerate(row):
            if i:
                mix(grid[i - 1][j], tile, blend, dim=first[0])
            if j:
                mix(row[j - 1], tile, blend, dim=last)
    rows = [torch.cat([tile.narrow(last, 0, min(keep, tile.shape[last])) for tile in row], dim=last) for row in grid]
    if not first:
        return rows[0]
    return torch.cat([row.narrow(first[0], 0, min(keep, row.shape[first[0]])) for row in rows], dim=first[0])


# Tiles of the golden case have 4 cells: of 8 pixels, of 4 frames.
CUT_CASES = [("encode", (3, 4), 8), ("decode", (3, 4), 8), ("encode", (2,), 4), ("decode", (2,), 4)]


@pytest.mark.parametrize(("way", "dims", "compression"), CUT_CASES)
@pytest.mark.parametrize(("overlap", "cells"), [(0.0, 4), (0.25, 3), (0.5, 2), (0.75, 1), (0.1, 3), (0.3, 2), (0.7, 1)])
def test_tiles_overlap_by_any_share(overlap: float, cells: int, way: str, dims: tuple[int, ...], compression: int):
    """As the published roundings say where they fit each other; else tiles are so many whole `cells` apart."""
    model = build_golden(tile_overlap=overlap, spatial_tiling=True, temporal_tiling=True)
    sides = (1, 7, 5) if dims == (3, 4) else (9, 2, 2)
    if way == "encode":
        pixels = (4 * sides[0], 8 * sides[1], 8 * sides[2])
        x, layers, cell_in, cell_out = draw_clip(1, 3, *pixels), model.encoder, compression, 1
    else:
        x, layers, cell_in, cell_out = draw_clip(1, 8, *sides), model.decoder, 1, compression
    size_in, size_out = 4 * cell_in, 4 * cell_out
    if (4 * overlap).is_integer():
        stride, blend = int(size_in * (1 - overlap)), int(size_out * overlap)
        assert stride == cell_in * cells
    else:
        stride, blend = cell_in * cells, cell_out * (4 - cells)
    with torch.no_grad():
        ours = model.encode(x).mean_BCFHW if way == "encode" else model.decode(x)
        expected = cut_plainly(layers, x, dims, size_in, stride, blend, size_out - blend)
        whole = layers(x)
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() < 1e-5
    assert ours.shape != whole.shape or (ours - whole).abs().max() > 1e-3
    if dims == (3, 4):
        assert ours.shape == whole.shape


def test_the_published_overlap_is_read_and_one_without_a_distance_is_refused():
    assert DCAEConfig.from_original(f"{GOOD} tile_overlap_factor=0.5").tile_overlap == 0.5
    assert DCAEConfig.from_original(GOOD).tile_overlap == 0.25
    assert DCAEConfig(spatial_tiling=True, tile_overlap=0.875).cuts(decoding=True).space[0].stride == 1
    for overlap in (0.9, 1.0, -0.1):
        with pytest.raises(ConfigError, match=r"tile_px 256 with tile_overlap .* from 0 to 0.875"):
            DCAEConfig(spatial_tiling=True, tile_overlap=overlap)


# --- config ---

GOOD = "encoder.block_type=[ResBlock,ResBlock] encoder.width_list=[4,8] encoder.depth_list=[1,1] decoder.block_type=[ResBlock,ResBlock] decoder.width_list=[4,8] decoder.depth_list=[1,1] encoder.temporal_downsample=[False,False] decoder.temporal_upsample=[False,False] latent_channels=4"  # noqa: E501


def test_the_published_dot_list_is_read():
    assert DCAEConfig.from_original(GOOD).strides == (1, 2, 2)
    assert read_config("dcae_f8t4_tiled").scale == (1.0,) * 8
    assert read_config("dcae_f8t4_tiled").tile_px == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("encoder.depth_list", "encoder.depth_lists"), "did you mean 'encoder.depth_list'"),
        (("decoder.width_list=[4,8]", "decoder.width_list=[4,16]"), "both sides must be alike"),
        (("latent_channels=4", "latent_channels=4 decoder.act=relu"), "only silu is supported"),
        (("latent_channels=4", "latent_channels=4 spatial_compression_ratio=8"), "compress by 2"),
        (("latent_channels=4", "latent_channels=3"), "no multiple of 3"),
        (("depth_list=[1,1]", "depth_list=[1]"), "one per stage"),
        (("width_list=[4,8]", "width_list=[4,12]"), "cannot be averaged"),
    ],
)
def test_wrong_dot_lists_are_refused_with_what_would_be_right(change, words):
    with pytest.raises(ConfigError) as error:
        DCAEConfig.from_original(GOOD.replace(*change))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"spatial_tiling": True, "tile_px": 100}, "multiples of 32"),
        ({"temporal_tiling": True, "tile_frames": 6}, "multiples of 4"),
        ({"halves_frames": (False, False, False, True, True, True)}, "last stage"),
        ({"widths": (128, 256, 512, 500, 1000, 1024)}, "channels"),
    ],
)
def test_wrong_fields_are_refused(fields, words):
    with pytest.raises(ConfigError) as error:
        DCAEConfig(**fields)
    assert words in str(error.value)
