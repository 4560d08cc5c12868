"""The picture autoencoder on clips. B batch, C channels, F frames, H height, W width."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.core.random import stream
from frameloom.models.vaes.base import EncodePolicy
from frameloom.models.vaes.kl.config import SIZES, KLConfig
from frameloom.models.vaes.kl.model import KLVAE, diffusers_arguments
from frameloom.models.vaes.kl.weights import detect_layout, export_original, load_original
from tests.models.vaes.contract import VAEContract

NARROW = KLConfig(base_channels=4, channel_mult=(1, 1, 2, 2), num_res_blocks=1, norm_groups=2)


class TestKLVAE(VAEContract):
    family_name = "kl"
    narrow: ClassVar = {"base_channels": 4, "norm_groups": 2}
    clip = (2, 16, 24)
    # Results have the dtype of the input; see the test of autocast below.
    test_autocast_gives_half_precision_and_gradients = None


def build_awake(config: KLConfig = NARROW, seed: int = 0) -> KLVAE:
    model = KLVAE(config)
    generator = stream(seed, "test weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    assert isinstance(model, KLVAE)
    return model.eval()


def draw_clip(*shape: int) -> Tensor:
    return torch.rand(shape, generator=stream(0, "clip", *shape)) * 2 - 1


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


def test_released_size_has_the_published_keys_and_parameters() -> None:
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        ours = KLVAE(SIZES["sdxl"])
        theirs = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=4,
        )
    expected = {key: tensor.shape for key, tensor in theirs.state_dict().items()}
    assert {key: tensor.shape for key, tensor in ours.state_dict().items()} == expected
    assert sum(parameter.numel() for parameter in ours.parameters()) == 83_653_863
    assert len(expected) == 248
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in KLVAE(SIZES["tiny"]).parameters()) == 316_695


def test_diffusers_computes_the_same_picture_by_picture() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = build_awake()
    twin = diffusers.AutoencoderKL(**diffusers_arguments(NARROW)).eval()
    twin.load_state_dict(model.state_dict())
    clip = draw_clip(2, 3, 3, 16, 24)
    with torch.no_grad():
        moments = model.encode(clip)
        pixels = model.decode(moments.mean_BCFHW)
        assert moments.mean_BCFHW.shape == (2, 4, 3, 2, 3) and pixels.shape == clip.shape
        for frame in range(3):
            expected = twin.encode(clip[:, :, frame]).latent_dist
            assert difference(moments.mean_BCFHW[:, :, frame], expected.mean) <= 1e-5
            assert difference(moments.logvar_BCFHW[:, :, frame], expected.logvar) <= 1e-5
            assert difference(pixels[:, :, frame], twin.decode(expected.mean).sample) <= 1e-5
        assert difference(moments.mean_BCFHW[:, :, 0], expected.mean) > 1e-3


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_any_number_of_frames_is_a_clip_and_frames_do_not_see_each_other(frames: int) -> None:
    model = build_awake()
    clip = draw_clip(1, 3, frames, 16, 8)
    assert model.latent_frames(frames) == frames
    with torch.no_grad():
        latent = model.encode(clip).mean_BCFHW
        alone = torch.cat([model.encode(clip[:, :, [frame]]).mean_BCFHW for frame in range(frames)], dim=2)
    assert difference(latent, alone) <= 1e-5


def test_a_latent_of_the_denoiser_is_scaled_as_published() -> None:
    ones = torch.ones(1, 4, 1, 1, 1)
    assert torch.equal(KLVAE(NARROW).normalize(ones), torch.full((1, 4, 1, 1, 1), 0.13025))
    with torch.device("meta"):
        playground = KLVAE(SIZES["playground-2.5"])
    playground.reset_scaling()
    expected = (1 + 1.6574) * 0.5 / 8.4927
    assert float(playground.normalize(ones)[0, 0]) == pytest.approx(expected, rel=1e-6)
    assert difference(playground.denormalize(playground.normalize(ones)), ones) <= 1e-6


@pytest.mark.parametrize("layout", ["diffusers", "single", "bare"])
def test_weights_survive_every_published_layout(layout: Any) -> None:
    model, other = build_awake(), build_awake(seed=1)
    tensors = export_original(model, layout)
    assert detect_layout(tensors) == layout
    assert not torch.equal(other.state_dict()["quant_conv.weight"], model.state_dict()["quant_conv.weight"])
    load_original(other, tensors)
    assert all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in model.state_dict().items())


def test_older_spelling_of_the_attention_loads() -> None:
    model = build_awake()
    old = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    tensors = dict(model.state_dict())
    for now, before in old.items():
        tensors = {key.replace(now, before): tensor for key, tensor in tensors.items()}
    assert tensors.keys() != model.state_dict().keys()
    other = build_awake(seed=1)
    load_original(other, tensors)
    assert all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("layout", ["diffusers", "single", "bare"])
def test_a_damaged_file_of_any_layout_is_refused(layout: Any) -> None:
    model = build_awake()
    complete = export_original(model, layout)
    for key in list(complete)[::9]:
        with pytest.raises(CheckpointError, match=r"does not fit.*1 missing"):
            load_original(model, {name: value for name, value in complete.items() if name != key})
    strange = "first_stage_model.loss.weight" if layout == "single" else "loss.weight"
    with pytest.raises(CheckpointError, match=f"1 unexpected .{strange}"):
        load_original(model, complete | {strange: torch.zeros(1)})
    with pytest.raises(CheckpointError, match="none of the 1 tensors"):
        load_original(model, {"conv_in.weight": torch.zeros(1)})


def test_other_parts_of_a_single_file_are_passed_over() -> None:
    tensors = export_original(build_awake(), "single")
    others = ("model.diffusion_model.out.0.weight", "conditioner.embedders.1.model.logit_scale")
    load_original(build_awake(seed=1), tensors | {key: torch.zeros(1) for key in others})
    with pytest.raises(CheckpointError, match=r"model_ema\.decay"):
        load_original(build_awake(seed=1), tensors | {"model_ema.decay": torch.zeros(1)})


def test_pieces_equal_the_whole() -> None:
    model = build_awake()
    clip = draw_clip(2, 3, 3, 16, 16)
    seen: list[int] = []
    model.encoder.conv_in.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with torch.no_grad():
        latent = model.encode(clip).mean_BCFHW
        pixels = model.decode(latent)
        model.use(EncodePolicy(chunk_frames=4))
        assert difference(model.encode(clip).mean_BCFHW, latent) <= 1e-5
        assert difference(model.decode(latent), pixels) <= 1e-5
        model.use(EncodePolicy())
        model.encode(clip)
    assert seen == [6, 4, 2, 6]
    with pytest.raises(ConfigError, match="chunk_frames 0"):
        model.use(EncodePolicy(chunk_frames=0))


def test_autocast_leaves_the_published_size_alone_and_reaches_the_tiny_one() -> None:
    clip = draw_clip(1, 3, 1, 16, 16)
    for force_upcast in (True, False):
        model = build_awake(dataclasses.replace(NARROW, force_upcast=force_upcast))
        with torch.no_grad():
            expected = model.encode(clip).mean_BCFHW
            with torch.autocast("cpu", dtype=torch.bfloat16):
                given = model.encode(clip).mean_BCFHW
        assert torch.equal(given, expected) == force_upcast
        assert difference(given, expected) < 0.1 * float(expected.abs().max())
    assert SIZES["sdxl"].force_upcast and not SIZES["tiny"].force_upcast


def test_float16_is_refused_unless_the_weights_are_made_for_it() -> None:
    with pytest.raises(ConfigError, match="overflow in float16"):
        build_awake().half().encode(draw_clip(1, 3, 1, 8, 8))
    with torch.no_grad():
        fixed = build_awake(dataclasses.replace(NARROW, force_upcast=False)).half()
        assert fixed.encode(draw_clip(1, 3, 1, 8, 8)).mean_BCFHW.dtype == torch.float32


def test_a_block_compiles_without_graph_breaks() -> None:
    block = build_awake().blocks()[0]
    picture = draw_clip(1, 4, 8, 8)
    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, backend="eager")
        assert torch.equal(compiled(picture, None), block(picture, None))


def test_wrong_pixels_and_latents_are_refused_by_rule() -> None:
    model = build_awake()
    with pytest.raises(DataError, match="multiples of 8 and 8"):
        model.encode(torch.zeros(1, 3, 1, 12, 8))
    with pytest.raises(DataError, match=r"expected \(batch, 3, frames"):
        model.encode(torch.zeros(1, 4, 1, 8, 8))
    with pytest.raises(DataError, match=r"expected \(batch, 4, frames"):
        model.decode(torch.zeros(1, 3, 1, 8, 8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"channel_mult": (1, 2)}, "must have 4 numbers"),
        ({"norm_groups": 3}, "cannot be cut into 3 groups"),
        ({"num_res_blocks": 0}, "at least 1"),
        ({"scale": (1.0, 2.0)}, "scale has 2 numbers for 4 latent channels"),
    ],
)
def test_a_wrong_setting_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KLConfig(**fields)
