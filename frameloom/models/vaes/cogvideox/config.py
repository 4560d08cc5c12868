"""Architecture of a CogVideoX autoencoder, its chunks and tiles, and the published json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.models.layers.tiles import Tiles
from frameloom.models.spec import VAESpec, spread_scaling

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
class CogVideoXConfig:
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

    causal: ClassVar[bool] = True

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
        spread_scaling(self, self.latent_channels, where="cogvideox")
        self._check_channels()
        self._check_chunks()
        for side in ("height", "width") if self.tiling else ():
            self._check_tile(side)

    @property
    def strides(self) -> tuple[int, int, int]:
        return 4, 8, 8

    def tiles(self, side: str, *, decoding: bool) -> Tiles:
        """Tiles along `height` or `width`, in cells of what goes in and what comes out; rounded as published."""
        size_px, overlap = getattr(self, f"tile_{side}_px"), getattr(self, f"tile_overlap_{side}")
        cells = size_px // self.strides[1]
        size_in, size_out = (cells, size_px) if decoding else (size_px, cells)
        blend = int(size_out * overlap)
        return Tiles(size=size_in, stride=int(size_in * (1 - overlap)), keep=size_out - blend, blend=blend)

    @classmethod
    def from_original(cls, values: Mapping[str, Any]) -> CogVideoXConfig:
        """Read the json of diffusers, which CogVideoX-Fun has too."""
        fields: dict[str, Any] = {}
        for key, value in values.items():
            if key.startswith("_") or key in _IGNORED:
                continue
            refuse_unknown(key, [*_PLAIN, *_SAMPLE, *_FIXED, "scaling_factor", "shift_factor"], what="cogvideox key")
            if key in _FIXED and _plain(value) != _FIXED[key]:
                raise ConfigError(f"cogvideox: {key} is {value!r}; only {_FIXED[key]!r} is supported")
            if key in _PLAIN:
                fields[_PLAIN[key]] = value
            elif key in _SAMPLE:
                fields[_SAMPLE[key]] = value // 2
        shift = values.get("shift_factor") or 0.0
        return cls(**fields, scale=(values.get("scaling_factor", 1.15258426),), shift=(shift,))

    def to_original(self) -> dict[str, Any]:
        """The json of diffusers; ConfigError when the channels have different scales, which it cannot hold."""
        if len(set(self.scale)) > 1 or len(set(self.shift)) > 1:
            raise ConfigError("cogvideox: the published config has one scale and one shift for all channels")
        values: dict[str, Any] = {"_class_name": "AutoencoderKLCogVideoX", **_FIXED}
        values |= {key: _plain(getattr(self, name)) for key, name in _PLAIN.items()}
        values |= {key: 2 * getattr(self, name) for key, name in _SAMPLE.items()}
        return values | {"scaling_factor": self.scale[0], "shift_factor": self.shift[0] or None}

    def _check_channels(self) -> None:
        if self.norm_eps < 0:
            raise ConfigError(f"cogvideox: norm_eps is {self.norm_eps}; it must be at least 0")
        if len(self.block_channels) != 4:
            raise ConfigError(f"cogvideox: block_channels has {len(self.block_channels)} numbers; give 4")
        for width in self.block_channels:
            if width % self.norm_groups:
                raise ConfigError(
                    f"cogvideox: a layer of {width} channels cannot be cut into {self.norm_groups} groups; choose "
                    "block_channels that are multiples of norm_groups"
                )

    def _check_chunks(self) -> None:
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

    def _check_tile(self, side: str) -> None:
        size, overlap = getattr(self, f"tile_{side}_px"), getattr(self, f"tile_overlap_{side}")
        encode, decode = (
            self.tiles(side, decoding=decoding) if 0 <= overlap < 1 and size >= 8 else Tiles(0, 0, 0, 0)
            for decoding in (False, True)
        )
        whole = size % 8 == 0 and encode.stride == 8 * encode.keep and decode.keep == 8 * decode.stride
        if not encode.stride or not whole:
            raise ConfigError(
                f"cogvideox: tile_{side}_px {size} with tile_overlap_{side} {overlap:g} does not give tiles whose side "
                "and distance are multiples of 8; choose others"
            )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


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
    load_original="frameloom.models.vaes.cogvideox.model:load_original",
)
