"""Architecture of LatteT2V (Open-Sora-Plan 1.1), and the published json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.models.spec import DenoiserConfig, DenoiserSpec, find_too_small

WHERE = "latte denoiser"
# Latent frames and latent rows that one step of the interpolation scales stands for.
_FRAMES_PER_SCALE, _CELLS_PER_SCALE = 16, 64


@dataclass(frozen=True)
class LatteConfig(DenoiserConfig):
    """Field names are those of the published code, except for `context_in_dim` (there: caption_channels),
    `learn_sigma` (there: out_channels is twice in_channels) and `joint_temporal_positions`."""

    in_channels: int = 4
    context_in_dim: int = 4096
    """width of the text token states"""
    num_layers: int = 28
    """pairs of a spatial and a temporal block"""
    num_attention_heads: int = 16
    attention_head_dim: int = 72
    patch_size: int = 2
    sample_size: tuple[int, ...] = (64, 64)
    """latent rows and columns that the positions are made for; other sizes are stretched onto them"""
    video_length: int = 17
    """latent frames that the model is made for; with more than 31 the temporal positions are compressed"""
    learn_sigma: bool = True
    """also predict the variance, in as many channels again"""
    use_rope: bool = False
    """turn queries and keys of self-attention by their position, in addition to the sinusoids"""
    compress_kv_factor: int = 1
    """join so many neighbours (per side, and in time) into one key and value, in the second half of the blocks"""
    interpolation_scale_1d: float = 0.0
    """temporal positions are divided by this; 0 lets it follow from video_length"""
    norm_eps: float = 1e-6
    """of the norms in the blocks; the last norm has 1e-6, as published"""
    attention_bias: bool = True
    """of the projections to queries, keys and values; that of their result always has one"""
    dropout: float = 0.0
    """in training: of the results of both attentions, and in every MLP behind its activation"""
    joint_temporal_positions: bool = True
    """add the temporal sinusoids also to clips that images follow; the published code does not without recompute"""

    where = WHERE

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def out_channels(self) -> int:
        return self.in_channels * (2 if self.learn_sigma else 1)

    @property
    def scale_2d(self) -> int:
        return max(self.sample_size[0] // _CELLS_PER_SCALE, 1)

    @property
    def scale_1d(self) -> float:
        if self.interpolation_scale_1d:
            return self.interpolation_scale_1d
        # An odd length has the lone first frame of a causal autoencoder in front.
        return max((self.video_length - self.video_length % 2) // _FRAMES_PER_SCALE, 1)

    def compresses(self, layer: int) -> bool:
        """Whether the two blocks of a layer join keys and values."""
        return self.compress_kv_factor > 1 and layer >= self.num_layers // 2

    @classmethod
    def from_original(cls, values: Mapping[str, Any]) -> LatteConfig:
        """Read the published json; settings that no published model uses are refused."""
        given = {**_ORIGINAL_DEFAULTS, **{key: value for key, value in values.items() if not key.startswith("_")}}
        for key, value in given.items():
            refuse_unknown(key, (*_PLAIN, *_FIXED, *_IGNORED, "out_channels"), what="key of a LatteT2V config")
            if key in _FIXED and value != _FIXED[key]:
                raise ConfigError(f"LatteT2V config: {key} is {value!r}; only {_FIXED[key]!r} is built here")
        channels, outputs = given["in_channels"], given["out_channels"] or given["in_channels"]
        if outputs not in (channels, 2 * channels):
            raise ConfigError(f"LatteT2V config: out_channels is {outputs}; it must be once or twice {channels}")
        width = given["num_attention_heads"] * given["attention_head_dim"]
        if given.get("cross_attention_dim", width) != width:
            raise ConfigError(f"LatteT2V config: cross_attention_dim must be heads times head width, {width}")
        fields = {_PLAIN[key]: value for key, value in given.items() if key in _PLAIN and value is not None}
        return cls(**fields, learn_sigma=outputs == 2 * channels)

    def to_original(self) -> dict[str, Any]:
        """The published json of this architecture."""
        values: dict[str, Any] = {"_class_name": "LatteT2V", **_FIXED}
        values |= {key: getattr(self, name) for key, name in _PLAIN.items()}
        values |= {"sample_size": list(self.sample_size), "cross_attention_dim": self.hidden_size}
        values["interpolation_scale_1d"] = self.interpolation_scale_1d or None
        return values | {"out_channels": self.out_channels}

    def find_problems(self) -> list[str]:
        problems = find_too_small(self, _LEAST, where=WHERE)
        sides = self.sample_size
        if len(sides) != 2 or any(not isinstance(side, int) or side < self.patch_size for side in sides):
            problems.append(f"{WHERE}: sample_size {list(sides)} must be two whole numbers of at least one patch each")
        if not 0 <= self.dropout <= 1:
            problems.append(f"{WHERE}: dropout is {self.dropout}; it must be from 0 to 1")
        if self.hidden_size % 4:
            problems.append(
                f"{WHERE}: heads times head width is {self.hidden_size}; the sinusoids need a multiple of 4"
            )
        if self.use_rope and self.attention_head_dim % 4:
            problems.append(
                f"{WHERE}: attention_head_dim {self.attention_head_dim} with use_rope must be a multiple of 4"
            )
        if self.use_rope and self.compress_kv_factor > 1:
            problems.append(f"{WHERE}: use_rope and compress_kv_factor exclude each other; leave one of them out")
        return problems


_PLAIN = {
    "in_channels": "in_channels",
    "caption_channels": "context_in_dim",
    "num_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "attention_head_dim": "attention_head_dim",
    "patch_size": "patch_size",
    "sample_size": "sample_size",
    "video_length": "video_length",
    "use_rope": "use_rope",
    "compress_kv_factor": "compress_kv_factor",
    "interpolation_scale_1d": "interpolation_scale_1d",
    "norm_eps": "norm_eps",
    "attention_bias": "attention_bias",
    "dropout": "dropout",
}
_ORIGINAL_DEFAULTS: dict[str, Any] = {"in_channels": 4, "out_channels": None, "num_attention_heads": 16}
_FIXED: dict[str, Any] = {
    "patch_size_t": 1,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "activation_fn": "gelu-approximate",
    "rope_scaling_type": "linear",
    "attention_type": "default",
}
# They choose a kernel, or do nothing in the published code.
_IGNORED = ("attention_mode", "num_embeds_ada_norm", "model_max_length", "cross_attention_dim")


_LEAST = {
    "in_channels": 1,
    "context_in_dim": 1,
    "num_layers": 1,
    "num_attention_heads": 1,
    "attention_head_dim": 1,
    "patch_size": 1,
    "video_length": 1,
    "compress_kv_factor": 1,
    "interpolation_scale_1d": 0.0,
}

_RELEASED = LatteConfig()

SIZES: dict[str, LatteConfig] = {
    "tiny": LatteConfig(
        context_in_dim=384,
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=32,
        sample_size=(8, 8),
        video_length=5,
        learn_sigma=False,
    ),
    "xl": _RELEASED,
    "xl-221": replace(_RELEASED, video_length=56),
    "xl-513": replace(_RELEASED, video_length=129),
    "xl-d64": replace(_RELEASED, num_attention_heads=18, attention_head_dim=64),
}

# Lists of repeated blocks. The forward pass takes one of each in turn.
BLOCK_LISTS = ("transformer_blocks", "temporal_transformer_blocks")

SPEC = DenoiserSpec(
    name="latte",
    sizes=SIZES,
    block_kinds=BLOCK_LISTS,
    supported_conditions=("images",),
    images_skip_temporal_blocks=True,
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
    model="frameloom.models.denoisers.latte.model:LatteT2V",
    weights="frameloom.models.denoisers.latte.weights",
)
