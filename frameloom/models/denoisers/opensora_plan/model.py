"""OpenSoraT2V (Open-Sora-Plan 1.3): blocks of self-attention, cross-attention to the text and an MLP.

Shape letters: B batch, C channels, F frames, H height, W width, N video tokens, K text tokens, D width, P rotary
pairs.

Blocks take and return tensors only. LayerNorms have no parameters.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.distributed.sequence_parallel import ALONE, Exchange, SequenceGroup
from frameloom.models.denoisers.base import Conditions, Denoiser, Draws, Encode, find_index
from frameloom.models.denoisers.opensora_plan.conditioning import pack_known
from frameloom.models.denoisers.opensora_plan.config import BLOCK_LISTS, WHERE, OpenSoraPlanConfig
from frameloom.models.denoisers.opensora_plan.skiparse import (
    PADDED,
    SkiparseAttention,
    mask_filling,
    turn_table,
)
from frameloom.models.layers.attention.attention import Attention
from frameloom.models.layers.dropout import KeyedDropout, dropout_keys
from frameloom.models.layers.mlp import FeedForward, TwoLinear
from frameloom.models.layers.modulation import ModulationTable, SharedModulation, modulate
from frameloom.models.layers.patches import Grid, PatchEmbed, unpack
from frameloom.models.layers.positions import PositionTables
from frameloom.models.spec import Latent


class OpenSoraT2V(ModulationTable, Denoiser):
    """`rotary` keeps the position tables of the latest shapes. In a `sequence` group each rank has a part of the video
    tokens and all of the text."""

    family, block_lists = "opensora_plan", BLOCK_LISTS
    config: OpenSoraPlanConfig

    def __init__(self, config: OpenSoraPlanConfig) -> None:
        width = config.hidden_size
        super().__init__(2, width)
        self.config = config
        self.sequence: SequenceGroup = ALONE
        self.pos_embed = PatchEmbed(config.in_channels, width, config.patch_size)
        self.adaln_single = SharedModulation(width)
        self.caption_projection = TwoLinear(config.context_in_dim, width, nn.GELU(approximate="tanh"))
        self.transformer_blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.proj_out = nn.Linear(width, config.patch_size**2 * config.in_channels)
        if config.inpaint:
            self.pos_embed_masked_hidden_states, self.pos_embed_mask = (
                nn.Sequential(PatchEmbed(channels, width, config.patch_size), nn.Linear(width, width, bias=False))
                for channels in (config.in_channels, config.vae_scale_factor_t)
            )
        self.rotary = PositionTables(
            lambda grid: turn_table(grid, config.attention_head_dim, config.interpolation_scales)
        )

    def accepted(self) -> tuple[str, ...]:
        return ("dropout_seeds", "cond_latents") if self.config.inpaint else ("dropout_seeds",)

    def is_zero(self, name: str) -> bool:
        """The last layer of a branch beside the noisy latent: a new branch changes nothing at first."""
        return name in ("pos_embed_masked_hidden_states.1", "pos_embed_mask.1")

    @staticmethod
    def exchanges(config: OpenSoraPlanConfig, latent_FHW: Latent, num_text: int, degree: int) -> list[Exchange]:
        return [Exchange(config.num_tokens(latent_FHW), config.hidden_size)] * config.num_layers

    def pack_known(self, clip_BCFHW: Tensor, known_B1FHW: Tensor, encode: Encode, draws: Draws) -> Tensor:
        return pack_known(self.config, clip_BCFHW, known_B1FHW, encode)

    def forward(self, noisy_BCFHW: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
        """Pooled text is not used. Without `cond_latents`, an inpaint model gets a mask of nothing known."""
        self.check_conditions(timestep_B, conditions)
        cond_BCFHW, seeds_B = conditions.get("cond_latents"), conditions.get("dropout_seeds")
        grid = self._check(noisy_BCFHW, cond_BCFHW)
        dtype = self.proj_out.weight.dtype
        x_BND = self._embed(noisy_BCFHW.to(dtype), cond_BCFHW)
        modulation_B6D, time_BD = self.adaln_single(find_index(timestep_B))
        text_BKD = self.caption_projection(conditions["text"].to(dtype))
        text_mask = ((1 - conditions["text_mask"].float()) * PADDED).to(dtype)[:, None, None]
        rope_N1P = self.rotary.get(grid, device=noisy_BCFHW.device)
        config, num_tokens = self.config, x_BND.shape[1]
        patterns = {config.pattern(layer) for layer in range(config.num_layers)}
        masks = {pattern: mask_filling(pattern, config.sparse_n, like_BNC=x_BND) for pattern in patterns}
        x_BND, first = self.sequence.split(x_BND), self.sequence.find_first(num_tokens)
        for layer, block in enumerate(self.transformer_blocks):
            mask = masks[config.pattern(layer)]
            keys = dropout_keys(seeds_B, layer, num_tokens, first)
            x_BND = block(x_BND, text_BKD, modulation_B6D, rope_N1P, mask, text_mask, keys)
        shift, scale = (self.scale_shift_table + time_BD[:, None]).chunk(2, dim=1)
        prediction_BNC = self.proj_out(modulate(x_BND, shift, scale))
        prediction_BNC = self.sequence.gather(prediction_BNC, num_tokens)
        return unpack(prediction_BNC, grid, self.config.patch_size, channels_last=True).to(noisy_BCFHW.dtype)

    def _embed(self, noisy_BCFHW: Tensor, cond_BCFHW: Tensor | None) -> Tensor:
        x_BFHWD: Tensor = self.pos_embed(noisy_BCFHW)
        if not self.config.inpaint:
            return x_BFHWD.flatten(1, 3)
        if cond_BCFHW is None:
            # Everything is to be made, and the latent of a clip that shows nothing is taken as zero.
            ones = noisy_BCFHW.new_ones(len(noisy_BCFHW), self.config.vae_scale_factor_t, *noisy_BCFHW.shape[2:])
            cond_BCFHW = torch.cat([torch.zeros_like(noisy_BCFHW), ones], dim=1)
        masked, mask = cond_BCFHW.to(noisy_BCFHW.dtype).tensor_split([self.config.in_channels], dim=1)
        x_BFHWD = x_BFHWD.add(self.pos_embed_masked_hidden_states(masked)).add(self.pos_embed_mask(mask))
        return x_BFHWD.flatten(1, 3)

    def _check(self, noisy: Tensor, cond: Tensor | None) -> Grid:
        """The grid of tokens; ConfigError that names the rule when a tensor does not fit."""
        config = self.config
        batch, channels, frames, height, width = noisy.shape
        if channels != config.in_channels:
            raise ConfigError(
                f"{WHERE}: the latent has {channels} channels, the model takes {config.in_channels}; choose the "
                "autoencoder that the model was made for"
            )
        if cond is not None and cond.shape != (batch, config.cond_channels, frames, height, width):
            raise ConfigError(
                f"{WHERE}: cond_latents is {tuple(cond.shape)}; it should be the masked latent ({channels} "
                f"channels), then the mask ({config.vae_scale_factor_t}), for a latent of {frames}x{height}x{width}"
            )
        return self.config.token_grid((frames, height, width))


class Block(ModulationTable):
    """Self-attention, cross-attention to the text, MLP. The cross-attention has neither norm nor gate."""

    def __init__(self, config: OpenSoraPlanConfig, layer: int) -> None:
        super().__init__(6, config.hidden_size)
        self.eps = config.norm_eps
        make = partial(Attention, config.hidden_size, config.num_attention_heads, bias=config.attention_bias)
        self.attn1 = make(attend=SkiparseAttention(config.pattern(layer), config.sparse_n))
        # Over all tokens: dealing the queries into sub-sequences would not change what they see of the text.
        self.attn2 = make()
        self.ff = FeedForward(config.hidden_size, config.dropout)
        self.drop_self, self.drop_cross = (KeyedDropout(config.dropout, site) for site in (2, 3))

    def forward(
        self,
        x_BND: Tensor,
        text_BKD: Tensor,
        modulation_B6D: Tensor,
        rope_N1P: Tensor,
        mask: Tensor | None = None,
        text_mask_B11K: Tensor | None = None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        vectors = (self.scale_shift_table + modulation_B6D).chunk(6, dim=1)
        shift1, scale1, gate1, shift2, scale2, gate2 = vectors
        normal_BND = modulate(x_BND, shift1, scale1, self.eps)
        mixed_BND = self.attn1(normal_BND, normal_BND, rope_N1P, mask)
        x_BND = torch.addcmul(x_BND, gate1, self.drop_self(mixed_BND, dropout_keys))
        x_BND = x_BND + self.drop_cross(self.attn2(x_BND, text_BKD, text_mask_B11K), dropout_keys)
        return torch.addcmul(x_BND, gate2, self.ff(modulate(x_BND, shift2, scale2, self.eps), dropout_keys))
