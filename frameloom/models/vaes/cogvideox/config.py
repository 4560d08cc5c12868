"""Architecture of a CogVideoX autoencoder, its chunks and tiles, and the published json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from frameloom.core.errors import ConfigError
from frameloom.models.layers.tiles import Cuts, Tiles, check_tile
from frameloom.models.spec import VAESpec
from frameloom.models.vaes.config import VAEConfig, to_json

_PLAIN = {
    "block_out_channels": "block_channels",
    "latent_channels": "latent_channels",
    "layers_per_block": "layers_per_block",
    "norm_num_groups": "norm_groups",
    "norm_eps": "norm_eps",
}
# Published tiles have half of these sides.
_SAMPLE = {"sample_height": "tile_height_px", "sample_width": "tile_width_px"}
_FIXED: dict[str, Any] = {
    "act_fn": "silu",
    "in_channels": 3,
    "out_channels": 3,
    "temporal_compression_ratio": 4,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "latents_mean": None,
    "latents_std": None,
    "down_block_types": ["CogVideoXDownBlock3D"] * 4,
    "up_block_types": ["CogVideoXUpBlock3D"] * 4,
}
# `invert_scale_latents` is for the image condition of a sampler, `force_upcast` for its precision; not for us.
_IGNORED = ("force_upcast", "invert_scale_latents", "sample_size")


@dataclass(frozen=True)
class CogVideoXConfig(VAEConfig):
    """Four levels of `block_channels`; the decoder has one more layer per level than the encoder.

    A clip runs through in chunks of frames, and the norms see one chunk at a time, so chunks change the result:
    encode_chunk_frames   frames per chunk; the first chunk also takes what is left over. 8 is CogVideoX-Fun V1.5 and
                          diffusers, 4 is CogVideoX-Fun V1.0 and V1.1; more than a clip has means the whole clip at once
    decode_chunk_latents  latent frames per chunk
    decode_first_alone    the first latent frame is a chunk of its own, as in CogVideoX-Fun V1.5; false: the first
                          chunk takes what is left over, as in V1.x and diffusers, and an even number of latent frames
                          comes back with 3 frames more than it was made from

    `tiling` cuts pictures larger than a tile; tiles overlap by a part of their side. `one_by_one` runs the clips of a
    batch one after the other. `scale` and `shift` hold one number per latent channel, or one for all.
    """

    name: ClassVar[str] = "cogvideox"
    causal: ClassVar[bool] = True
    strides: ClassVar[tuple[int, int, int]] = (4, 8, 8)

    latent_channels: int = 16
    block_channels: tuple[int, ...] = (128, 256, 256, 512)
    layers_per_block: int = 3
    norm_groups: int = 32
    norm_eps: float = 1e-6
    """of the norms in the encoder's blocks; the encoder's last norm and all of the decoder have 1e-6, as published"""
    encode_chunk_frames: int = 8
    decode_chunk_latents: int = 2
    decode_first_alone: bool = True
    tiling: bool = False
    tile_height_px: int = 240
    tile_width_px: int = 360
    tile_overlap_height: float = 1 / 6
    tile_overlap_width: float = 1 / 5
    one_by_one: bool = False
    scale: tuple[float, ...] = (1.15258426,)
    shift: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_channels", tuple(self.block_channels))
        self.spread_scaling(self.latent_channels)
        if self.norm_eps < 0:
            raise ConfigError(f"cogvideox: norm_eps is {self.norm_eps}; it must be at least 0")
        if len(self.block_channels) != 4:
            raise ConfigError(f"cogvideox: block_channels has {len(self.block_channels)} numbers; give 4")
        advice = "choose block_channels that are multiples of norm_groups"
        self.check_groups(self.block_channels, self.norm_groups, advice)
        if self.encode_chunk_frames < 4 or self.encode_chunk_frames % 4:
            raise ConfigError(
                f"cogvideox: encode_chunk_frames is {self.encode_chunk_frames}; choose a positive multiple of 4, the "
                "frames of one latent"
            )
        step = 1 if self.decode_first_alone else 2
        if self.decode_chunk_latents < step or self.decode_chunk_latents % step:
            raise ConfigError(
                f"cogvideox: decode_chunk_latents is {self.decode_chunk_latents}; choose 1 or more, or a multiple of 2 "
                "when decode_first_alone is false"
            )
        for name, size, overlap in self._list_tiles() if self.tiling else ():
            check_tile(size, overlap, compression=8, where=f"cogvideox: {name}", exact=True)

    def cuts(self, *, decoding: bool) -> Cuts:
        height, width = (
            Tiles.overlapping(size, overlap, compression=8, decoding=decoding)
            for _, size, overlap in self._list_tiles()
        )
        return Cuts(space=(height, width) if self.tiling else None, clips=1 if self.one_by_one else None)

    def _list_tiles(self) -> tuple[tuple[str, int, float], ...]:
        return (
            ("tile_height_px", self.tile_height_px, self.tile_overlap_height),
            ("tile_width_px", self.tile_width_px, self.tile_overlap_width),
        )

    @classmethod
    def from_original(cls, values: Mapping[str, Any]) -> CogVideoXConfig:
        """Read the json of diffusers, which CogVideoX-Fun has too."""
        given = {key: value for key, value in values.items() if not key.startswith("_") and key not in _IGNORED}
        fields = cls.read_fields(given, _PLAIN, _FIXED, also=[*_SAMPLE, "scaling_factor", "shift_factor"])
        fields |= {_SAMPLE[key]: value // 2 for key, value in given.items() if key in _SAMPLE}
        shift = values.get("shift_factor") or 0.0
        return cls(**fields, scale=(values.get("scaling_factor", 1.15258426),), shift=(shift,))

    def to_original(self) -> dict[str, Any]:
        """The json of diffusers; ConfigError when the channels have different scales, which it cannot hold."""
        scale, shift = self.one_scaling()
        values: dict[str, Any] = {"_class_name": "AutoencoderKLCogVideoX", **_FIXED}
        values |= {key: to_json(getattr(self, name)) for key, name in _PLAIN.items()}
        values |= {key: 2 * getattr(self, name) for key, name in _SAMPLE.items()}
        return values | {"scaling_factor": scale, "shift_factor": shift or None}


SIZES: dict[str, CogVideoXConfig] = {
    "tiny": CogVideoXConfig(
        latent_channels=8, block_channels=(8, 16, 16, 32), layers_per_block=1, norm_groups=4, scale=(1.0,)
    ),
    "2b": CogVideoXConfig(),
    "5b": CogVideoXConfig(scale=(0.7,)),
}


SPEC = VAESpec(
    name="cogvideox",
    sizes=SIZES,
    build="frameloom.models.vaes.cogvideox.model:CogVideoXVAE",
    load_original="frameloom.models.vaes.base:load_original",
)
