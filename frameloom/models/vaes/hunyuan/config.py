"""Architecture of a Hunyuan autoencoder, its tiles, and the published json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.models.layers.tiles import Tiles, check_tile
from frameloom.models.spec import VAESpec, spread_scaling

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
class HunyuanConfig:
    """Four levels of `block_channels`; the decoder has one more layer per level than the encoder.

    Tiles overlap by `tile_overlap` of their size. A clip is cut in space when a side is longer than `tile_px`, and in
    time when it has more than `tile_frames` frames. `one_by_one` runs the clips of a batch one after the other.
    `scale` and `shift` hold one number per latent channel, or one for all.
    """

    causal: ClassVar[bool] = True

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
        spread_scaling(self, self.latent_channels, where="hunyuan")
        self._check_channels()
        time, side, _ = self.strides
        if self.spatial_tiling:
            check_tile(self.tile_px, self.tile_overlap, compression=side, where="hunyuan: tile_px")
        if self.temporal_tiling:
            check_tile(self.tile_frames, self.tile_overlap, compression=time, where="hunyuan: tile_frames")

    @property
    def strides(self) -> tuple[int, int, int]:
        return 4, 8, 8

    def tiles(self, *, in_time: bool, decoding: bool) -> Tiles:
        """Tiles along a side of the picture or along the frames, in cells of what goes in and what comes out."""
        compression = self.strides[0 if in_time else 1]
        size = self.tile_frames if in_time else self.tile_px
        return Tiles.overlapping(size, self.tile_overlap, compression=compression, decoding=decoding)

    @classmethod
    def from_original(cls, values: Mapping[str, Any]) -> HunyuanConfig:
        """Read the json of Open-Sora 2.0 or of diffusers."""
        given = {key: value for key, value in values.items() if not key.startswith("_") and key != "from_pretrained"}
        fields: dict[str, Any] = {}
        for key, value in given.items():
            refuse_unknown(key, [*_PLAIN, *_SCALING, *_FIXED], what="key of a Hunyuan autoencoder's config")
            if key in _FIXED and _plain(value) != _FIXED[key]:
                raise ConfigError(f"hunyuan: {key} is {value!r}; only {_FIXED[key]!r} is supported")
            if key in _PLAIN:
                fields[_PLAIN[key]] = value
            elif key in _SCALING:
                fields[_SCALING[key]] = (value,)
        return cls(**fields)

    def to_original(self) -> dict[str, Any]:
        """The json of Open-Sora 2.0; ConfigError when the channels have different scales, which it cannot hold."""
        if len(set(self.scale)) > 1 or len(set(self.shift)) > 1:
            raise ConfigError("hunyuan: the published config has one scale and one shift for all channels")
        values = {key: _plain(getattr(self, name)) for key, name in _PLAIN.items()}
        return values | {"scale_factor": self.scale[0], "shift_factor": self.shift[0]}

    def _check_channels(self) -> None:
        if len(self.block_channels) != 4:
            raise ConfigError(f"hunyuan: block_channels has {len(self.block_channels)} numbers; give 4, one per level")
        for width in self.block_channels:
            if width % self.norm_groups:
                raise ConfigError(
                    f"hunyuan: a layer of {width} channels cannot be cut into {self.norm_groups} groups; choose "
                    "block_channels that are multiples of norm_groups"
                )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


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
    load_original="frameloom.models.vaes.hunyuan.model:load_original",
)
