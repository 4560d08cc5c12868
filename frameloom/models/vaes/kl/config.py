"""Architecture of Stable Diffusion's image autoencoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from frameloom.core.errors import ConfigError
from frameloom.models.spec import VAESpec
from frameloom.models.vaes.config import VAEConfig

NUM_LEVELS = 4


@dataclass(frozen=True)
class KLConfig(VAEConfig):
    """Four levels, so that height and width shrink by 8. `scale` and `shift` hold one number per latent channel, or
    one for all."""

    name: ClassVar[str] = "kl autoencoder"
    causal: ClassVar[bool] = False
    strides: ClassVar[tuple[int, int, int]] = (1, 2 ** (NUM_LEVELS - 1), 2 ** (NUM_LEVELS - 1))

    latent_channels: int = 4
    base_channels: int = 128
    channel_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    norm_groups: int = 32
    scale: tuple[float, ...] = (0.13025,)
    shift: tuple[float, ...] = (0.0,)
    force_upcast: bool = True
    """run outside of autocast, and refuse float16 weights: activations of the published ones overflow there"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "channel_mult", tuple(self.channel_mult))
        self.spread_scaling(self.latent_channels)
        if len(self.channel_mult) != NUM_LEVELS:
            raise ConfigError(
                f"kl autoencoder: channel_mult {list(self.channel_mult)} must have {NUM_LEVELS} numbers: height and "
                "width shrink by 8"
            )
        counts = (self.latent_channels, self.base_channels, self.num_res_blocks, self.norm_groups, *self.channel_mult)
        if min(counts) < 1:
            raise ConfigError(f"kl autoencoder: channels, blocks and groups must be at least 1; found {min(counts)}")
        self.check_groups(self.widths, self.norm_groups, "choose norm_groups that divides all widths")

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.base_channels * factor for factor in self.channel_mult)


_PLAYGROUND_MEAN = (-1.6574, 1.886, -1.383, 2.5155)
_PLAYGROUND_STD = (8.4927, 5.9022, 6.5498, 5.2299)

SIZES: dict[str, KLConfig] = {
    "tiny": KLConfig(base_channels=16, channel_mult=(1, 2, 2, 2), num_res_blocks=1, norm_groups=4, force_upcast=False),
    "sdxl": KLConfig(),
    # The latents of Playground 2.5 have a mean and a standard deviation for each channel, and half of unit size.
    "playground-2.5": KLConfig(scale=tuple(0.5 / std for std in _PLAYGROUND_STD), shift=_PLAYGROUND_MEAN),
}


SPEC = VAESpec(
    name="kl",
    sizes=SIZES,
    build="frameloom.models.vaes.kl.model:KLVAE",
    load_original="frameloom.models.vaes.kl.weights:load_original",
)
