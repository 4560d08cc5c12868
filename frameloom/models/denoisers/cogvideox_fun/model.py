"""The CogVideoX-Fun transformer: text and video tokens, one stream of blocks.

Shape letters: B batch, C channels, F frames, H height, W width, N video tokens, K text tokens, M = K + N, D width,
E time width, P rotary pairs.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.distributed.sequence_parallel import ALONE, Exchange, SequenceGroup
from frameloom.models.denoisers.building import build_fresh, list_blocks
from frameloom.models.denoisers.cogvideox_fun.blocks import Block, modulate_norm
from frameloom.models.denoisers.cogvideox_fun.config import FAMILY_NAME, CogVideoXFunConfig
from frameloom.models.denoisers.cogvideox_fun.positions import (
    axis_sinusoids,
    find_grid,
    join_sinusoids,
    stretch_table,
    turn_table,
)
from frameloom.models.denoisers.cogvideox_fun.sharding import BLOCK_LISTS
from frameloom.models.denoisers.conditions import NOTHING, Conditions, find_index, refuse_foreign
from frameloom.models.layers.dropout import DropoutSeeds, KeyedDropout
from frameloom.models.layers.mlp import TwoLinear
from frameloom.models.layers.patches import Grid, embed_frames, pack, unpack
from frameloom.models.layers.position_tables import PositionTables
from frameloom.models.layers.sinusoids import embed_index
from frameloom.models.text.base import TextStates

_ACTIVATIONS: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "gelu": nn.GELU, "mish": nn.Mish, "relu": nn.ReLU}


class PatchEmbed(nn.Module):
    """Latent cells and text states to tokens."""

    pos_embedding: Tensor

    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__()
        self.patch = (config.patch_size, config.patch_size_t)
        self.proj: nn.Module
        if config.patch_size_t == 1:
            side = config.patch_size
            self.proj = nn.Conv2d(config.input_channels, config.width, side, stride=side, bias=config.patch_bias)
        else:
            self.proj = nn.Linear(config.input_channels * config.patch_size_t * config.patch_size**2, config.width)
        self.text_proj = nn.Linear(config.context_in_dim, config.width)
        if config.use_learned_positional_embeddings:
            length = config.max_text_seq_length + math.prod(config.base_grid)
            self.register_buffer("pos_embedding", torch.empty(1, length, config.width))

    def forward(self, latent_BCFHW: Tensor) -> Tensor:
        if isinstance(self.proj, nn.Conv2d):
            return embed_frames(self.proj, latent_BCFHW).flatten(1, 3)
        tokens_BND: Tensor = self.proj(pack(latent_BCFHW, *self.patch))
        return tokens_BND


class FinalNorm(nn.Module):
    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.time_embed_dim, 2 * config.width)
        self.norm = nn.LayerNorm(config.width, config.norm_eps, config.norm_elementwise_affine)

    def forward(self, x_BND: Tensor, time_BE: Tensor) -> Tensor:
        shift, scale = self.linear(F.silu(time_BE))[:, None].chunk(2, dim=-1)
        return modulate_norm(self.norm, x_BND, shift, 1 + scale)


class CogVideoXFunTransformer(nn.Module):
    """`rotary` and `sinusoids` keep the position tables of the latest shapes. In a `sequence` group each rank has a
    part of the joint sequence, text first."""

    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__()
        self.config = config
        self.sequence: SequenceGroup = ALONE
        self.patch_embed = PatchEmbed(config)
        self.embedding_dropout = KeyedDropout(config.dropout)
        activation = _ACTIVATIONS[config.timestep_activation_fn]()
        self.time_embedding = TwoLinear(config.width, config.time_embed_dim, activation)
        self.transformer_blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm_final = nn.LayerNorm(config.width, config.norm_eps, config.norm_elementwise_affine)
        self.norm_out = FinalNorm(config)
        cells_per_patch = config.patch_size_t * config.patch_size**2
        self.proj_out = nn.Linear(config.width, config.in_channels * cells_per_patch)
        self.rotary = PositionTables(lambda grid, num_text: turn_table(config, grid, num_text))
        self.sinusoids = PositionTables(lambda axis, count: axis_sinusoids(config, axis, count))

    def forward(
        self,
        noisy_BCFHW: Tensor,
        index_B: Tensor,
        text_BKD: Tensor,
        beside_BCFHW: Tensor | None = None,
        dropout: DropoutSeeds | None = None,
    ) -> Tensor:
        """Prediction at timestep indices 0 ... 999. Without what should stand beside, a model sees zeros there; without
        seeds nothing is dropped."""
        size = noisy_BCFHW.shape[2], noisy_BCFHW.shape[3], noisy_BCFHW.shape[4]
        grid, dtype = find_grid(self.config, size), self.proj_out.weight.dtype
        latent_BCFHW = self._join_channels(noisy_BCFHW.to(dtype), beside_BCFHW)
        # A single image fills the patches of V1.5 with an empty second frame, whose prediction is thrown away.
        latent_BCFHW = F.pad(latent_BCFHW, (0, 0, 0, 0, 0, grid[0] * self.config.patch_size_t - size[0]))
        video_BND, text_BKD = self.embed(latent_BCFHW, text_BKD.to(dtype), grid)
        time_BE = self.time_embedding(self._embed_index(index_B).to(dtype))
        num_text, num_video = text_BKD.shape[1], video_BND.shape[1]
        if dropout is not None:
            video_BND, text_BKD = self._drop_embedded(video_BND, text_BKD, dropout)
        table = self.sequence.count_table(num_text + num_video, noisy_BCFHW.device)
        if self.config.use_rotary_positional_embeddings:
            table = self.rotary.get(grid, num_text, device=noisy_BCFHW.device)
        tables = () if table is None else (table,)
        text_BKD = self.sequence.split_prefix(text_BKD, num_video)
        video_BND = self.sequence.split_rest(video_BND, num_text)
        first = self.sequence.find_first(num_text + num_video)
        for part, block in enumerate(self.transformer_blocks, start=1):
            keys = {} if dropout is None else {"dropout_keys": dropout.keys(part, num_text + num_video, first)}
            video_BND, text_BKD = block(video_BND, text_BKD, time_BE, *tables, **keys)
        tokens_BNC = self.proj_out(self.norm_out(self.norm_final(video_BND), time_BE))
        tokens_BNC = self.sequence.gather_rest(tokens_BNC, num_text, num_video)
        prediction_BCFHW = unpack(tokens_BNC, grid, *self.patch_embed.patch)
        return prediction_BCFHW[:, :, : size[0]].to(noisy_BCFHW.dtype)

    def _embed_index(self, index_B: Tensor) -> Tensor:
        sinusoids_BD = embed_index(index_B, self.config.width, shift=self.config.freq_shift)
        if self.config.flip_sin_to_cos:
            return sinusoids_BD
        cosines, sines = sinusoids_BD.chunk(2, dim=-1)
        return torch.cat([sines, cosines], dim=-1)

    def embed(self, latent_BCFHW: Tensor, text_BKD: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Tokens of the video and of the text as they enter the first block."""
        video_BND = self.patch_embed(latent_BCFHW)
        text_BKD = self.patch_embed.text_proj(text_BKD)
        if not self.config.adds_positions:
            return video_BND, text_BKD
        num_text = self.config.max_text_seq_length
        if text_BKD.shape[1] != num_text:
            raise ConfigError(
                f"{FAMILY_NAME} denoiser: {text_BKD.shape[1]} text tokens, but a model that adds positions takes "
                f"exactly max_text_seq_length {num_text}; set the text encoder's max_length to {num_text}"
            )
        if not self.config.use_learned_positional_embeddings:
            axes = [self.sinusoids.get(axis, count, device=video_BND.device) for axis, count in enumerate(grid)]
            return video_BND + join_sinusoids([axis.to(video_BND.dtype) for axis in axes]), text_BKD
        table_MD = self.patch_embed.pos_embedding[0].to(video_BND.dtype)
        stretched_ND = stretch_table(table_MD[num_text:], self.config.base_grid, grid)
        return video_BND + stretched_ND, text_BKD + table_MD[:num_text]

    def _drop_embedded(self, video_BND: Tensor, text_BKD: Tensor, dropout: DropoutSeeds) -> tuple[Tensor, Tensor]:
        num_text, num_video = text_BKD.shape[1], video_BND.shape[1]
        tokens_BMD = torch.cat([text_BKD, video_BND], dim=1)
        tokens_BMD = self.embedding_dropout(tokens_BMD, dropout.keys(0, num_text + num_video))
        text_BKD, video_BND = torch.split(tokens_BMD, [num_text, num_video], dim=1)
        return video_BND, text_BKD

    def _join_channels(self, noisy_BCFHW: Tensor, beside_BCFHW: Tensor | None) -> Tensor:
        expected = (len(noisy_BCFHW), self.config.beside_channels, *noisy_BCFHW.shape[2:])
        if beside_BCFHW is None:
            if not self.config.beside_channels:
                return noisy_BCFHW
            beside_BCFHW = noisy_BCFHW.new_zeros(expected)
        elif beside_BCFHW.shape != expected:
            raise ConfigError(
                f"{FAMILY_NAME} denoiser: beside the latent stands a tensor of {tuple(beside_BCFHW.shape)}; a model "
                f"with condition '{self.config.condition}' takes {tuple(expected)} here"
            )
        return torch.cat([noisy_BCFHW, beside_BCFHW.to(noisy_BCFHW.dtype)], dim=1)


