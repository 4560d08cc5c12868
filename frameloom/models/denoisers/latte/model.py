"""LatteT2V: layers of spatial and temporal attention. Images may follow a clip and share its timestep.

Shape letters: B batch, C channels, F frames, H height, W width (rows and columns of patches behind `embed`), D width,
S captions of a sample (the clip's, then one of each image that follows the clip along F), K text tokens, N tokens, M
keys, G heads, P rotary pairs.

A spatial block looks inside each frame and at the caption, a temporal block along the frames of each place. Blocks take
and return tensors only. LayerNorms have no parameters. The caption's mask is added to the scores, with -10000 for what
must not be seen: a row without any key then still gets finite numbers, those of the published code.

Sinusoids of a picture are made for a square of patches; any other grid is stretched onto it, so that its
far edge stays where the model knows it. Rotary positions count patches and frames, and are divided by the
interpolation scale and cut to whole numbers: neighbours then share an angle, as in the published code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.distributed.sequence_parallel import ALONE, Exchange, SequenceGroup
from frameloom.models.denoisers.base import Conditions, Denoiser, find_index
from frameloom.models.denoisers.latte.config import BLOCK_LISTS, WHERE, LatteConfig
from frameloom.models.layers.attention.attention import Attention, RotaryAttention, attend_tokens
from frameloom.models.layers.dropout import KeyedDropout, dropout_keys
from frameloom.models.layers.mlp import FeedForward, TwoLinear
from frameloom.models.layers.modulation import ModulationTable, SharedModulation, modulate
from frameloom.models.layers.patches import Grid, PatchEmbed, unpack
from frameloom.models.layers.positions import PositionTables, embed_position, grid_positions, rotary_table
from frameloom.models.spec import Latent

HIDDEN = -10_000.0
# Rows of a table that the published captions never use; files hold it.
UNUSED_ROWS = 120
# What the grid of a GPU has room for.
_MOST_HEADS = 65_535


class LatteT2V(ModulationTable, Denoiser):
    """In a `sequence` group each rank has some places of all pictures, and all of the text."""

    family, block_lists = "latte", BLOCK_LISTS

    def __init__(self, config: LatteConfig) -> None:
        width, factor = config.hidden_size, config.compress_kv_factor
        super().__init__(2, width)
        factors = [factor if config.compresses(layer) else 1 for layer in range(config.num_layers)]
        self.config = config
        self.sequence: SequenceGroup = ALONE
        self.pos_embed = PatchEmbed(config.in_channels, width, config.patch_size)
        self.transformer_blocks = nn.ModuleList(SpatialBlock(config, factor=each) for each in factors)
        self.temporal_transformer_blocks = nn.ModuleList(TemporalBlock(config, factor=each) for each in factors)
        self.proj_out = nn.Linear(width, config.patch_size**2 * config.out_channels)
        self.adaln_single = SharedModulation(width)
        self.caption_projection = TwoLinear(config.context_in_dim, width, nn.GELU(approximate="tanh"))
        self.caption_projection.register_buffer("y_embedding", torch.empty(UNUSED_ROWS, config.context_in_dim))
        self.pictures = PositionTables(lambda *grid: picture_table(config, *grid))
        self.frames = PositionTables(lambda count: frame_table(config, count))
        self.picture_rotary = PositionTables(lambda *grid: turn_table(config, grid, config.scale_2d))
        self.frame_rotary = PositionTables(lambda count: turn_table(config, (count,), config.scale_1d))

    def accepted(self) -> tuple[str, ...]:
        return "image_text", "image_text_mask", "dropout_seeds"

    def forward(self, noisy_BCFHW: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
        """The predicted noise, without the variance that some models predict too. Pooled text is not used.

        With `image_text`, the last frames of the latent are single images.
        """
        prediction_BCFHW = self.predict(noisy_BCFHW, timestep_B, conditions)
        return prediction_BCFHW[:, : noisy_BCFHW.shape[1]].to(noisy_BCFHW.dtype)

    def predict(self, noisy_BCFHW: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
        """All `out_channels`, noise first. A clip of one frame is an image too: temporal blocks are for clips."""
        self.check_conditions(timestep_B, conditions)
        text_BSKD, text_mask_BSK = _join_captions(conditions)
        seeds_B = conditions.get("dropout_seeds")
        if seeds_B is not None and self.sequence.degree > 1:
            raise ConfigError(
                f"{WHERE}: dropout is {self.config.dropout} and parallel.sequence {self.sequence.degree}, but masks of "
                "this family are drawn for whole pictures; set one of them back (dropout: 0, or parallel.sequence: 1)"
            )
        config, dtype = self.config, self.proj_out.weight.dtype
        num_images = text_BSKD.shape[1] - 1
        num_video = noisy_BCFHW.shape[2] - num_images
        if num_video < 1:
            raise ConfigError(
                f"{WHERE}: {noisy_BCFHW.shape[2]} latent frames, of which {num_images} are images by their captions; "
                "at least one frame must belong to the clip"
            )
        x_BFHWD = self._embed(noisy_BCFHW.to(dtype))
        modulation_B6D, embedded_BD = self.adaln_single(find_index(timestep_B))
        text_BSKD = self.caption_projection(text_BSKD.to(dtype))
        text_bias_BSK = (1 - text_mask_BSK.float()) * HIDDEN
        picture_ropes, frame_rope, position_FD = self._find_tables(x_BFHWD, num_video)
        if num_images and not config.joint_temporal_positions:
            position_FD = torch.zeros_like(position_FD)
        grid = x_BFHWD.shape[1], x_BFHWD.shape[2], x_BFHWD.shape[3]
        x_BFHWD = self._split(x_BFHWD)
        for layer, (spatial, temporal) in enumerate(
            zip(self.transformer_blocks, self.temporal_transformer_blocks, strict=True)
        ):
            picture_rope = picture_ropes[config.compresses(layer)]
            keys = dropout_keys(seeds_B, 2 * layer, grid[0])
            x_BFHWD = spatial(x_BFHWD, modulation_B6D, text_BSKD, text_bias_BSK, picture_rope, keys)
            if num_video == 1:
                continue
            video_BFHWD, *images = torch.split(x_BFHWD, [num_video, num_images], dim=1) if num_images else (x_BFHWD,)
            if layer == 0:
                video_BFHWD = video_BFHWD + position_FD[:, None, None].to(dtype)
            keys = dropout_keys(seeds_B, 2 * layer + 1, num_video)
            video_BFHWD = temporal(video_BFHWD, modulation_B6D, frame_rope, keys)
            x_BFHWD = torch.cat([video_BFHWD, *images], dim=1) if images else video_BFHWD
        return self._unpatch(x_BFHWD, embedded_BD, grid)

    def blocks(self) -> list[nn.Module]:
        pairs = zip(self.transformer_blocks, self.temporal_transformer_blocks, strict=True)
        return [block for pair in pairs for block in pair]

    def finish_weights(self, generator: torch.Generator) -> None:
        for module in self.modules():
            if isinstance(module, SelfAttention) and module.factor > 1:
                for name, value in module.joining_start().items():
                    module.get_parameter(name).fill_(value)
        table = self.caption_projection.get_buffer("y_embedding")
        table.normal_(std=table.shape[1] ** -0.5, generator=generator)

    @staticmethod
    def exchanges(config: LatteConfig, latent_FHW: Latent, num_text: int, degree: int) -> list[Exchange]:
        """Only pictures are divided; where neighbours are joined, by whole rows, a multiple of what is joined."""
        frames, rows, columns = config.token_grid(latent_FHW)
        factor = config.compress_kv_factor
        if factor > 1:
            joined_rows = -(-rows // (factor * degree)) * degree
            rows, keys = joined_rows * factor, joined_rows * (columns // factor)
        whole = Exchange(rows * columns, config.hidden_size, sequences=frames)
        return [
            replace(whole, keys=keys) if factor > 1 and config.compresses(layer) else whole
            for layer in range(config.num_layers)
        ]

    def _embed(self, noisy_BCFHW: Tensor) -> Tensor:
        frames, height, width = noisy_BCFHW.shape[2:]
        _, rows, columns = self.config.token_grid((frames, height, width))
        table_HWD = self.pictures.get(rows, columns, device=noisy_BCFHW.device)
        x_BFHWD: Tensor = self.pos_embed(noisy_BCFHW)
        return x_BFHWD + table_HWD.to(noisy_BCFHW.dtype)

    def _split(self, x_BFHWD: Tensor) -> Tensor:
        """The own places: a run of them as one row; where neighbours are joined, whole rows, `factor` or a multiple."""
        factor = self.config.compress_kv_factor
        if self.sequence.degree == 1:
            return x_BFHWD
        if factor == 1:
            return self.sequence.split(x_BFHWD.flatten(2, 3), dim=2)[:, :, None]
        filled = F.pad(x_BFHWD, (0, 0, 0, 0, 0, -x_BFHWD.shape[2] % factor))
        return self.sequence.split(torch.unflatten(filled, 2, (-1, factor)), dim=2).flatten(2, 3)

    def _find_tables(
        self, x_BFHWD: Tensor, num_video: int
    ) -> tuple[tuple[Tensor | None, Tensor | None], Tensor | None, Tensor]:
        """Rotary tables of pictures, as they are and joined for compression, and of frames (without use_rope, none),
        and the sinusoids of the frames."""
        _, _, rows, columns, _ = x_BFHWD.shape
        device, factor = x_BFHWD.device, self.config.compress_kv_factor
        position_FD = self.frames.get(num_video, device=device)
        if not self.config.use_rope:
            numbers = rows * columns, (rows // factor) * (columns // factor)
            plain, joined = (self.sequence.count_table(number, device) for number in numbers)
            return (plain, joined), None, position_FD
        picture = self.picture_rotary.get(rows, columns, device=device)
        return (picture, picture), self.frame_rotary.get(num_video, device=device), position_FD

    def _unpatch(self, x_BFHWD: Tensor, embedded_BD: Tensor, grid: Grid) -> Tensor:
        shift, scale = (self.scale_shift_table + embedded_BD[:, None])[:, None, None, None].unbind(-2)
        places_BFNC = self.proj_out(modulate(x_BFHWD, shift, scale)).flatten(2, 3)
        tokens_BNC = self.sequence.gather(places_BFNC, grid[1] * grid[2], dim=2).flatten(1, 2)
        return unpack(tokens_BNC, grid, self.config.patch_size, channels_last=True)


def _join_captions(conditions: Conditions) -> tuple[Tensor, Tensor]:
    """[B, S, K, D] and its mask: the caption of the clip, then those of its images."""
    tokens, mask, images = conditions["text"], conditions["text_mask"], conditions.get("image_text")
    if images is None:
        return tokens[:, None], mask[:, None]
    num_images, rest = divmod(len(images), len(tokens))
    if rest or images.shape[1:] != tokens.shape[1:]:
        raise ConfigError(
            f"{WHERE}: image captions of shape {tuple(images.shape)} beside clip captions of shape "
            f"{tuple(tokens.shape)}; give the same number of images for each clip, encoded to the same length"
        )
    of_images, image_mask = (
        torch.unflatten(part, 0, (len(tokens), num_images)) for part in (images, conditions["image_text_mask"])
    )
    return torch.cat([tokens[:, None], of_images], dim=1), torch.cat([mask[:, None], image_mask], dim=1)


class Block(ModulationTable):
    """What both kinds share: a table that is added to the modulation vectors, self-attention and an MLP."""

    def __init__(self, config: LatteConfig, *, num_axes: int, factor: int) -> None:
        super().__init__(6, config.hidden_size)
        self.attn1 = SelfAttention(config, num_axes=num_axes, factor=factor)
        self.ff = FeedForward(config.hidden_size, config.dropout)
        self.drop_self = KeyedDropout(config.dropout, site=2)
        self.eps = config.norm_eps

    def split_modulation(self, modulation_B6D: Tensor) -> tuple[Tensor, ...]:
        """Shift, scale and gate of the attention, then of the MLP, each [B, 1, 1, 1, D]."""
        return (self.scale_shift_table + modulation_B6D)[:, None, None, None].unbind(-2)


class SpatialBlock(Block):
    def __init__(self, config: LatteConfig, *, factor: int) -> None:
        super().__init__(config, num_axes=2, factor=factor)
        self.attn2 = Attention(
            config.hidden_size, config.num_attention_heads, bias=config.attention_bias, attend=attend_captions
        )
        self.drop_cross = KeyedDropout(config.dropout, site=3)

    def forward(
        self,
        x_BFHWD: Tensor,
        modulation_B6D: Tensor,
        text_BSKD: Tensor,
        text_bias_BSK: Tensor,
        rope_N1P: Tensor | None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.split_modulation(modulation_B6D)
        normal_BHWD = modulate(x_BFHWD, shift1, scale1, self.eps).flatten(0, 1)
        mixed = self.attn1(normal_BHWD.flatten(1, 2), self.attn1.join_picture(normal_BHWD), rope_N1P)
        x_BFHWD = torch.addcmul(x_BFHWD, gate1, self.drop_self(mixed.view_as(x_BFHWD), dropout_keys))
        # Without norm and gate, as published.
        crossed_BFHWD = self.attn2(x_BFHWD.flatten(2, 3), text_BSKD, text_bias_BSK).view_as(x_BFHWD)
        x_BFHWD = x_BFHWD + self.drop_cross(crossed_BFHWD, dropout_keys)
        return torch.addcmul(x_BFHWD, gate2, self.ff(modulate(x_BFHWD, shift2, scale2, self.eps), dropout_keys))


class TemporalBlock(Block):
    def __init__(self, config: LatteConfig, *, factor: int) -> None:
        super().__init__(config, num_axes=1, factor=factor)

    def forward(
        self,
        x_BFHWD: Tensor,
        modulation_B6D: Tensor,
        rope_N1P: Tensor | None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        """Frames of the clip alone."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.split_modulation(modulation_B6D)
        normal_BFND = modulate(x_BFHWD, shift1, scale1, self.eps).flatten(2, 3)
        mixed = self.attn1(normal_BFND, self.attn1.join_frames(normal_BFND), rope_N1P)
        x_BFHWD = torch.addcmul(x_BFHWD, gate1, self.drop_self(mixed.view_as(x_BFHWD), dropout_keys))
        return torch.addcmul(x_BFHWD, gate2, self.ff(modulate(x_BFHWD, shift2, scale2, self.eps), dropout_keys))


