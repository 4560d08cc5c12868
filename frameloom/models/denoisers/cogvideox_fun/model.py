"""The CogVideoX-Fun transformer: text and video tokens in one stream of blocks, named as in the checkpoints.

Shape letters: B batch, C channels, F frames, H height, W width, N video tokens, K text tokens, M = K + N, D width, E
time width, P rotary pairs.

Text and video tokens share all weights except the modulation, which each gets for itself. Blocks take and return
tensors only. Attention is full and unmasked.

Rotary and added positions refer to a base grid of tokens, whatever the size of the clip:
- Rotary, one frame per token (5b): a clip's rows and columns are spread over the largest part of the base grid that has
  its aspect ratio, so positions are fractions for other sizes. Two frames per token (V1.5): plain whole numbers, and
  the base grid is the limit.
- Added (2b): the table of the base grid is stretched in height and width by linear interpolation between centres of
  cells; frames are counted from the first and end with the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.distributed.sequence_parallel import ALONE, Exchange, SequenceGroup
from frameloom.models.denoisers.base import Conditions, Denoiser, Draws, Encode, find_index
from frameloom.models.denoisers.cogvideox_fun.conditioning import draw_known
from frameloom.models.denoisers.cogvideox_fun.config import BLOCK_LISTS, FAMILY_NAME, CogVideoXFunConfig
from frameloom.models.layers.attention.attention import Attention, RotaryAttention
from frameloom.models.layers.dropout import KeyedDropout, dropout_keys
from frameloom.models.layers.mlp import FeedForward, TwoLinear
from frameloom.models.layers.modulation import norm_samples
from frameloom.models.layers.patches import Grid, embed_frames, pack, unpack
from frameloom.models.layers.positions import PositionTables, embed_index, embed_position, grid_positions, rotary_table
from frameloom.models.spec import Latent

QK_NORM_EPS = 1e-6
_ACTIVATIONS: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "gelu": nn.GELU, "mish": nn.Mish, "relu": nn.ReLU}


class CogVideoXFunTransformer(Denoiser):
    """`rotary` and `sinusoids` keep the position tables of the latest shapes. In a `sequence` group each rank has a
    part of the joint sequence, text first."""

    family, block_lists = FAMILY_NAME, BLOCK_LISTS
    config: CogVideoXFunConfig

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

    def accepted(self) -> tuple[str, ...]:
        return ("dropout_seeds", "cond_latents") if self.config.cond_channels else ("dropout_seeds",)

    def finish_weights(self, generator: torch.Generator) -> None:
        config = self.config
        if config.use_learned_positional_embeddings:
            start = join_sinusoids([axis_sinusoids(config, axis, count) for axis, count in enumerate(config.base_grid)])
            self.patch_embed.pos_embedding.copy_(F.pad(start, (0, 0, config.max_text_seq_length, 0))[None])

    @staticmethod
    def exchanges(config: CogVideoXFunConfig, latent_FHW: Latent, num_text: int, degree: int) -> list[Exchange]:
        return [Exchange(num_text + config.num_tokens(latent_FHW), config.width)] * config.num_layers

    def pack_known(self, clip_BCFHW: Tensor, known_B1FHW: Tensor, encode: Encode, draws: Draws) -> Tensor:
        return draw_known(self.config, clip_BCFHW, known_B1FHW, encode, draws)

    def forward(self, noisy_BCFHW: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
        """Text masks are not used: as in the original, padding is attended to. There is no pooled text.

        Without `cond_latents`, a model that takes them sees zeros there.
        """
        self.check_conditions(timestep_B, conditions)
        text_BKD, seeds_B = conditions["text"], conditions.get("dropout_seeds")
        size = noisy_BCFHW.shape[2], noisy_BCFHW.shape[3], noisy_BCFHW.shape[4]
        grid, dtype = self.config.token_grid(size), self.proj_out.weight.dtype
        latent_BCFHW = self._join_channels(noisy_BCFHW.to(dtype), conditions.get("cond_latents"))
        # A single image fills the patches of V1.5 with an empty second frame, whose prediction is thrown away.
        latent_BCFHW = F.pad(latent_BCFHW, (0, 0, 0, 0, 0, grid[0] * self.config.patch_size_t - size[0]))
        video_BND, text_BKD = self.embed(latent_BCFHW, text_BKD.to(dtype), grid)
        sinusoids_BD = embed_index(find_index(timestep_B), self.config.width, shift=self.config.freq_shift)
        if not self.config.flip_sin_to_cos:
            cosines, sines = sinusoids_BD.chunk(2, dim=-1)
            sinusoids_BD = torch.cat([sines, cosines], dim=-1)
        time_BE = self.time_embedding(sinusoids_BD.to(dtype))
        num_text, num_video = text_BKD.shape[1], video_BND.shape[1]
        if seeds_B is not None:
            tokens_BMD = torch.cat([text_BKD, video_BND], dim=1)
            tokens_BMD = self.embedding_dropout(tokens_BMD, dropout_keys(seeds_B, 0, num_text + num_video))
            text_BKD, video_BND = torch.split(tokens_BMD, [num_text, num_video], dim=1)
        table = self.sequence.count_table(num_text + num_video, noisy_BCFHW.device)
        if self.config.use_rotary_positional_embeddings:
            table = self.rotary.get(grid, num_text, device=noisy_BCFHW.device)
        text_BKD = self.sequence.split_prefix(text_BKD, num_video)
        video_BND = self.sequence.split_rest(video_BND, num_text)
        first = self.sequence.find_first(num_text + num_video)
        for part, block in enumerate(self.transformer_blocks, start=1):
            keys = dropout_keys(seeds_B, part, num_text + num_video, first)
            video_BND, text_BKD = block(video_BND, text_BKD, time_BE, table, keys)
        tokens_BNC = self.proj_out(self.norm_out(self.norm_final(video_BND), time_BE))
        tokens_BNC = self.sequence.gather_rest(tokens_BNC, num_text, num_video)
        prediction_BCFHW = unpack(tokens_BNC, grid, *self.patch_embed.patch)
        return prediction_BCFHW[:, :, : size[0]].to(noisy_BCFHW.dtype)

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

    def _join_channels(self, noisy_BCFHW: Tensor, cond_BCFHW: Tensor | None) -> Tensor:
        expected = (len(noisy_BCFHW), self.config.cond_channels, *noisy_BCFHW.shape[2:])
        if cond_BCFHW is None:
            if not self.config.cond_channels:
                return noisy_BCFHW
            cond_BCFHW = noisy_BCFHW.new_zeros(expected)
        elif cond_BCFHW.shape != expected:
            raise ConfigError(
                f"{FAMILY_NAME} denoiser: cond_latents has shape {tuple(cond_BCFHW.shape)}; a model "
                f"with condition '{self.config.condition}' takes {tuple(expected)} here"
            )
        return torch.cat([noisy_BCFHW, cond_BCFHW.to(noisy_BCFHW.dtype)], dim=1)


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


class Block(nn.Module):
    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__()
        self.norm1 = ModulatedNorm(config)
        self.attn1 = SelfAttention(config)
        self.norm2 = ModulatedNorm(config)
        self.ff = FeedForward(config.width, config.dropout, drops_result=True)

    def forward(
        self,
        video_BND: Tensor,
        text_BKD: Tensor,
        time_BE: Tensor,
        rope_M1P: Tensor | None = None,
        dropout_keys: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        sizes = [text_BKD.shape[1], video_BND.shape[1]]
        video, text, gate, text_gate = self.norm1(video_BND, text_BKD, time_BE)
        # The gradient of a split is one joining, that of two slices two whole tensors and their sum.
        joint_BMD = torch.cat([text, video], dim=1)
        text, video = torch.split(self.attn1(joint_BMD, joint_BMD, rope_M1P), sizes, dim=1)
        video_BND = torch.addcmul(video_BND, gate, video)
        text_BKD = torch.addcmul(text_BKD, text_gate, text)

        video, text, gate, text_gate = self.norm2(video_BND, text_BKD, time_BE)
        text, video = torch.split(self.ff(torch.cat([text, video], dim=1), dropout_keys), sizes, dim=1)
        return torch.addcmul(video_BND, gate, video), torch.addcmul(text_BKD, text_gate, text)


class ModulatedNorm(nn.Module):
    """One LayerNorm for video and text; shift, scale and gate of each follow from the timestep."""

    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.time_embed_dim, 6 * config.width)
        self.norm = nn.LayerNorm(config.width, config.norm_eps, config.norm_elementwise_affine)

    def forward(self, video_BND: Tensor, text_BKD: Tensor, time_BE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Modulated video and text, then the gates that their updates are multiplied with."""
        parts_B1D = self.linear(F.silu(time_BE))[:, None].chunk(6, dim=-1)
        shift, scale, gate, text_shift, text_scale, text_gate = parts_B1D
        video = modulate_norm(self.norm, video_BND, shift, 1 + scale)
        text = modulate_norm(self.norm, text_BKD, text_shift, 1 + text_scale)
        return video, text, gate, text_gate


