"""Tiles of any autoencoder: near the whole picture, without seams, and exact where nothing is cut."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.registry import get_vae
from frameloom.models.vaes.base import EncodePolicy, VideoVAE


def build(name: str) -> VideoVAE:
    family = get_vae(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family.build(family.sizes["tiny"])
    if family.start is not None:
        family.start(model)
    return model.eval().requires_grad_(False)


def use(vae: VideoVAE, **settings: Any) -> VideoVAE:
    """A copy under another policy."""
    return deepcopy(vae).use(EncodePolicy(**settings))


def draw_clip(frames: int, height: int, width: int) -> Tensor:
    """A soft picture that moves: noise of an eighth of the size, scaled up."""
    noise = torch.rand(1, 3, frames, height // 8, width // 8, generator=stream(0, "test tiled")) * 2 - 1
    return torch.nn.functional.interpolate(noise, (frames, height, width), mode="trilinear")


@pytest.mark.parametrize(("name", "frames"), [("wfvae", 5), ("kl", 2), ("causal", 5), ("hunyuan", 5), ("dc_ae", 8)])
def test_shapes_are_those_of_the_whole(name: str, frames: int) -> None:
    vae = build(name)
    stride = vae.strides[1]
    tiled = use(vae, tile_px=4 * stride, tile_overlap=0.25)
    clip = draw_clip(frames, 6 * stride, 5 * stride)
    whole, cut = vae.encode(clip), tiled.encode(clip)
    assert cut.mean_BCFHW.shape == whole.mean_BCFHW.shape == cut.logvar_BCFHW.shape
    assert tiled.decode(whole.mean_BCFHW).shape == clip.shape
    assert tiled.latent_frames(frames) == vae.latent_frames(frames)


def test_a_picture_that_fits_into_a_tile_is_exact() -> None:
    vae = build("wfvae")
    tiled = use(vae, tile_px=64)
    clip = draw_clip(5, 64, 48)
    latent = vae.encode(clip).mean_BCFHW
    assert torch.equal(tiled.encode(clip).mean_BCFHW, latent)
    assert torch.equal(tiled.decode(latent), vae.decode(latent))
    larger = draw_clip(5, 96, 96)
    assert not torch.equal(tiled.encode(larger).mean_BCFHW, vae.encode(larger).mean_BCFHW)


def measure_seam(pixels: Tensor, whole: Tensor, step: int) -> tuple[float, float]:
    """(mean jump of the error from one column to the next where a new tile begins, the same elsewhere)."""
    error = pixels - whole
    jumps_W = (error[..., 1:] - error[..., :-1]).abs().mean(dim=(0, 1, 2, 3))
    at_seams = torch.zeros(len(jumps_W), dtype=torch.bool)
    at_seams[step - 1 :: step] = True
    return float(jumps_W[at_seams].mean()), float(jumps_W[~at_seams].mean())


def test_overlap_hides_the_seams() -> None:
    vae = build("wfvae")
    clip = draw_clip(5, 128, 128)
    latent = vae.encode(clip).mean_BCFHW
    whole = vae.decode(latent)
    blended = use(vae, tile_px=64, tile_overlap=0.25).decode(latent)
    butted = use(vae, tile_px=64, tile_overlap=0.0).decode(latent)
    seam, elsewhere = measure_seam(blended, whole, 48)
    hard_seam, hard_elsewhere = measure_seam(butted, whole, 64)
    # Without overlap the error jumps at a seam as it does nowhere else; with it, seams are like any other column.
    assert hard_seam > 10 * hard_elsewhere
    assert seam < 2 * elsewhere + 1e-3 and seam < hard_seam / 5


def test_no_layer_sees_more_than_a_tile() -> None:
    vae, sides = build("wfvae"), []
    vae.encoder.register_forward_pre_hook(lambda _, args: sides.append(tuple(args[0].shape[-2:])))  # type: ignore[union-attr, operator]
    tiled = use(vae, tile_px=64)
    tiled.encode(draw_clip(1, 128, 96))
    assert len(sides) == 6 and max(max(side) for side in sides) == 32  # half of a tile, after the first wavelet


def test_sizes_that_do_not_divide_are_refused() -> None:
    vae = build("wfvae")
    for tile_px, overlap in ((60, 0.25), (64, 0.3), (64, 1.0), (64, -0.1), (0, 0.25)):
        with pytest.raises(ConfigError, match="multiples of 8"):
            use(vae, tile_px=tile_px, tile_overlap=overlap)
