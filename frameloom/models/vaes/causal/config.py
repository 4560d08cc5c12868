"""Architecture of a CausalVAE; field names, values and defaults are those of the published json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from frameloom.core.errors import ConfigError
from frameloom.models.spec import VAESpec
from frameloom.models.vaes.config import VAEConfig, to_json

_IN_TIME = ("Spatial2xTime2x3DDownsample", "Spatial2xTime2x3DUpsample")


@dataclass(frozen=True)
class CausalVAEConfig(VAEConfig):
    """Lists have an entry per level, level 0 at the full resolution; "" does nothing. The decoder runs from the last
    level to the first, and a level resizes after its blocks, in space before time.

    `norm_groups` and the latent scale are not in the published json; there they are 32 and 0.18215. `scale` and
    `shift` hold one number per latent channel, or one for all.
    """

    name: ClassVar[str] = "CausalVAE"
    causal: ClassVar[bool] = True

    hidden_size: int = 128
    hidden_size_mult: tuple[int, ...] = (1, 2, 4, 4)
    z_channels: int = 4
    embed_dim: int = 4
    num_res_blocks: int = 2
    """of an encoder level; a decoder level has one more"""
    encoder_conv_in: str = "CausalConv3d"
    encoder_attention: str = "AttnBlock3D"
    encoder_resnet_blocks: tuple[str, ...] = ("ResnetBlock3D",) * 4
    encoder_spatial_downsample: tuple[str, ...] = ("SpatialDownsample2x",) * 3 + ("",)
    encoder_temporal_downsample: tuple[str, ...] = ("", "TimeDownsample2x", "TimeDownsample2x", "")
    decoder_attention: str = "AttnBlock3D"
    decoder_resnet_blocks: tuple[str, ...] = ("ResnetBlock3D",) * 4
    decoder_spatial_upsample: tuple[str, ...] = ("",) + ("SpatialUpsample2x",) * 3
    decoder_temporal_upsample: tuple[str, ...] = ("", "", "TimeUpsample2x", "TimeUpsample2x")
    use_quant_layer: bool = True
    norm_groups: int = 32
    scale: tuple[float, ...] = (0.18215,)
    shift: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
        self.spread_scaling(self.embed_dim)
        problems = _find_problems(self)
        if problems:
            raise ConfigError(problems)

    @property
    def latent_channels(self) -> int:
        return self.embed_dim

    @property
    def num_levels(self) -> int:
        return len(self.hidden_size_mult)

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of every level."""
        return tuple(self.hidden_size * factor for factor in self.hidden_size_mult)

    @property
    def strides(self) -> tuple[int, int, int]:
        space = sum(bool(name) for name in self.encoder_spatial_downsample)
        time = _count_in_time(self.encoder_spatial_downsample, self.encoder_temporal_downsample)
        return 2**time, 2**space, 2**space

    @classmethod
    def from_original(cls, values: Mapping[str, Any]) -> CausalVAEConfig:
        """Read the published json; what it leaves out takes the published class's defaults."""
        names = {field.name: field.name for field in fields(cls)}
        given = {key: value for key, value in values.items() if not key.startswith("_") and key not in _IGNORED}
        return cls(**cls.read_fields(given, names, _FIXED))

    def to_original(self) -> dict[str, Any]:
        """The published json of this architecture."""
        own = {key: to_json(value) for key, value in asdict(self).items()}
        return {"_class_name": "CausalVAEModel", **_FIXED, **own}


_FIXED: dict[str, Any] = {
    "attn_resolutions": [],
    "double_z": True,
    "dropout": 0.0,
    "encoder_conv_out": "CausalConv3d",
    "encoder_mid_resnet": "ResnetBlock3D",
    "decoder_conv_in": "CausalConv3d",
    "decoder_conv_out": "CausalConv3d",
    "decoder_mid_resnet": "ResnetBlock3D",
    "q_conv": "CausalConv3d",
}
# Settings of the training, and a size that no computation reads.
_IGNORED = ("loss_type", "loss_params", "lr", "resolution")
_RES_BLOCKS = ("ResnetBlock3D", "ResnetBlock2D")
_ATTENTIONS = ("AttnBlock3D", "AttnBlock3DFix")
_CHOICES: dict[str, tuple[str, ...]] = {
    "encoder_conv_in": ("CausalConv3d", "Conv2d"),
    "encoder_attention": _ATTENTIONS,
    "decoder_attention": _ATTENTIONS,
    "encoder_resnet_blocks": _RES_BLOCKS,
    "decoder_resnet_blocks": _RES_BLOCKS,
    "encoder_spatial_downsample": ("", "SpatialDownsample2x", "Downsample", "Spatial2xTime2x3DDownsample"),
    "encoder_temporal_downsample": ("", "TimeDownsample2x", "TimeDownsampleRes2x"),
    "decoder_spatial_upsample": ("", "SpatialUpsample2x", "Spatial2xTime2x3DUpsample"),
    "decoder_temporal_upsample": ("", "TimeUpsample2x", "TimeUpsampleRes2x"),
}