class SelfAttention(Attention):
    """Over all tokens, text first."""

    def __init__(self, config: CogVideoXFunConfig) -> None:
        bias, attend = config.attention_bias, RotaryAttention()
        super().__init__(config.width, config.num_attention_heads, bias=bias, attend=attend)
        self.norm_q = nn.LayerNorm(config.attention_head_dim, eps=QK_NORM_EPS)
        self.norm_k = nn.LayerNorm(config.attention_head_dim, eps=QK_NORM_EPS)

    def project(self, x_BNW: Tensor, context_BMW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x_BNW, context_BMW)
        # Under autocast norms give float32; attention wants one precision for all three.
        return self.norm_q(q).type_as(v), self.norm_k(k).type_as(v), v


class FinalNorm(nn.Module):
    def __init__(self, config: CogVideoXFunConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.time_embed_dim, 2 * config.width)
        self.norm = nn.LayerNorm(config.width, config.norm_eps, config.norm_elementwise_affine)

    def forward(self, x_BND: Tensor, time_BE: Tensor) -> Tensor:
        shift, scale = self.linear(F.silu(time_BE))[:, None].chunk(2, dim=-1)
        return modulate_norm(self.norm, x_BND, shift, 1 + scale)


def modulate_norm(norm: nn.LayerNorm, x_BND: Tensor, shift_B1D: Tensor, factor_B1D: Tensor) -> Tensor:
    """A norm, a factor and a shift; they go into the norm's own weight and bias, instead of all that it gives."""
    if not norm.elementwise_affine:
        return norm_samples(x_BND, factor_B1D, shift_B1D, norm.eps)
    weight_B1D, bias_B1D = factor_B1D * norm.weight, torch.addcmul(shift_B1D, factor_B1D, norm.bias)
    return norm_samples(x_BND, weight_B1D, bias_B1D, norm.eps)


