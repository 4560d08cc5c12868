"""The Open-Sora 2.0 MMDiT: text and video tokens through double-stream, then single-stream blocks.

Shape letters: B batch, C channels, F frames, H height, W width, N video tokens, K text tokens, M = K + N, D width, P
rotary pairs.

Flux pairs channels (2j, 2j + 1) of a head, Open-Sora 2.0 pairs (j, j + half).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameloom.distributed.sequence_parallel import ALONE, Exchange, SequenceGroup
from frameloom.models.denoisers.base import NUM_TIMESTEPS, Conditions, Denoiser, Draws, Encode
from frameloom.models.denoisers.opensora2.blocks import DoubleBlock, SingleBlock
from frameloom.models.denoisers.opensora2.conditioning import pack_known
from frameloom.models.denoisers.opensora2.config import BLOCK_LISTS, MMDiTConfig
from frameloom.models.layers.modulation import TIME_WIDTH, modulate
from frameloom.models.layers.patches import Grid, pack, unpack
from frameloom.models.layers.positions import PositionTables, axis_angles, embed_index, grid_positions, rotary_table
from frameloom.models.spec import Latent

# What the published training passes to models with a guidance embedding.
GUIDANCE = 4.0


class MMDiT(Denoiser):
    """`rotary` and `absolute` keep the position tables of the latest shapes. In a `sequence` group each rank has a part
    of the joint sequence, text first."""

    family, block_lists = "opensora2", BLOCK_LISTS
    config: MMDiTConfig

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.sequence: SequenceGroup = ALONE
        self.img_in = nn.Linear(config.in_channels, width)
        self.txt_in = nn.Linear(config.context_in_dim, width)
        self.time_in = Embedder(TIME_WIDTH, width)
        self.vector_in = Embedder(config.vec_in_dim, width)
        self.guidance_in = Embedder(TIME_WIDTH, width) if config.guidance_embed else None
        self.cond_in = nn.Linear(config.cond_channels, width) if config.cond_embed else None
        self.double_blocks = nn.ModuleList(DoubleBlock(config) for _ in range(config.depth))
        self.single_blocks = nn.ModuleList(SingleBlock(config) for _ in range(config.depth_single_blocks))
        self.final_layer = FinalLayer(width, config.in_channels)
        self.rotary = PositionTables(lambda grid, num_text: turn_table(config, joint_positions(grid, num_text)))
        self.absolute = PositionTables(lambda grid: sinusoid_table(video_positions(grid), width, config.theta))

    def accepted(self) -> tuple[str, ...]:
        inputs = (("cond_latents", self.config.cond_embed), ("guidance", self.config.guidance_embed))
        return tuple(name for name, has_input in inputs if has_input)

    def is_zero(self, name: str) -> bool:
        if name == "cond_in":  # in the published code too: a new condition input starts as a no-op
            return True
        zero_names = ("img_mod.lin", "txt_mod.lin", "modulation.lin", "adaLN_modulation.1", "final_layer.linear")
        return self.config.init == "zero" and name.endswith(zero_names)

    @staticmethod
    def exchanges(config: MMDiTConfig, latent_FHW: Latent, num_text: int, degree: int) -> list[Exchange]:
        joint = Exchange(num_text + config.num_tokens(latent_FHW), config.hidden_size)
        return [joint] * (config.depth + config.depth_single_blocks)

    def pack_known(self, clip_BCFHW: Tensor, known_B1FHW: Tensor, encode: Encode, draws: Draws) -> Tensor:
        return pack_known(clip_BCFHW, known_B1FHW, encode)

    def find_known(self, cond_latents_BCFHW: Tensor) -> tuple[Tensor, Tensor]:
        return cond_latents_BCFHW[:, :1], cond_latents_BCFHW[:, 1:]

    def forward(self, noisy_BCFHW: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
        """Text masks are not used: as in the original, padding is attended to.

        Models with cond_embed see the mask and the masked latent, 1 + C channels; none given is text to video.
        """
        self.check_conditions(timestep_B, conditions)
        _, _, frames, height, width = noisy_BCFHW.shape
        patch_size, dtype, device = self.config.patch_size, self.img_in.weight.dtype, noisy_BCFHW.device
        grid, text_BKD = self.config.token_grid((frames, height, width)), conditions["text"]
        cond_BCFHW = conditions.get("cond_latents")
        tokens_BNC = self.predict_tokens(
            pack(noisy_BCFHW.to(dtype), patch_size),
            text_BKD.to(dtype),
            timestep_B,
            conditions["pooled"].to(dtype),
            self.rotary.get(grid, text_BKD.shape[1], device=device),
            None if cond_BCFHW is None else pack(cond_BCFHW.to(dtype), patch_size),
            conditions.get("guidance"),
            self.absolute.get(grid, device=device).to(dtype) if self.config.absolute_positions else None,
        )
        return unpack(tokens_BNC, grid, patch_size).to(noisy_BCFHW.dtype)

    def predict_tokens(
        self,
        img_BNC: Tensor,
        txt_BKD: Tensor,
        timestep_B: Tensor,
        pooled_BD: Tensor,
        rope_M1P: Tensor,
        cond_BNC: Tensor | None = None,
        guidance_B: Tensor | None = None,
        position_ND: Tensor | None = None,
    ) -> Tensor:
        """The same on packed tokens. Without a condition (text to video), a model that takes one sees zeros."""
        sequence, num_text, num_video = self.sequence, txt_BKD.shape[1], img_BNC.shape[1]
        img_BND = self.img_in(sequence.split_rest(img_BNC, num_text))
        if self.cond_in is not None:
            if cond_BNC is None:
                cond_BNC = img_BNC.new_zeros(*img_BNC.shape[:2], self.config.cond_channels)
            img_BND = img_BND.add(self.cond_in(sequence.split_rest(cond_BNC, num_text)))
        if position_ND is not None:
            img_BND = img_BND + sequence.split_rest(position_ND, num_text)
        txt_BKD = self.txt_in(sequence.split_prefix(txt_BKD, num_video))
        vec_BD = self._embed_vector(timestep_B, pooled_BD, guidance_B)
        for block in self.double_blocks:
            img_BND, txt_BKD = block(img_BND, txt_BKD, vec_BD, rope_M1P)
        joint_BMD = torch.cat((txt_BKD, img_BND), dim=1)
        for block in self.single_blocks:
            joint_BMD = block(joint_BMD, vec_BD, rope_M1P)
        prediction: Tensor = self.final_layer(joint_BMD[:, txt_BKD.shape[1] :], vec_BD)
        return sequence.gather_rest(prediction, num_text, num_video)

    def _embed_vector(self, timestep_B: Tensor, pooled_BD: Tensor, guidance_B: Tensor | None) -> Tensor:
        vec_BD: Tensor = self.time_in(embed_time(timestep_B).type_as(pooled_BD))
        if self.guidance_in is not None:
            guidance_B = torch.full_like(timestep_B, GUIDANCE) if guidance_B is None else guidance_B
            vec_BD = vec_BD + self.guidance_in(embed_time(guidance_B).type_as(pooled_BD))
        if self.config.normalize_vec:
            pooled_BD = F.rms_norm(pooled_BD, pooled_BD.shape[-1:], eps=1e-6)
        return vec_BD.add(self.vector_in(pooled_BD))


class Embedder(nn.Module):
    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(in_width, width)
        self.out_layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.out_layer(F.silu(self.in_layer(x)))
        return hidden


class FinalLayer(nn.Module):
    def __init__(self, width: int, out_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x_BND: Tensor, vec_BD: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vec_BD)[:, None].chunk(2, dim=-1)
        prediction: Tensor = self.linear(modulate(x_BND, shift, scale))
        return prediction


def embed_time(time_B: Tensor, width: int = TIME_WIDTH) -> Tensor:
    """Sinusoids of 1000 * time, which need not be a whole number here."""
    return embed_index(NUM_TIMESTEPS * time_B.float(), width)


def video_positions(grid: Grid) -> Tensor:
    """[N, 3]: latent frame, patch row and patch column of every token, as float32."""
    return grid_positions([torch.arange(count, dtype=torch.float32) for count in grid])


def joint_positions(grid: Grid, num_text: int) -> Tensor:
    """[K + N, 3]: text first, all at the origin."""
    return F.pad(video_positions(grid), (0, 0, num_text, 0))


def rotary_precision(*, half_split: bool) -> torch.dtype:
    """What angles are computed in, as in the published code of either pairing."""
    return torch.float32 if half_split else torch.float64


def turn_table(config: MMDiTConfig, position_M3: Tensor) -> Tensor:
    """The rotary table [M, 1, P] of tokens at these positions; a batch may stand before M."""
    precision = rotary_precision(half_split=config.use_liger_rope)
    return rotary_table(position_M3, config.axes_dim, config.theta, precision=precision)


def sinusoid_table(position_N3: Tensor, width: int, theta: float) -> Tensor:
    """[N, width]: cosines and sines of every axis, a third of the width each; what is left over stays zero."""
    dim = width // 6 * 2
    angles = [axis_angles(position, dim, theta, precision=torch.float64) for position in position_N3.unbind(-1)]
    table = torch.cat([part for angle in angles for part in (angle.cos(), angle.sin())], dim=-1).float()
    return F.pad(table, (0, width - table.shape[-1]))