def build(config: CogVideoXFunConfig, generator: torch.Generator | None = None) -> CogVideoXFunTransformer:
    return build_fresh(lambda: CogVideoXFunTransformer(config), generator, family=FAMILY_NAME, finish=_finish)


def _finish(model: CogVideoXFunTransformer, generator: torch.Generator) -> None:
    config = model.config
    if config.use_learned_positional_embeddings:
        start = join_sinusoids([axis_sinusoids(config, axis, count) for axis, count in enumerate(config.base_grid)])
        model.patch_embed.pos_embedding.copy_(F.pad(start, (0, 0, config.max_text_seq_length, 0))[None])


def denoise(
    model: nn.Module, noisy_BCFHW: Tensor, timestep_B: Tensor, text: TextStates, given: Conditions = NOTHING
) -> Tensor:
    """`text.mask_BK` is not used: as in the original, padding is attended to. There is no pooled text."""
    config = cast(CogVideoXFunConfig, model.config)
    refuse_foreign(given, FAMILY_NAME, known=("dropout", *(("beside_BCFHW",) if config.beside_channels else ())))
    index_B = find_index(timestep_B)
    return cast(Tensor, model(noisy_BCFHW, index_B, text.tokens_BKD, given.beside_BCFHW, given.dropout))


def num_tokens(config: CogVideoXFunConfig, latent_FHW: tuple[int, int, int]) -> int:
    return math.prod(find_grid(config, latent_FHW))


def exchanges(
    config: CogVideoXFunConfig, latent_FHW: tuple[int, int, int], num_text: int, degree: int
) -> list[Exchange]:
    return [Exchange(num_text + num_tokens(config, latent_FHW), config.width)] * config.num_layers


def blocks(model: nn.Module) -> list[nn.Module]:
    return list_blocks(model, BLOCK_LISTS)