def fit_region(base_HW: tuple[int, int], grid_HW: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(top, left), (bottom, right) of the largest centred part of the base grid with the aspect ratio of the clip."""
    base_h, base_w = base_HW
    rows, columns = grid_HW
    if rows / columns > base_h / base_w:
        height, width = base_h, round(base_h / rows * columns)
    else:
        height, width = round(base_w / columns * rows), base_w
    top, left = round((base_h - height) / 2), round((base_w - width) / 2)
    return (top, left), (top + height, left + width)


def turn_table(config: CogVideoXFunConfig, grid: Grid, num_text: int = 0) -> Tensor:
    """The rotary table [K + N, 1, P], text first; at position 0, text is not turned."""
    positions = [torch.arange(count, dtype=torch.float32) for count in grid]
    if config.patch_size_t == 1:
        region = zip(*fit_region(config.base_grid[1:], grid[1:]), strict=True)
        positions[1:] = [
            # Even steps from the start; the last one ends where the region does.
            (start + torch.arange(count, dtype=torch.float64) * ((stop - start) / count)).float()
            for (start, stop), count in zip(region, grid[1:], strict=True)
        ]
    return rotary_table(F.pad(grid_positions(positions), (0, 0, num_text, 0)), config.axes_dim)


def axis_sinusoids(config: CogVideoXFunConfig, axis: int, count: int) -> Tensor:
    """Features to be added to tokens: [F, D/4] of frames (axis 0), [H, 3D/8] of rows, [W, 3D/8] of columns.

    The published code stretches a whole table of the base grid; since each feature varies along one axis only,
    stretching the three short ones gives the same numbers from a thousandth of the memory.
    """
    if axis == 0:
        return embed_position(torch.arange(count) / config.temporal_interpolation_scale, config.width // 4)
    position = torch.arange(config.base_grid[axis]) / config.spatial_interpolation_scale
    base_ND = embed_position(position, config.width // 8 * 3)
    return F.interpolate(base_ND.T[None], size=count, mode="linear", align_corners=False)[0].T


def join_sinusoids(axes: Sequence[Tensor]) -> Tensor:
    """[N, D]: features of the frame, then of the column, then of the row."""
    frames_FD, rows_HD, columns_WD = axes
    size = len(frames_FD), len(rows_HD), len(columns_WD)
    parts = frames_FD[:, None, None], columns_WD[None, None, :], rows_HD[None, :, None]
    return torch.cat([part.expand(*size, -1).flatten(0, 2) for part in parts], dim=-1)


def stretch_table(table_ND: Tensor, base: Grid, grid: Grid) -> Tensor:
    """A stored table [N, D] of the base grid for another grid: stretched in height and width, cut in frames."""
    if base[1:] == grid[1:]:
        return table_ND[: grid[0] * grid[1] * grid[2]]
    cells_1DFHW = torch.unflatten(table_ND, 0, base).permute(3, 0, 1, 2)[None, :, : grid[0]]
    return F.interpolate(cells_1DFHW, size=grid, mode="trilinear", align_corners=False)[0].flatten(1).T
