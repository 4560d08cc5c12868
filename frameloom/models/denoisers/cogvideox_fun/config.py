"""Architecture of the CogVideoX-Fun transformer.

Field names are those of the published `config.json`, but for `in_channels`, which is `out_channels` there, and
`context_in_dim`, which is `text_embed_dim`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from frameloom.core.errors import ConfigError
from frameloom.models.spec import DenoiserConfig, DenoiserSpec, Latent, find_too_small

FAMILY_NAME = "cogvideox_fun"
WHERE = f"{FAMILY_NAME} denoiser"
TIME_ACTIVATIONS = ("silu", "gelu", "mish", "relu")
_CONDITIONS = ("none", "inpaint", "control")


@dataclass(frozen=True)
class CogVideoXFunConfig(DenoiserConfig):
    """`in_channels` is that of the noisy latent and of the prediction; `condition` says what stands beside it."""

    num_attention_heads: int
    num_layers: int
    attention_head_dim: int = 64
    in_channels: int = 16
    condition: Literal["none", "inpaint", "control"] = "none"
    """beside the noisy latent: nothing; a mask and the latent it leaves (1 + C channels); a control latent (C)"""
    mask_scale: float = 1.0
    """the mask channel where a cell is known: the original multiplies the mask by the autoencoder's scale, too"""
    add_noise_in_inpaint_model: bool = False
    """the checkpoint was trained with noise on the given pixels"""
    patch_size: int = 2
    patch_size_t: int = 1
    """latent frames per token; 1 is the published null (a convolution), 2 is V1.5 (a linear layer)"""
    patch_bias: bool = True
    """bias of the convolution; the linear layer of V1.5 always has one"""
    time_embed_dim: int = 512
    context_in_dim: int = 4096
    """width of the text token states"""
    max_text_seq_length: int = 226
    """text tokens; exactly so many where positions are added to tokens, any number with rotary ones alone"""
    sample_height: int = 60
    """latent rows of the base grid that positions refer to"""
    sample_width: int = 90
    sample_frames: int = 49
    """pixel frames of the base grid; only positions that are added to tokens end there"""
    temporal_compression_ratio: int = 4
    use_rotary_positional_embeddings: bool = False
    use_learned_positional_embeddings: bool = False
    """positions are also added to tokens, from a table that is part of the checkpoint"""
    spatial_interpolation_scale: float = 1.875
    temporal_interpolation_scale: float = 1.0
    attention_bias: bool = True
    norm_eps: float = 1e-5
    norm_elementwise_affine: bool = True
    """whether norms have weights, but for those of queries and keys, which always do"""
    flip_sin_to_cos: bool = True
    """sinusoids of the timestep begin with cosines"""
    freq_shift: int = 0
    """takes so much from the number of frequencies that their exponents are divided by"""
    timestep_activation_fn: Literal["silu", "gelu", "mish", "relu"] = "silu"
    dropout: float = 0.0
    """in training: behind the embeddings, and in every MLP behind its activation and its second layer"""

    where = WHERE

    def token_grid(self, latent_FHW: Latent) -> Latent:
        frames, rows, columns = super().token_grid(latent_FHW)
        patch_t, base = self.patch_size_t, self.base_grid
        if frames % patch_t and frames != 1:
            stride = self.temporal_compression_ratio
            lengths = ", ".join(str(1 + stride * (patch_t * count - 1)) for count in (1, 2, 3))
            raise ConfigError(
                f"{WHERE}: {frames} latent frames, but patch_size_t {patch_t} takes one or a multiple of {patch_t}; "
                f"choose a clip of 1, {lengths}, ... frames"
            )
        grid = -(-frames // patch_t), rows, columns
        if self.adds_positions and grid[0] > base[0]:
            raise ConfigError(
                f"{WHERE}: {frames} latent frames, but its table of positions ends at {base[0]}; use clips of at most "
                f"{self.sample_frames} frames, or raise sample_frames"
            )
        if patch_t > 1 and (rows > base[1] or columns > base[2]):
            raise ConfigError(
                f"{WHERE}: {rows}x{columns} patches are more than the {base[1]}x{base[2]} of its base grid; use a "
                "smaller resolution, or raise sample_height and sample_width"
            )
        return grid

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def cond_channels(self) -> int:
        return {"none": 0, "inpaint": 1 + self.in_channels, "control": self.in_channels}[self.condition]

    @property
    def input_channels(self) -> int:
        return self.in_channels + self.cond_channels

    @property
    def axes_dim(self) -> tuple[int, int, int]:
        """Rotary channels of a head for (frame, row, column)."""
        eighth = self.attention_head_dim // 8
        return 2 * eighth, 3 * eighth, 3 * eighth

    @property
    def adds_positions(self) -> bool:
        return self.use_learned_positional_embeddings or not self.use_rotary_positional_embeddings

    @property
    def base_grid(self) -> tuple[int, int, int]:
        """Tokens of the base grid: (frames, rows, columns)."""
        frames = (self.sample_frames - 1) // self.temporal_compression_ratio + 1
        return frames // self.patch_size_t, self.sample_height // self.patch_size, self.sample_width // self.patch_size

    def find_problems(self) -> list[str]:
        problems = find_too_small(self, dict.fromkeys(_AT_LEAST_ONE, 1), where=WHERE)
        if self.condition not in _CONDITIONS:
            problems.append(f"{WHERE}: condition is '{self.condition}'; choose one of {', '.join(_CONDITIONS)}")
        if self.use_rotary_positional_embeddings and self.attention_head_dim % 16:
            problems.append(
                f"{WHERE}: attention_head_dim is {self.attention_head_dim}; rotary positions need a multiple of 16"
            )
        if self.use_learned_positional_embeddings and not self.use_rotary_positional_embeddings:
            problems.append(
                f"{WHERE}: use_learned_positional_embeddings without use_rotary_positional_embeddings; no published "
                "model is like that: switch both on, or the learned ones off"
            )
        if self.timestep_activation_fn not in TIME_ACTIVATIONS:
            problems.append(
                f"{WHERE}: timestep_activation_fn is '{self.timestep_activation_fn}'; choose one of "
                f"{', '.join(TIME_ACTIVATIONS)}"
            )
        if self.freq_shift >= self.width // 2:
            problems.append(f"{WHERE}: freq_shift is {self.freq_shift}; it must be below {self.width // 2}")
        if not 0 <= self.dropout <= 1:
            problems.append(f"{WHERE}: dropout is {self.dropout}; it must be from 0 to 1")
        if self.adds_positions and self.width % 8:
            problems.append(f"{WHERE}: width {self.width} (heads times head width) must be a multiple of 8")
        if self.patch_size_t > 1 and self.adds_positions:
            problems.append(
                f"{WHERE}: patch_size_t {self.patch_size_t} needs rotary positions alone; set "
                "use_rotary_positional_embeddings to true and use_learned_positional_embeddings to false"
            )
        if not problems and 0 in self.base_grid:
            problems.append(f"{WHERE}: sample_frames, sample_height and sample_width hold no token: {self.base_grid}")
        return problems


_AT_LEAST_ONE = (
    *("num_attention_heads", "num_layers", "attention_head_dim", "in_channels", "patch_size", "patch_size_t"),
    *("time_embed_dim", "context_in_dim", "max_text_seq_length", "sample_height", "sample_width", "sample_frames"),
    "temporal_compression_ratio",
)

_2B = CogVideoXFunConfig(num_attention_heads=30, num_layers=30, mask_scale=1.15258426)
_5B = CogVideoXFunConfig(num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True, mask_scale=0.7)
_5B_1_5 = replace(_5B, patch_size_t=2, patch_bias=False, sample_height=384, sample_width=680, sample_frames=85)
_TINY = CogVideoXFunConfig(
    num_attention_heads=4,
    num_layers=4,
    attention_head_dim=32,
    in_channels=8,
    time_embed_dim=128,
    context_in_dim=384,
    sample_height=16,
    sample_width=16,
    sample_frames=17,
    use_rotary_positional_embeddings=True,
)

SIZES: dict[str, CogVideoXFunConfig] = {
    "tiny": _TINY,
    "2b": _2B,
    "2b-inpaint": replace(_2B, condition="inpaint"),
    "2b-control": replace(_2B, condition="control"),
    "5b": _5B,
    "5b-inpaint": replace(_5B, condition="inpaint"),
    "5b-1.1-inpaint": replace(_5B, condition="inpaint", add_noise_in_inpaint_model=True),
    "5b-control": replace(_5B, condition="control"),
    "5b-1.5": _5B_1_5,
    "5b-1.5-inpaint": replace(_5B_1_5, condition="inpaint", add_noise_in_inpaint_model=True),
}

# Lists of repeated blocks, in the order of the forward pass.
BLOCK_LISTS = ("transformer_blocks",)

SPEC = DenoiserSpec(
    name=FAMILY_NAME,
    sizes=SIZES,
    block_kinds=BLOCK_LISTS,
    supported_conditions=("known", "control"),
    lora_targets=("*",),  # as published: every linear layer
    model="frameloom.models.denoisers.cogvideox_fun.model:CogVideoXFunTransformer",
    weights="frameloom.models.denoisers.cogvideox_fun.weights",
)
