"""Single files of Stability <-> diffusers' folders: counts of the facts, diffusers' own converters, both ways."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError
from frameloom.core.random import stream
from frameloom.models.denoisers.base import build_fresh
from frameloom.models.denoisers.sdxl.config import SIZES, SDXLConfig
from frameloom.models.denoisers.sdxl.keys import UNetNames, open_clip_to_single, wrap_text
from frameloom.models.denoisers.sdxl.model import SDXLUNet, diffusers_arguments
from frameloom.models.denoisers.sdxl.single_file import (
    Part,
    from_single_file,
    join_tensor,
    map_key,
    plan_single_file,
    read_unet_names,
    split_tensor,
    to_single_file,
)
from frameloom.models.denoisers.sdxl.weights import export_original, load_original
from frameloom.models.vaes.kl.config import SIZES as VAE_SIZES
from frameloom.models.vaes.kl.model import KLVAE
from frameloom.models.vaes.kl.weights import load_original as load_vae

build = partial(build_fresh, SDXLUNet)

single_file_utils = pytest.importorskip("diffusers.loaders.single_file_utils")
transformers = pytest.importorskip("transformers")
CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
BIG_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
NARROW = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SECOND = "conditioner.embedders.1.model."


def make_text(kind: str, **sizes: int) -> nn.Module:
    model_class = getattr(transformers, kind)
    config = transformers.CLIPTextConfig(projection_dim=sizes["hidden_size"], **sizes)
    model: nn.Module = model_class(config)
    return model


def make_parts(unet: str = "base", *, full: bool) -> dict[Part, dict[str, Tensor]]:
    clip, big_g = (CLIP, BIG_G) if full else (NARROW, NARROW)
    modules: dict[Part, nn.Module] = {
        "unet": build(SIZES[unet]),
        "vae": KLVAE(VAE_SIZES["sdxl" if full else "tiny"]),
        "text_encoder": make_text("CLIPTextModel", **clip),
        "text_encoder_2": make_text("CLIPTextModelWithProjection", **big_g),
    }
    parts = {part: dict(module.state_dict()) for part, module in modules.items()}
    # As the published folders have it; new versions of transformers leave the wrapper out.
    parts["text_encoder"] = {
        key if key.startswith("text_model.") else f"text_model.{key}": tensor
        for key, tensor in parts["text_encoder"].items()
    }
    return parts


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def test_the_whole_published_file_has_the_stated_tensors_and_comes_back() -> None:
    with torch.device("meta"):
        parts = make_parts(full=True)
        single = to_single_file(parts, logit_scale=torch.zeros(()))
    assert len(single) == 2514
    assert sum(tensor.numel() for tensor in single.values()) == 3_468_837_868
    counts = {
        "model.diffusion_model.": (1680, 2_567_463_684),
        "first_stage_model.": (248, 83_653_863),
        "conditioner.embedders.0.transformer.": (196, 123_060_480),
        SECOND: (390, 694_659_840 + 1),
    }
    for prefix, expected in counts.items():
        sizes = [tensor.numel() for key, tensor in single.items() if key.startswith(prefix)]
        assert (len(sizes), sum(sizes)) == expected
    assert tuple(single[f"{SECOND}transformer.resblocks.31.attn.in_proj_weight"].shape) == (3840, 1280)
    back = from_single_file(single)
    assert {part: shapes(tensors) for part, tensors in back.items()} == {
        part: shapes(tensors) for part, tensors in parts.items()
    }


@pytest.mark.parametrize("size", ["tiny", "base", "refiner"])
def test_diffusers_reads_our_unet_keys_as_we_do(size: str) -> None:
    with torch.device("meta"):
        model = build(SIZES[size])
    single = export_original(model, "single")
    arguments = diffusers_arguments(SIZES[size])
    theirs = single_file_utils.convert_ldm_unet_checkpoint(dict(single), arguments)
    ours = from_single_file(single)["unet"]
    assert theirs.keys() == ours.keys() == model.state_dict().keys()
    assert all(theirs[key] is single_tensor for key, single_tensor in _by_folder_key(single).items())


def _by_folder_key(single: dict[str, Tensor]) -> dict[str, Tensor]:
    names = read_unet_names(single)
    return {map_key(key, names)[1][0]: tensor for key, tensor in single.items()}  # type: ignore[index]


@pytest.mark.parametrize("size", ["tiny", "sdxl"])
def test_diffusers_reads_our_autoencoder_keys_as_we_do(size: str) -> None:
    from frameloom.models.vaes.kl.model import diffusers_arguments as vae_arguments

    device = torch.device("meta" if size == "sdxl" else "cpu")
    with device:
        model = KLVAE(VAE_SIZES[size])
    single = to_single_file({"vae": model.state_dict()})
    assert tuple(single["first_stage_model.decoder.mid.attn_1.proj_out.weight"].shape[2:]) == (1, 1)
    theirs = single_file_utils.convert_ldm_vae_checkpoint(dict(single), vae_arguments(VAE_SIZES[size]))
    assert shapes(theirs) == shapes(model.state_dict())
    if size == "tiny":
        assert all(torch.equal(theirs[key], tensor) for key, tensor in model.state_dict().items())


def test_diffusers_reads_our_text_keys_as_we_do() -> None:
    parts = make_parts("tiny", full=False)
    single = to_single_file(parts)
    text_model = make_text("CLIPTextModelWithProjection", **NARROW)
    theirs = single_file_utils.convert_open_clip_checkpoint(text_model, dict(single), prefix=SECOND)
    assert theirs.keys() == parts["text_encoder_2"].keys()
    assert all(torch.equal(theirs[key], tensor) for key, tensor in parts["text_encoder_2"].items())
    projection = single[f"{SECOND}text_projection"]
    assert not torch.equal(projection, parts["text_encoder_2"]["text_projection.weight"])
    first = single_file_utils.convert_ldm_clip_checkpoint(dict(single))
    assert first.keys() == parts["text_encoder"].keys()


def test_fused_text_attention_computes_the_same() -> None:
    """The single file's layer is PyTorch's own attention, with q, k and v in one tensor."""
    parts = make_parts("tiny", full=False)
    single = to_single_file({"text_encoder_2": parts["text_encoder_2"]})
    fused = nn.MultiheadAttention(16, 2, batch_first=True)
    fused.load_state_dict(
        {
            key.removeprefix(start): tensor
            for key, tensor in single.items()
            if key.startswith(start := f"{SECOND}transformer.resblocks.1.attn.")
        }
    )
    text_model = make_text("CLIPTextModelWithProjection", **NARROW)
    text_model.load_state_dict(from_single_file(single)["text_encoder_2"])
    layer = text_model.text_model.encoder.layers[1].self_attn  # type: ignore[union-attr,index]
    states = torch.randn(2, 3, 16, generator=stream(0, "test states"))
    with torch.no_grad():
        expected = fused(states, states, states, need_weights=False)[0]
        torch.testing.assert_close(layer(states)[0], expected, atol=1e-6, rtol=1e-5)
        fused.in_proj_weight.copy_(fused.in_proj_weight.roll(16, 0))
        assert not torch.allclose(layer(states)[0], fused(states, states, states, need_weights=False)[0], atol=1e-4)


def test_parts_and_whole_can_be_saved(tmp_path: Path) -> None:
    single = to_single_file(make_parts("tiny", full=False))
    save_file(single, tmp_path / "single.safetensors")
    for part, tensors in from_single_file(load_file(tmp_path / "single.safetensors")).items():
        save_file(tensors, tmp_path / f"{part}.safetensors")


def test_tensors_come_back_to_the_bit_and_one_by_one() -> None:
    parts = make_parts("tiny", full=False)
    single = to_single_file(parts, logit_scale=torch.tensor(4.6))
    whole = from_single_file(single)
    names = read_unet_names(single)
    streamed: dict[Part, dict[str, Tensor]] = {part: {} for part in parts}
    for key, tensor in single.items():
        for part, name, piece in split_tensor(key, tensor, names):
            streamed[part][name] = piece
    for part, tensors in parts.items():
        assert tensors.keys() == whole[part].keys() == streamed[part].keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, whole[part][key]) and torch.equal(tensor, streamed[part][key])
            assert whole[part][key].is_contiguous()
    plan = plan_single_file(parts)
    joined = {key: join_tensor(key, [parts[part][name] for name in names]) for key, (part, names) in plan.items()}
    assert joined.keys() | {f"{SECOND}logit_scale"} == single.keys()
    assert all(torch.equal(tensor, single[key]) for key, tensor in joined.items())


def test_parts_of_a_whole_file_load_into_their_models() -> None:
    parts = make_parts("tiny", full=False)
    single = to_single_file(parts)
    unet = build(SIZES["tiny"], stream(1, "test weights"))
    vae = KLVAE(VAE_SIZES["tiny"])
    for model, part, load in ((unet, "unet", load_original), (vae, "vae", load_vae)):
        assert any(not torch.equal(tensor, parts[part][key]) for key, tensor in model.state_dict().items())
        load(model, single)  # type: ignore[operator]
        assert all(torch.equal(tensor, parts[part][key]) for key, tensor in model.state_dict().items())


def test_the_refiner_keeps_its_text_encoder_in_the_first_place() -> None:
    with torch.device("meta"):
        parts = {part: make_parts("refiner", full=False)[part] for part in ("unet", "text_encoder_2")}
        single = to_single_file(parts, refiner=True, logit_scale=torch.zeros(()))
    assert "conditioner.embedders.0.model.text_projection" in single
    assert "conditioner.embedders.0.model.logit_scale" in single
    assert "model.diffusion_model.output_blocks.2.1.conv.weight" in single
    assert "model.diffusion_model.output_blocks.5.2.conv.weight" in single
    assert shapes(from_single_file(single)["text_encoder_2"]) == shapes(parts["text_encoder_2"])
    with pytest.raises(CheckpointError, match="no place for text_encoder"):
        plan_single_file({"text_encoder": []}, refiner=True)


def test_names_without_the_outer_wrapper_are_understood() -> None:
    key = "encoder.layers.0.mlp.fc1.weight"
    assert wrap_text(key) == wrap_text(f"text_model.{key}") == f"text_model.{key}"
    assert open_clip_to_single(key) == ("transformer.resblocks.0.mlp.c_fc.weight", 0)


def test_position_ids_are_dropped_both_ways() -> None:
    key = "text_model.embeddings.position_ids"
    assert plan_single_file({"text_encoder": [key], "text_encoder_2": [key]}) == {}
    assert split_tensor(f"conditioner.embedders.0.transformer.{key}", torch.zeros(1), UNetNames(2)) == []


@pytest.mark.parametrize(
    "key",
    [
        "denoiser.sigmas",
        "model.diffusion_model.strange.weight",
        "model.diffusion_model.input_blocks.1.0.strange.weight",
        "model.diffusion_model.middle_block.3.weight",
        "first_stage_model.encoder.down.0.block.0.strange.weight",
        "first_stage_model.decoder.mid.attn_1.strange.weight",
        f"{SECOND}strange",
        f"{SECOND}transformer.resblocks.0.strange.weight",
    ],
)
def test_a_key_that_belongs_to_no_part_is_refused_by_name(key: str) -> None:
    with pytest.raises(CheckpointError, match="1 keys belong to no part"):
        from_single_file({key: torch.zeros(1)})


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("unet", "strange.weight"),
        ("unet", "down_blocks.0.resnets.0.strange.weight"),
        ("unet", "up_blocks.0.downsamplers.0.conv.weight"),
        ("unet", "mid_block.resnets.2.conv1.weight"),
        ("vae", "encoder.down_blocks.0.resnets.0.strange.weight"),
        ("vae", "encoder.norm_out.weight"),
        ("text_encoder_2", "text_model.encoder.layers.0.strange.weight"),
    ],
)
def test_a_folder_key_without_a_place_is_refused_by_name(part: Any, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}' has no place"):
        plan_single_file({part: [key]})


def test_a_missing_third_of_fused_attention_is_refused() -> None:
    start = "text_model.encoder.layers.0.self_attn."
    keys = [f"{start}{name}_proj.weight" for name in "qv"]
    with pytest.raises(CheckpointError, match="made of q, k and v"):
        plan_single_file({"text_encoder_2": keys})
    single, _ = plan_single_file({"text_encoder_2": [*keys, f"{start}k_proj.weight"]}).popitem()
    assert single == f"{SECOND}transformer.resblocks.0.attn.in_proj_weight"


@pytest.mark.parametrize("num_res_blocks", [1, 2, 3])
@pytest.mark.parametrize("channel_mult", [(1,), (1, 2), (1, 1, 2, 2)])
def test_the_map_is_read_from_the_keys_for_any_depth(num_res_blocks: int, channel_mult: tuple[int, ...]) -> None:
    config = SDXLConfig(
        in_channels=4,
        context_in_dim=8,
        vec_in_dim=8,
        model_channels=32,
        channel_mult=channel_mult,
        transformer_depth=(1,) * len(channel_mult),
        attention_resolutions=(2 ** (len(channel_mult) - 1),),
        num_res_blocks=num_res_blocks,
        num_head_channels=32,
    )
    with torch.device("meta"):
        model = build(config)
    single = export_original(model, "bare")
    assert len(single) == len(model.state_dict())
    names = UNetNames.read(single)
    assert names.num_res_blocks == UNetNames.read(model.state_dict()).num_res_blocks == num_res_blocks
    assert {names.to_folder(key) for key in single} == model.state_dict().keys()
