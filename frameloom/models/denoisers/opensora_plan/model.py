"""OpenSoraT2V: patches of a latent through blocks of self-attention, cross-attention to the text and an MLP.

Shape letters: B batch, C channels, F frames, H height, W width, N video tokens, K text tokens, D width, P rotary
pairs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.denoisers.base import initialize
from frameloom.models.denoisers.opensora_plan.blocks import Block, ModulationTable, modulate
from frameloom.models.denoisers.opensora_plan.config import OpenSoraPlanConfig, Pattern
from frameloom.models.denoisers.opensora_plan.positions import RotaryTables, pool_cells, token_grid, unpack
from frameloom.models.denoisers.opensora_plan.skiparse import PADDED, deal_mask

TIME_WIDTH = 256


def embed_index(index_B: Tensor) -> Tensor:
    """Sinusoids of the noise level's index in float32, cosines first."""
    half = TIME_WIDTH // 2
    exponent = torch.arange(half, dtype=torch.float32, device=index_B.device) / half
    angles = index_B.float()[:, None] * torch.exp(-math.log(10_000) * exponent)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class PatchEmbed(nn.Module):
    """Frame by frame; there is no patching in time and no position is added."""

    def __init__(self, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)

    def forward(self, latent_BCFHW: Tensor) -> Tensor:
        batch = len(latent_BCFHW)
        patches: Tensor = self.proj(latent_BCFHW.transpose(1, 2).flatten(0, 1))
        return torch.unflatten(patches, 0, (batch, -1)).permute(0, 1, 3, 4, 2).flatten(1, 3)


class TwoLinear(nn.Module):
    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_width, width)
        self.linear_2 = nn.Linear(width, width)


class TimeEmbed(TwoLinear):
    def forward(self, sinusoids_BD: Tensor) -> Tensor:
        embedded: Tensor = self.linear_2(F.silu(self.linear_1(sinusoids_BD)))
        return embedded


class CaptionProjection(TwoLinear):
    def forward(self, text_BKD: Tensor) -> Tensor:
        projected: Tensor = self.linear_2(F.gelu(self.linear_1(text_BKD), approximate="tanh"))
        return projected


class SharedModulation(nn.Module):
    """One timestep embedding, and from it one set of six vectors for all blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({"timestep_embedder": TimeEmbed(TIME_WIDTH, width)})
        self.linear = nn.Linear(width, 6 * width)

    def forward(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 6, D] for the blocks and [B, D] for the last layer."""
        time_BD: Tensor = self.emb["timestep_embedder"](embed_index(index_B).to(self.linear.weight.dtype))
        return torch.unflatten(self.linear(F.silu(time_BD)), -1, (6, -1)), time_BD


