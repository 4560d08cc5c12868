"""What the configs of all autoencoders share: strides, clip lengths, latent scale, published json; torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.models.layers.tiles import Cuts, Tiles, check_tile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Frames = TypeVar("Frames", int, "NDArray[np.int64]")


@dataclass(frozen=True)
class LengthRule:
    """Frames per latent frame, and latent frames per token, for single numbers and for arrays of them.

    A causal autoencoder encodes the first frame alone, so it takes 1 + n * stride frames, any other n * stride. One
    frame is always legal: it is an image, and a model whose tokens span several latent frames pads it.
    """

    stride: int = 4
    causal: bool = True
    patch: int = 1

    def latents(self, frames: Frames) -> Frames:
        """Latent frames of clips; 0 for none."""
        is_packed_image = (frames == 1) * (not self.causal and self.stride > 1)
        found: Frames = (frames - self.causal) // self.stride + self.causal + is_packed_image
        return found

    def frames(self, latents: Frames) -> Frames:
        """The frames that give so many latent frames; 0 for none."""
        found: Frames = ((latents - self.causal) * self.stride + self.causal) * (latents > 0)
        return found

    def trim(self, frames: Frames, multiple: int = 1) -> Frames:
        """The longest legal length within `frames`, with latent frames a multiple of the patch and of `multiple`.

        Where none is left it is 1, or 0 with a `multiple` above 1, which one frame can't be split by.
        """
        latents = (frames - self.causal) // self.stride + self.causal
        legal = self.frames(latents - latents % math.lcm(self.patch, multiple))
        return legal + (legal < 1) * (frames > 0) * (multiple == 1)

    def legal(self, longest: int, multiple: int = 1) -> list[int]:
        """All lengths from 1 to `longest` that `trim` can give."""
        return [frames for frames in range(1, longest + 1) if self.trim(frames, multiple) == frames]

    def tokens(self, frames: Frames) -> Frames:
        """Tokens in time: latent frames over the patch, rounded up."""
        return -(-self.latents(frames) // self.patch)

    def accepts(self, frames: int) -> bool:
        return frames > 0 and self.trim(frames) == frames

    def describe(self) -> str:
        step = self.stride * self.patch
        if not self.causal:
            return f"1 or a multiple of {step}"
        return f"{step}n+1" if self.patch == 1 else f"1 or {step}n+{step - self.stride + 1}"


class VAEConfig:
    """Base of the architectures. `scale` and `shift` hold one number for each latent channel."""

    name: ClassVar[str]
    """in messages"""
    causal: ClassVar[bool]
    latent_channels: Any  # an int, a field or a property
    scale: tuple[float, ...]
    shift: tuple[float, ...]

    @property
    def strides(self) -> tuple[int, int, int]:
        """Pixels (frames, height, width) per latent cell."""
        raise NotImplementedError

    @property
    def lengths(self) -> LengthRule:
        return LengthRule(self.strides[0], self.causal)

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Cells (frames, height, width) of a clip of this size in pixels."""
        return self.lengths.latents(frames), height // self.strides[1], width // self.strides[2]

    def cuts(self, *, decoding: bool) -> Cuts:
        """The tiles that belong to the model: how a clip is cut before the encoder or the decoder sees it."""
        return Cuts()

    def spread_scaling(self, num_channels: int) -> None:
        """Expand `scale` and `shift` to one number for each latent channel; for `__post_init__`.

        Equal numbers are repeated, whatever their count, so that a width can be overridden without naming them again.
        """
        for name in ("scale", "shift"):
            values: Sequence[float] = getattr(self, name)
            if len(set(values)) == 1:
                values = (values[0],) * num_channels
            elif len(values) != num_channels:
                raise ConfigError(
                    f"{self.name}: {name} has {len(values)} numbers for {num_channels} latent channels; give one for "
                    "each channel, or one for all"
                )
            object.__setattr__(self, name, tuple(float(value) for value in values))

    def check_groups(self, widths: Collection[int], groups: int, advice: str) -> None:
        """ConfigError unless layers of all `widths` can be cut into the groups of a norm."""
        for width in widths:
            if width % groups:
                raise ConfigError(
                    f"{self.name}: a layer of {width} channels cannot be cut into {groups} groups; {advice}"
                )

    def one_scaling(self) -> tuple[float, float]:
        """(scale, shift) for a json that has one of each; ConfigError when the channels differ."""
        if len(set(self.scale)) > 1 or len(set(self.shift)) > 1:
            raise ConfigError(f"{self.name}: the published config has one scale and one shift for all channels")
        return self.scale[0], self.shift[0]

    @classmethod
    def read_fields(
        cls, values: Mapping[str, Any], names: Mapping[str, str], fixed: Mapping[str, Any], also: Collection[str] = ()
    ) -> dict[str, Any]:
        """Fields from a published json, by `names` from its keys to ours.

        ConfigError for keys that are neither there nor in `fixed` or `also`, and for another value than a `fixed` one.
        """
        fields: dict[str, Any] = {}
        for key, value in values.items():
            refuse_unknown(key, [*names, *fixed, *also], what=f"key of a {cls.name} config")
            if key in fixed and to_json(value) != fixed[key]:
                raise ConfigError(f"{cls.name}: {key} is {value!r}; only {fixed[key]!r} is supported")
            if key in names:
                fields[names[key]] = value
        return fields


class TiledConfig(VAEConfig):
    """With tiles of a published program. They overlap by `tile_overlap` of their size; a clip is cut in space when a
    side is longer than `tile_px`, and in time when it has more than `tile_frames` frames. `one_by_one` runs the clips
    of a batch one after the other."""

    spatial_tiling: bool
    temporal_tiling: bool
    tile_px: int
    tile_frames: int
    tile_overlap: float
    one_by_one: bool

    def cuts(self, *, decoding: bool) -> Cuts:
        frames, side = (
            Tiles.overlapping(size, self.tile_overlap, compression=compression, decoding=decoding)
            for size, compression in ((self.tile_frames, self.strides[0]), (self.tile_px, self.strides[1]))
        )
        return Cuts(
            space=(side, side) if self.spatial_tiling else None,
            time=frames if self.temporal_tiling else None,
            lead=int(self.causal),
            clips=1 if self.one_by_one else None,
        )

    def check_tiles(self) -> None:
        time, side, _ = self.strides
        if self.spatial_tiling:
            check_tile(self.tile_px, self.tile_overlap, compression=side, where=f"{self.name}: tile_px")
        if self.temporal_tiling:
            check_tile(self.tile_frames, self.tile_overlap, compression=time, where=f"{self.name}: tile_frames")


def to_json(value: Any) -> Any:
    """As JSON has it: a list for a tuple."""
    return list(value) if isinstance(value, tuple) else value