class SelfAttention(Attention):
    """Attention of the N tokens of each picture [B, N, D], or of the frames of each place [B, F, N, D].

    With `factor` > 1, keys and values come from neighbours that a depthwise convolution has joined.
    """

    def __init__(self, config: LatteConfig, *, num_axes: int, factor: int) -> None:
        # In a sequence group each rank has some places of all frames: only pictures are divided.
        attend = RotaryAttention(parts=num_axes, whole=num_axes == 1)
        super().__init__(config.hidden_size, config.num_attention_heads, bias=config.attention_bias, attend=attend)
        self.num_axes = num_axes
        self.factor = factor
        if factor > 1:
            width = config.hidden_size
            convolution = {1: nn.Conv1d, 2: nn.Conv2d}[num_axes]
            self.sr = convolution(width, width, factor, stride=factor, groups=width)
            self.norm = nn.LayerNorm(width)

    def forward(self, x_BNW: Tensor, context_BMW: Tensor, *inputs: Tensor | None) -> Tensor:
        attend = self._attend_places if self.num_axes == 1 else self.attend
        mixed: Tensor = self.to_out(attend(*self.project(x_BNW, context_BMW), *inputs))
        return mixed

    def _attend_places(self, q_BFNGC: Tensor, k_BMNGC: Tensor, v_BMNGC: Tensor, rope_F1P: Tensor | None) -> Tensor:
        """The heads of all places stand side by side, so that no token is moved; several times where they are many."""
        heads = q_BFNGC, k_BMNGC, v_BMNGC
        most, num_places = max(1, _MOST_HEADS // self.num_heads), q_BFNGC.shape[2]
        if num_places <= most:
            attended = self.attend(*(part.flatten(2, 3) for part in heads), rope_F1P)
            return torch.unflatten(attended, -1, (num_places, -1))
        groups = zip(*(torch.split(part, most, dim=2) for part in heads), strict=True)
        return torch.cat([self._attend_places(q, k, v, rope_F1P) for q, k, v in groups], dim=2)

    def join_picture(self, x_BHWD: Tensor) -> Tensor:
        """Keys of a picture [B, M, D]; an odd last row or column is left out."""
        if self.factor == 1:
            return x_BHWD.flatten(1, 2)
        joined_BDHW = self.sr(x_BHWD.movedim(-1, 1))
        normal: Tensor = self.norm(joined_BDHW.flatten(2).mT)
        return normal

    def join_frames(self, x_BFND: Tensor) -> Tensor:
        """Keys along the frames [B, M, N, D]; before an odd number of frames stand copies of the first."""
        if self.factor == 1:
            return x_BFND
        if x_BFND.shape[1] % 2:
            x_BFND = torch.cat([x_BFND[:, :1].expand(-1, self.factor - 1, -1, -1), x_BFND], dim=1)
        joined_BNDM = torch.unflatten(self.sr(x_BFND.movedim(1, 3).flatten(0, 1)), 0, (len(x_BFND), -1))
        normal: Tensor = self.norm(joined_BNDM.movedim(3, 1))
        return normal

    def joining_start(self) -> dict[str, float]:
        """What the parameters of the joining start from: the plain mean of the neighbours."""
        return {"sr.weight": 1 / self.factor**self.num_axes, "sr.bias": 0.0, "norm.weight": 1.0, "norm.bias": 0.0}


def attend_captions(q_BFNGC: Tensor, k_BSKGC: Tensor, v_BSKGC: Tensor, bias_BSK: Tensor) -> Tensor:
    """The frames of the clip look at its caption, and each image at its own; [B, F, N, D]."""
    bias_BS11K = bias_BSK[:, :, None, None].to(q_BFNGC.dtype)
    batch, num_frames, num_tokens = q_BFNGC.shape[:3]
    num_images = k_BSKGC.shape[1] - 1
    of_clip, *of_images = (
        torch.split(q_BFNGC, [num_frames - num_images, num_images], dim=1) if num_images else (q_BFNGC,)
    )
    mixed = attend_tokens(of_clip.flatten(1, 2), k_BSKGC[:, 0], v_BSKGC[:, 0], bias_BS11K[:, 0])
    mixed_BFND = torch.unflatten(mixed, 1, (-1, num_tokens))
    if not num_images:
        return mixed_BFND
    k, v, bias_B11K = (part[:, 1:].flatten(0, 1) for part in (k_BSKGC, v_BSKGC, bias_BS11K))
    mixed = attend_tokens(of_images[0].flatten(0, 1), k, v, bias_B11K)
    return torch.cat([mixed_BFND, torch.unflatten(mixed, 0, (batch, num_images))], dim=1)


def picture_table(config: LatteConfig, rows: int, columns: int) -> Tensor:
    """[H, W, D]: the first half of the channels encodes the column, the second the row."""
    half = config.hidden_size // 2
    base_side = config.sample_size[0] // config.patch_size
    counts = (torch.arange(count, dtype=torch.float32) / (count / base_side) for count in (rows, columns))
    row_HD, column_WD = (embed_position(count / config.scale_2d, half) for count in counts)
    return torch.cat([column_WD[None].expand(rows, -1, -1), row_HD[:, None].expand(-1, columns, -1)], dim=-1)


def frame_table(config: LatteConfig, frames: int) -> Tensor:
    """[F, D]"""
    return embed_position(torch.arange(frames, dtype=torch.float32) / config.scale_1d, config.hidden_size)


def turn_table(config: LatteConfig, grid: Sequence[int], scale: float) -> Tensor:
    """The rotary table [N, 1, P] of a grid of one or two axes, which share the channels of a head equally."""
    axes = [(torch.arange(count) / scale).long() for count in grid]
    return rotary_table(grid_positions(axes), (config.attention_head_dim // len(axes),) * len(axes))