class OpenSoraT2V(ModulationTable):
    """One device, no parallelism; `rotary` keeps the position tables of the latest shapes."""

    def __init__(self, config: OpenSoraPlanConfig) -> None:
        width = config.hidden_size
        super().__init__(2, width)
        self.config = config
        self.pos_embed = PatchEmbed(config.in_channels, width, config.patch_size)
        self.adaln_single = SharedModulation(width)
        self.caption_projection = CaptionProjection(config.context_in_dim, width)
        self.transformer_blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.proj_out = nn.Linear(width, config.patch_size**2 * config.in_channels)
        if config.inpaint:
            self.pos_embed_masked_hidden_states = self._build_branch(config.in_channels)
            self.pos_embed_mask = self._build_branch(config.vae_scale_factor_t)
        self.rotary = RotaryTables(config.attention_head_dim, config.interpolation_scales)

    def _build_branch(self, in_channels: int) -> nn.Sequential:
        width = self.config.hidden_size
        return nn.Sequential(
            PatchEmbed(in_channels, width, self.config.patch_size), nn.Linear(width, width, bias=False)
        )

    def forward(
        self,
        noisy_BCFHW: Tensor,
        index_B: Tensor,
        text_BKD: Tensor,
        text_mask_BK: Tensor | None = None,
        cells_BFHW: Tensor | None = None,
        beside_BCFHW: Tensor | None = None,
    ) -> Tensor:
        """Prediction for a noisy latent at a noise level's index (0 to 999).

        `cells_BFHW` is 1 where the latent holds picture; None, or all ones, leaves masks out.
        """
        grid = self._check(noisy_BCFHW, cells_BFHW, beside_BCFHW)
        dtype = self.proj_out.weight.dtype
        x_BND = self._embed(noisy_BCFHW.to(dtype), beside_BCFHW)
        modulation_B6D, time_BD = self.adaln_single(index_B)
        text_BKD = self.caption_projection(text_BKD.to(dtype))
        text_mask = None if text_mask_BK is None else ((1 - text_mask_BK.float()) * PADDED).to(dtype)[:, None, None]
        rope_N1P = self.rotary.get(grid, noisy_BCFHW.device)
        masks = self._masks(cells_BFHW, x_BND)
        for layer, block in enumerate(self.transformer_blocks):
            mask = masks[self.config.pattern(layer)]
            x_BND = block(x_BND, text_BKD, modulation_B6D, rope_N1P, mask, text_mask)
        shift, scale = (self.scale_shift_table + time_BD[:, None]).chunk(2, dim=1)
        prediction_BNC = self.proj_out(modulate(x_BND, shift, scale, self.config.norm_eps))
        return unpack(prediction_BNC, grid, self.config.patch_size).to(noisy_BCFHW.dtype)

    def _embed(self, noisy_BCFHW: Tensor, beside_BCFHW: Tensor | None) -> Tensor:
        x_BND: Tensor = self.pos_embed(noisy_BCFHW)
        if not self.config.inpaint:
            return x_BND
        if beside_BCFHW is None:
            beside_BCFHW = self._know_nothing(noisy_BCFHW)
        masked, mask = beside_BCFHW.to(noisy_BCFHW.dtype).tensor_split([self.config.in_channels], dim=1)
        return x_BND.add(self.pos_embed_masked_hidden_states(masked)).add(self.pos_embed_mask(mask))

    def _know_nothing(self, noisy_BCFHW: Tensor) -> Tensor:
        """A mask of ones: everything is to be made; the latent of a clip that shows nothing is taken as zero."""
        batch, _, *size = noisy_BCFHW.shape
        ones = noisy_BCFHW.new_ones(batch, self.config.vae_scale_factor_t, *size)
        return torch.cat([torch.zeros_like(noisy_BCFHW), ones], dim=1)

    def _masks(self, cells_BFHW: Tensor | None, x_BND: Tensor) -> dict[Pattern, Tensor | None]:
        """A mask for every pattern that the layers use, made once for all of them."""
        config = self.config
        tokens_BN = None
        # One look at the mask saves it in every layer: kernels without a mask are the faster ones.
        if cells_BFHW is not None and not bool(cells_BFHW.all()):
            tokens_BN = pool_cells(cells_BFHW, config.patch_size)
        patterns = {config.pattern(layer) for layer in range(config.num_layers)}
        return {pattern: deal_mask(tokens_BN, pattern, config.sparse_n, like_BNC=x_BND) for pattern in patterns}

    def _check(self, noisy: Tensor, cells: Tensor | None, beside: Tensor | None) -> tuple[int, int, int]:
        """The grid of tokens; ConfigError that names the rule when a tensor does not fit."""
        config, where = self.config, "opensora_plan denoiser"
        batch, channels, frames, height, width = noisy.shape
        if channels != config.in_channels:
            raise ConfigError(
                f"{where}: the latent has {channels} channels, the model takes {config.in_channels}; choose the "
                "autoencoder that the model was made for"
            )
        if cells is not None and cells.shape != (batch, frames, height, width):
            raise ConfigError(
                f"{where}: cells_BFHW is {tuple(cells.shape)}, the latent has {(batch, frames, height, width)}; give "
                "one number for every latent cell"
            )
        if beside is not None and not config.inpaint:
            raise ConfigError(
                f"{where}: the model has no input for beside_BCFHW; choose an inpaint size or leave it out"
            )
        if beside is not None and beside.shape != (batch, config.beside_channels, frames, height, width):
            raise ConfigError(
                f"{where}: beside_BCFHW is {tuple(beside.shape)}; it should be the masked latent ({channels} "
                f"channels), then the mask ({config.vae_scale_factor_t}), for a latent of {frames}x{height}x{width}"
            )
        return token_grid((frames, height, width), config.patch_size)


def build(config: OpenSoraPlanConfig, generator: torch.Generator | None = None) -> OpenSoraT2V:
    """A model with fresh weights; under `torch.device("meta")`, with shapes only."""
    device = torch.get_default_device()
    # Made without storage first: layers would otherwise fill themselves from the global generator.
    with torch.device("meta"):
        model = OpenSoraT2V(config)
    if device.type == "meta":
        return model
    model.to_empty(device=device)
    if generator is None:
        generator = stream(0, "opensora_plan weights", device=device.type)
    initialize(model, generator, is_zero=starts_zero)
    return model


def starts_zero(name: str) -> bool:
    """The last layer of a branch beside the noisy latent: a new branch changes nothing at first."""
    return name in ("pos_embed_masked_hidden_states.1", "pos_embed_mask.1")
