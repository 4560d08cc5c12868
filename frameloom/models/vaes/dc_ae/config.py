"""Architecture of a video DC-AE, its tiles, and the published dot-list."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.models.spec import VAESpec
from frameloom.models.vaes.config import TiledConfig

HEAD_CHANNELS = 32
_KINDS = {"ResBlock": False, "EViTS5_GLU": True}
# Keys of the published dot-list that say nothing new, or have one possible value.
_FIXED = {
    "encoder.downsample_block_type": "Conv",
    "encoder.norm": "rms3d",
    "encoder.is_video": "True",
    "decoder.upsample_block_type": "InterpolateConv",
    "decoder.norm": "rms3d",
    "decoder.act": "silu",
    "decoder.out_norm": "rms3d",
    "decoder.is_video": "True",
}
_READ = ("block_type", "width_list", "depth_list", "temporal_downsample", "temporal_upsample")
_KNOWN = [
    *_FIXED,
    *(f"{half}.{key}" for half in ("encoder", "decoder") for key in _READ),
    *("latent_channels", "time_compression_ratio", "spatial_compression_ratio"),
    *("spatial_tile_size", "temporal_tile_size", "tile_overlap_factor"),
]


@dataclass(frozen=True)
class DCAEConfig(TiledConfig):
    """One entry per stage, from pixels to latents: channels, number of blocks on either side, whether the blocks have
    attention, and whether the step to the next stage also halves the frames. Every step halves height and width.

    `scale` and `shift` hold one number per latent channel, or one for all; the published factor is 1 / scale.
    """

    name: ClassVar[str] = "dc_ae"
    causal: ClassVar[bool] = False

    latent_channels: int = 128
    widths: tuple[int, ...] = (128, 256, 512, 512, 1024, 1024)
    encoder_depths: tuple[int, ...] = (2, 2, 2, 3, 3, 3)
    decoder_depths: tuple[int, ...] = (3, 3, 3, 3, 3, 3)
    attention: tuple[bool, ...] = (False, False, False, True, True, True)
    halves_frames: tuple[bool, ...] = (False, False, False, True, True, False)
    spatial_tiling: bool = False
    temporal_tiling: bool = False
    tile_px: int = 256
    tile_frames: int = 32
    tile_overlap: float = 0.25
    one_by_one: bool = True
    scale: tuple[float, ...] = (1 / 0.493,)
    shift: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        for name in ("widths", "encoder_depths", "decoder_depths", "attention", "halves_frames"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self.spread_scaling(self.latent_channels)
        num_stages = len(self.widths)
        for name in ("encoder_depths", "decoder_depths", "attention", "halves_frames"):
            if len(getattr(self, name)) != num_stages:
                raise ConfigError(
                    f"dc_ae: {name} has {len(getattr(self, name))} entries and widths has {num_stages}; give one per "
                    "stage"
                )
        if self.halves_frames[-1]:
            raise ConfigError("dc_ae: halves_frames of the last stage is true, but no step follows it; make it false")
        self._check_shortcuts()
        self.check_tiles()

    @property
    def strides(self) -> tuple[int, int, int]:
        side = 2 ** (len(self.widths) - 1)
        return 2 ** sum(self.halves_frames), side, side

    @classmethod
    def from_original(cls, dotlist: str, *, scaling_factor: float | None = None, **fields: Any) -> DCAEConfig:
        """Read the published dot-list ("encoder.width_list=[4,8] latent_channels=8 ..."); more fields by name."""
        given = dict(pair.split("=", 1) for pair in dotlist.split())
        for key, value in given.items():
            refuse_unknown(key, _KNOWN, what="key of a DC-AE config")
            if key in _FIXED and value != _FIXED[key]:
                raise ConfigError(f"dc_ae: {key} is {value}; only {_FIXED[key]} is supported")
        for key in ("width_list", "block_type"):
            _expect_equal(given, f"encoder.{key}", f"decoder.{key}")
        _expect_equal(given, "encoder.temporal_downsample", "decoder.temporal_upsample")
        if "tile_overlap_factor" in given:
            fields = {"tile_overlap": float(given["tile_overlap_factor"]), **fields}
        config = cls(
            latent_channels=int(given["latent_channels"]),
            widths=tuple(int(word) for word in _list(given["encoder.width_list"])),
            encoder_depths=tuple(int(word) for word in _list(given["encoder.depth_list"])),
            decoder_depths=tuple(int(word) for word in _list(given["decoder.depth_list"])),
            attention=tuple(_KINDS[word] for word in _list(given["encoder.block_type"])),
            halves_frames=tuple(word == "True" for word in _list(given["encoder.temporal_downsample"])),
            tile_px=int(given.get("spatial_tile_size", 256)),
            tile_frames=int(given.get("temporal_tile_size", 32)),
            scale=(1 / scaling_factor if scaling_factor else 1.0,),
            **fields,
        )
        for key, compression in (("time", config.strides[0]), ("spatial", config.strides[1])):
            named = int(given.get(f"{key}_compression_ratio", compression))
            if named != compression:
                raise ConfigError(
                    f"dc_ae: {key}_compression_ratio is {named}, but the stages compress by {compression}"
                )
        return config

    def _check_shortcuts(self) -> None:
        """Shortcuts average or repeat channels, so the numbers of channels must divide each other."""
        for stage, (fine, coarse) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            cells = 8 if self.halves_frames[stage] else 4
            # With a single frame the step of a temporal stage is a spatial one.
            for count in {cells, 4}:
                if count * fine % coarse:
                    raise ConfigError(
                        f"dc_ae: {count} cells of {fine} channels cannot be averaged to {coarse} channels; choose "
                        f"widths where {count} times stage {stage} is a multiple of stage {stage + 1}"
                    )
        if self.widths[-1] % self.latent_channels:
            raise ConfigError(
                f"dc_ae: the last width {self.widths[-1]} is no multiple of {self.latent_channels} latents"
            )
        for width, attention in zip(self.widths, self.attention, strict=True):
            if attention and width % HEAD_CHANNELS:
                raise ConfigError(f"dc_ae: a stage with attention has {width} channels; choose multiples of 32")


def _list(text: str) -> list[str]:
    return re.findall(r"[^\[\],\s]+", text)


def _expect_equal(given: dict[str, str], one: str, other: str) -> None:
    if given[one] != given[other]:
        raise ConfigError(f"dc_ae: {one} is {given[one]} and {other} is {given[other]}; both sides must be alike")


SIZES: dict[str, DCAEConfig] = {
    "tiny": DCAEConfig(
        latent_channels=32,
        widths=(8, 16, 16, 32, 32, 32),
        encoder_depths=(1, 1, 1, 1, 1, 1),
        decoder_depths=(1, 1, 1, 1, 1, 1),
        one_by_one=False,
        scale=(1.0,),
    ),
    "f32t4c128": DCAEConfig(),
}


SPEC = VAESpec(
    name="dc_ae",
    sizes=SIZES,
    build="frameloom.models.vaes.dc_ae.model:DCAE",
    load_original="frameloom.models.vaes.base:load_original",
)
