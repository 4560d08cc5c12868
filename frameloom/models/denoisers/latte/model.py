"""LatteT2V: each layer looks inside the frames, then along them. Images may follow a clip and share its timestep.

Shape letters: B batch, C channels, F frames, H height, W width (rows and columns of patches behind `embed`), D width,
S captions of a sample (the clip's, then one of each image that follows the clip along F), K text tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.core.random import stream
from frameloom.models.denoisers.base import initialize
from frameloom.models.denoisers.latte.blocks import SelfAttention, SpatialBlock, TemporalBlock, modulate
from frameloom.models.denoisers.latte.config import WHERE, LatteConfig
from frameloom.models.denoisers.latte.positions import (
    Tables,
    frame_rotary,
    frame_table,
    picture_rotary,
    picture_table,
)

TIME_WIDTH = 256
NUM_TIMESTEPS = 1000
HIDDEN = -10_000.0
# Rows of a table that the published captions never use; files hold it.
UNUSED_ROWS = 120


def embed_time(timestep_B: Tensor, width: int) -> Tensor:
    """Sinusoids of the whole timestep index in float32, cosines first. Half precision would merge neighbours."""
    half = width // 2
    index = torch.arange(half, dtype=torch.float32, device=timestep_B.device)
    step_B1 = torch.round(timestep_B.float() * NUM_TIMESTEPS)[:, None]
    angles = step_B1 * torch.exp(-math.log(10_000) * index / half)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def token_grid(latent_FHW: tuple[int, int, int], patch_size: int) -> tuple[int, int, int]:
    """Patches along (frames, rows, columns) of a latent; ConfigError when patches do not tile it."""
    frames, height, width = latent_FHW
    if height % patch_size or width % patch_size:
        raise ConfigError(
            f"{WHERE}: a latent of {height}x{width} cells cannot be cut into patches of {patch_size}x{patch_size}; "
            f"choose a resolution whose latent sides are multiples of {patch_size}"
        )
    return frames, height // patch_size, width // patch_size


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(TIME_WIDTH, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, sinusoids: Tensor) -> Tensor:
        embedded: Tensor = self.linear_2(F.silu(self.linear_1(sinusoids)))
        return embedded


class AdaNormSingle(nn.Module):
    """One set of modulation vectors for all blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({"timestep_embedder": TimestepEmbedder(width)})
        self.linear = nn.Linear(width, 6 * width)

    def forward(self, timestep_B: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 6, D] for the blocks, [B, D] for the last layer."""
        sinusoids = embed_time(timestep_B, TIME_WIDTH).to(self.linear.weight.dtype)
        embedded_BD = self.emb["timestep_embedder"](sinusoids)
        return self.linear(F.silu(embedded_BD)).unflatten(-1, (6, -1)), embedded_BD


class CaptionProjection(nn.Module):
    y_embedding: Tensor

    def __init__(self, text_width: int, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(text_width, width)
        self.linear_2 = nn.Linear(width, width)
        self.register_buffer("y_embedding", torch.empty(UNUSED_ROWS, text_width))

    def forward(self, text: Tensor) -> Tensor:
        projected: Tensor = self.linear_2(F.gelu(self.linear_1(text), approximate="tanh"))
        return projected


class PatchEmbed(nn.Module):
    def __init__(self, config: LatteConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_channels, config.hidden_size, config.patch_size, stride=config.patch_size)

    def forward(self, latent_BCFHW: Tensor) -> Tensor:
        """[B, F, H, W, D]"""
        frames = latent_BCFHW.transpose(1, 2)
        patches: Tensor = self.proj(frames.flatten(0, 1))
        return torch.unflatten(patches.movedim(1, -1), 0, frames.shape[:2])


class LatteT2V(nn.Module):
    """One device, no parallelism."""

    def __init__(self, config: LatteConfig) -> None:
        super().__init__()
        width, factor = config.hidden_size, config.compress_kv_factor
        factors = [factor if config.compresses(layer) else 1 for layer in range(config.num_layers)]
        self.config = config
        self.tables = Tables()
        self.scale_shift_table = nn.Parameter(torch.empty(2, width))
        self.pos_embed = PatchEmbed(config)
        self.transformer_blocks = nn.ModuleList(SpatialBlock(config, factor=each) for each in factors)
        self.temporal_transformer_blocks = nn.ModuleList(TemporalBlock(config, factor=each) for each in factors)
        self.proj_out = nn.Linear(width, config.patch_size**2 * config.out_channels)
        self.adaln_single = AdaNormSingle(width)
        self.caption_projection = CaptionProjection(config.context_in_dim, width)

    def initialize_parameters(self, generator: torch.Generator) -> None:
        self.scale_shift_table.normal_(std=self.scale_shift_table.shape[1] ** -0.5, generator=generator)

    def forward(
        self,
        noisy_BCFHW: Tensor,
        timestep_B: Tensor,
        text_BSKD: Tensor,
        text_mask_BSK: Tensor,
        cells_BFHW: Tensor | None = None,
    ) -> Tensor:
        """Prediction with all `out_channels`, noise first; the last S - 1 frames are images.

        A clip of one frame is an image too: temporal blocks are for clips.
        """
        config, dtype = self.config, self.proj_out.weight.dtype
        num_images = text_BSKD.shape[1] - 1
        num_video = noisy_BCFHW.shape[2] - num_images
        if num_video < 1:
            raise ConfigError(
                f"{WHERE}: {noisy_BCFHW.shape[2]} latent frames, of which {num_images} are images by their captions; "
                "at least one frame must belong to the clip"
            )
        x_BFHWD = self._embed(noisy_BCFHW.to(dtype))
        modulation_B6D, embedded_BD = self.adaln_single(timestep_B)
        text_BSKD = self.caption_projection(text_BSKD.to(dtype))
        text_bias_BSK = (1 - text_mask_BSK.float()) * HIDDEN
        biases = self._mask_cells(cells_BFHW)
        picture_rope, frame_rope, position_FD = self._find_tables(x_BFHWD, num_video)
        if num_images and not config.joint_temporal_positions:
            position_FD = torch.zeros_like(position_FD)
        for layer, (spatial, temporal) in enumerate(
            zip(self.transformer_blocks, self.temporal_transformer_blocks, strict=True)
        ):
            bias_BFM = biases[config.compresses(layer)]
            x_BFHWD = spatial(x_BFHWD, modulation_B6D, text_BSKD, text_bias_BSK, bias_BFM, picture_rope)
            if num_video == 1:
                continue
            video_BFHWD, images_BFHWD = x_BFHWD.tensor_split((num_video,), dim=1)
            if layer == 0:
                video_BFHWD = video_BFHWD + position_FD[:, None, None].to(dtype)
            video_BFHWD = temporal(video_BFHWD, modulation_B6D, frame_rope)
            x_BFHWD = torch.cat([video_BFHWD, images_BFHWD], dim=1) if num_images else video_BFHWD
        return self._unpatch(x_BFHWD, embedded_BD)

    def _embed(self, noisy_BCFHW: Tensor) -> Tensor:
        config = self.config
        frames, height, width = noisy_BCFHW.shape[2:]
        _, rows, columns = token_grid((frames, height, width), config.patch_size)
        table_ND = self.tables.get(
            picture_table,
            rows,
            columns,
            config.hidden_size,
            device=noisy_BCFHW.device,
            base=config.base_side,
            scale=config.scale_2d,
        )
        x_BFHWD: Tensor = self.pos_embed(noisy_BCFHW)
        return x_BFHWD + table_ND.to(noisy_BCFHW.dtype).view(rows, columns, -1)

    def _find_tables(self, x_BFHWD: Tensor, num_video: int) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Rotary tables of pictures and frames (without use_rope, none), and the sinusoids of the frames."""
        config, device = self.config, x_BFHWD.device
        _, _, rows, columns, width = x_BFHWD.shape
        position_FD = self.tables.get(frame_table, num_video, width, device=device, scale=config.scale_1d)
        if not config.use_rope:
            return None, None, position_FD
        head_dim = config.attention_head_dim
        picture = self.tables.get(picture_rotary, rows, columns, head_dim, device=device, scale=config.scale_2d)
        along = self.tables.get(frame_rotary, num_video, head_dim, device=device, scale=config.scale_1d)
        return picture, along, position_FD

    def _mask_cells(self, cells_BFHW: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the scores of a frame's patches, [B, F, M]: as they are, and joined for compression.

        A patch counts when any of its cells does.
        """
        if cells_BFHW is None:
            return None, None
        patches = F.max_pool2d(cells_BFHW.float(), self.config.patch_size)
        factor = self.config.compress_kv_factor
        joined = F.max_pool2d(patches, factor) if factor > 1 else patches
        plain_BFM, joined_BFM = ((1 - pooled.flatten(2)) * HIDDEN for pooled in (patches, joined))
        return plain_BFM, joined_BFM

    def _unpatch(self, x_BFHWD: Tensor, embedded_BD: Tensor) -> Tensor:
        shift, scale = (self.scale_shift_table + embedded_BD[:, None])[:, None, None, None].unbind(-2)
        side = self.config.patch_size
        patches = self.proj_out(modulate(x_BFHWD, shift, scale)).unflatten(-1, (side, side, -1))
        # [B, F, H, W, side, side, C] -> [B, C, F, H, side, W, side]
        cells: Tensor = patches.permute(0, 6, 1, 2, 4, 3, 5)
        return cells.flatten(5, 6).flatten(3, 4)


def build(config: LatteConfig, generator: torch.Generator | None = None) -> LatteT2V:
    """A model with fresh weights; under `torch.device("meta")`, with shapes only."""
    device = torch.get_default_device()
    # Made without storage first: layers would otherwise fill themselves from the global generator.
    with torch.device("meta"):
        model = LatteT2V(config)
    if device.type == "meta":
        return model
    model.to_empty(device=device)
    if generator is None:
        generator = stream(0, "latte weights", device=device.type)
    initialize(model, generator)
    for module in model.modules():
        if isinstance(module, SelfAttention) and module.factor > 1:
            module.reset_joining()
    table = model.caption_projection.y_embedding
    table.normal_(std=table.shape[1] ** -0.5, generator=generator)
    return model