def _count_in_time(spatial: tuple[str, ...], temporal: tuple[str, ...]) -> int:
    return sum(name in _IN_TIME for name in spatial) + sum(bool(name) for name in temporal)


def _find_problems(config: CausalVAEConfig) -> list[str]:
    problems: list[str] = []
    for name, known in _CHOICES.items():
        value = getattr(config, name)
        entries = value if isinstance(value, tuple) else (value,)
        if isinstance(value, tuple) and len(entries) != config.num_levels:
            problems.append(
                f"CausalVAE: {name} has {len(entries)} entries; hidden_size_mult has {config.num_levels} levels"
            )
        for entry in entries:
            if entry not in known:
                problems.append(f"CausalVAE: {name} has {entry!r}; choose from {', '.join(map(repr, known))}")
    counts = ("hidden_size", "z_channels", "embed_dim", "num_res_blocks", "norm_groups")
    problems += [
        f"CausalVAE: {name} is {getattr(config, name)}; it must be at least 1"
        for name in counts
        if getattr(config, name) < 1
    ]
    if problems:
        return problems
    problems += [
        f"CausalVAE: a level of {width} channels cannot be cut into {config.norm_groups} norm groups; change "
        "hidden_size or norm_groups"
        for width in sorted(set(config.widths))
        if width % config.norm_groups
    ]
    if not config.use_quant_layer and config.embed_dim != config.z_channels:
        problems.append(f"CausalVAE: without use_quant_layer, embed_dim {config.embed_dim} must equal z_channels")
    down = (
        sum(map(bool, config.encoder_spatial_downsample)),
        _count_in_time(config.encoder_spatial_downsample, config.encoder_temporal_downsample),
    )
    up = (
        sum(map(bool, config.decoder_spatial_upsample)),
        _count_in_time(config.decoder_spatial_upsample, config.decoder_temporal_upsample),
    )
    if down != up:
        problems.append(
            f"CausalVAE: the encoder halves space {down[0]} and time {down[1]} times, the decoder doubles them {up[0]} "
            f"and {up[1]} times; they must agree"
        )
    return problems


# As in the repository of version 1.1. It does not fit the weights that were published with 1.1, but older ones.
_V1_0 = CausalVAEConfig(encoder_temporal_downsample=("TimeDownsample2x", "TimeDownsample2x", "", ""))
_V1_1 = CausalVAEConfig(
    encoder_conv_in="Conv2d",
    encoder_attention="AttnBlock3DFix",
    encoder_resnet_blocks=("ResnetBlock2D", "ResnetBlock2D", "ResnetBlock3D", "ResnetBlock3D"),
    encoder_spatial_downsample=("Downsample", "Downsample", "Downsample", ""),
    encoder_temporal_downsample=("", "TimeDownsampleRes2x", "TimeDownsampleRes2x", ""),
    decoder_attention="AttnBlock3DFix",
    decoder_temporal_upsample=("", "", "TimeUpsampleRes2x", "TimeUpsampleRes2x"),
)
_V1_2 = replace(
    _V1_1,
    encoder_spatial_downsample=("Downsample", "Spatial2xTime2x3DDownsample", "Spatial2xTime2x3DDownsample", ""),
    encoder_temporal_downsample=("",) * 4,
    decoder_spatial_upsample=("", "SpatialUpsample2x", "Spatial2xTime2x3DUpsample", "Spatial2xTime2x3DUpsample"),
    decoder_temporal_upsample=("",) * 4,
)

SIZES: dict[str, CausalVAEConfig] = {
    # One norm group: with 32 of them every channel would be one, and no flat colour would survive its norm.
    "tiny": replace(
        _V1_2,
        hidden_size=8,
        hidden_size_mult=(1, 2, 4, 4),
        num_res_blocks=1,
        z_channels=8,
        embed_dim=8,
        norm_groups=1,
    ),
    "v1.0": _V1_0,
    "v1.1": _V1_1,
    "v1.2": _V1_2,
}


SPEC = VAESpec(
    name="causal",
    sizes=SIZES,
    build="frameloom.models.vaes.causal.model:CausalVAE",
    load_original="frameloom.models.vaes.causal.weights:load_original",
    start="frameloom.models.vaes.causal.weights:start_as_lowpass",
    inflates="frameloom.models.vaes.causal.weights:is_image_vae",
)
