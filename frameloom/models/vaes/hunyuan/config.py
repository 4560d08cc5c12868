"""Architecture of a Hunyuan autoencoder, its tiles, and the published json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from frameloom.core.errors import ConfigError
from frameloom.models.spec import VAESpec
from frameloom.models.vaes.config import TiledConfig, to_json

# Open-Sora 2.0's key, and where it stands here; those of diffusers' json are read as well.
_PLAIN = {
    "block_out_channels": "block_channels",
    "latent_channels": "latent_channels",
    "layers_per_block": "layers_per_block",
    "norm_num_groups": "norm_groups",
    "mid_block_add_attention": "attention",
    "use_slicing": "one_by_one",
    "use_spatial_tiling": "spatial_tiling",
    "use_temporal_tiling": "temporal_tiling",
    "sample_size": "tile_px",
    "sample_tsize": "tile_frames",
    "tile_overlap_factor": "tile_overlap",
}
_SCALING = {"scale_factor": "scale", "shift_factor": "shift", "scaling_factor": "scale"}
# Keys with one possible value; each is in one of the two published spellings.
_FIXED: dict[str, Any] = {
    "act_fn": "silu",
    "channel": False,
    "dropout": 0.0,
    "in_channels": 3,
    "out_channels": 3,
    "spatial_compression_ratio": 8,
    "time_compression_ratio": 4,
    "temporal_compression_ratio": 4,
    "down_block_types": ["HunyuanVideoDownBlock3D"] * 4,
    "up_block_types": ["HunyuanVideoUpBlock3D"] * 4,
}


@dataclass(frozen=True)
class HunyuanConfig(TiledConfig):
    """Four levels of `block_channels`; the decoder has one more layer per level than the encoder. `scale` and `shift`
    hold one number per latent channel, or one for all."""

    name: ClassVar[str] = "hunyuan"
    causal: ClassVar[bool] = True
    strides: ClassVar[tuple[int, int, int]] = (4, 8, 8)

    latent_channels: int = 16
    block_channels: tuple[int, ...] = (128, 256, 512, 512)
    layers_per_block: int = 2
    norm_groups: int = 32
    attention: bool = True
    spatial_tiling: bool = False
    temporal_tiling: bool = False
    tile_px: int = 256
    tile_frames: int = 64
    tile_overlap: float = 0.25
    one_by_one: bool = False
    scale: tuple[float, ...] = (0.476986,)
    shift: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_channels", tuple(self.block_channels))
        self.spread_scaling(self.latent_channels)
        if len(self.block_channels) != 4:
            raise ConfigError(f"hunyuan: block_channels has {len(self.block_channels)} numbers; give 4, one per level")
        advice = "choose block_channels that are multiples of norm_groups"
        self.check_groups(self.block_channels, self.norm_groups, advice)
        self.check_tiles()

    @classmethod
    def from_original(cls, values: Mapping[str, Any]) -> HunyuanConfig:
        """Read the json of Open-Sora 2.0 or of diffusers."""
        given = {key: value for key, value in values.items() if not key.startswith("_") and key != "from_pretrained"}
        fields = cls.read_fields(given, _PLAIN, _FIXED, also=_SCALING)
        return cls(**fields | {_SCALING[key]: (value,) for key, value in given.items() if key in _SCALING})

    def to_original(self) -> dict[str, Any]:
        """The json of Open-Sora 2.0; ConfigError when the channels have different scales, which it cannot hold."""
        scale, shift = self.one_scaling()
        values = {key: to_json(getattr(self, name)) for key, name in _PLAIN.items()}
        return values | {"scale_factor": scale, "shift_factor": shift}


SIZES: dict[str, HunyuanConfig] = {
    "tiny": HunyuanConfig(
        latent_channels=8, block_channels=(8, 16, 16, 32), layers_per_block=1, norm_groups=4, scale=(1.0,)
    ),
    # The same weights with the tiles of two published programs.
    "opensora2": HunyuanConfig(spatial_tiling=True),
    "hunyuanvideo": HunyuanConfig(temporal_tiling=True, tile_frames=16),
}


SPEC = VAESpec(
    name="hunyuan",
    sizes=SIZES,
    build="frameloom.models.vaes.hunyuan.model:HunyuanVAE",
    load_original="frameloom.models.vaes.base:load_original",
)
