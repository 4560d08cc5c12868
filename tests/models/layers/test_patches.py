"""Latents to tokens and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.denoisers.base import initialize
from frameloom.models.layers.patches import PatchEmbed, pack, unpack
from frameloom.models.spec import token_grid

LATENT = torch.arange(2 * 3 * 2 * 4 * 6.0).reshape(2, 3, 2, 4, 6)


@pytest.mark.parametrize(("side", "frames"), [(1, 1), (2, 1), (2, 2), (1, 2)])
def test_unpack_undoes_pack(side: int, frames: int) -> None:
    tokens, grid = pack(LATENT, side, frames), (2 // frames, 4 // side, 6 // side)
    assert tokens.shape == (2, grid[0] * grid[1] * grid[2], 3 * frames * side * side)
    assert torch.equal(unpack(tokens, grid, side, frames), LATENT)
    assert not torch.equal(unpack(tokens.flip(1), grid, side, frames), LATENT)


def test_features_of_a_packed_token_run_over_channels_slowest() -> None:
    # token of frame 1, row 1, column 2; within it channel 2, row 1, column 0
    assert pack(LATENT, 2)[0, 1 * 6 + 1 * 3 + 2, 2 * 4 + 1 * 2 + 0] == LATENT[0, 2, 1, 3, 4]


def test_channels_may_run_fastest() -> None:
    tokens = torch.arange(2 * 2 * 3 * 2 * 2 * 4.0).reshape(1, 2 * 2 * 3, 16)
    latent = unpack(tokens, (2, 2, 3), 2, channels_last=True)
    assert latent.shape == (1, 4, 2, 4, 6)
    # token of frame 1, row 1, column 2; within it row 1, column 0, channel 3
    assert latent[0, 3, 1, 3, 4] == tokens[0, 11, (1 * 2 + 0) * 4 + 3]
    assert not torch.equal(latent, unpack(tokens, (2, 2, 3), 2))


@pytest.mark.parametrize("latent", [(1, 5, 4), (1, 4, 7), (1, 0, 4), (0, 4, 4)])
def test_a_latent_that_patches_do_not_tile_names_the_rule(latent: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"some denoiser: .*multiples of 2 .*multiples of 16"):
        token_grid(latent, 2, where="some denoiser")
    assert token_grid((3, 4, 6), 2) == (3, 2, 3)


def test_a_convolution_of_patches_is_a_linear_map_of_packed_tokens() -> None:
    embed, latent = PatchEmbed(3, 5, 2).double(), LATENT.double()
    initialize(embed, stream(0, "patch weights"))
    linear = nn.functional.linear(pack(latent, 2), embed.proj.weight.flatten(1), embed.proj.bias)
    tokens = embed(latent)
    assert tokens.shape == (2, 2, 2, 3, 5)
    torch.testing.assert_close(tokens.flatten(1, 3), linear, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(tokens.transpose(2, 3).flatten(1, 3), linear)
