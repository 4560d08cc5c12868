"""Architecture of a WFVAE, and the published json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.models.spec import VAESpec
from frameloom.models.vaes.config import VAEConfig, to_json

NormKind = Literal["layernorm", "groupnorm"]
Interpolation = Literal["trilinear", "nearest"]

# The published spelling of `downsample` is wrong for the blocks and right for the wavelets.
_PLAIN = {
    "latent_dim": "latent_channels",
    "base_channels": "base_channels",
    "encoder_num_resblocks": "encoder_res_blocks",
    "decoder_num_resblocks": "decoder_res_blocks",
    "encoder_energy_flow_hidden_size": "encoder_flow_channels",
    "decoder_energy_flow_hidden_size": "decoder_flow_channels",
    "connect_res_layer_num": "connect_res_blocks",
    "norm_type": "norm",
    "t_interpolation": "time_interpolation",
    "use_attention": "attention",
    "dropout": "dropout",
    "scale": "scale",
    "shift": "shift",
}
_DEFAULTS: dict[str, Any] = {"connect_res_layer_num": 1, "norm_type": "groupnorm", "t_interpolation": "nearest"}
# Each option of a level has a value without and one with the halving of frames.
_LEVEL_OPTIONS = {
    "dowmsample_block": ("Downsample", "Spatial2xTime2x3DDownsample"),
    "downsample_wavelet": ("HaarWaveletTransform2D", "HaarWaveletTransform3D"),
    "upsample_block": ("Upsample", "Spatial2xTime2x3DUpsample"),
    "upsample_wavelet": ("InverseHaarWaveletTransform2D", "InverseHaarWaveletTransform3D"),
}


@dataclass(frozen=True)
class WFVAEConfig(VAEConfig):
    """Widths follow from `base_channels`: 1x, 2x and 4x at the three resolutions.

    The flow channels carry the wavelet coefficients past the main path. `level1_temporal` and
    `level2_temporal` say which of the two inner levels also halve the frames; the pixel transform always
    does. `scale` and `shift` hold one number per latent channel, or one for all.
    """

    name: ClassVar[str] = "WFVAE"
    causal: ClassVar[bool] = True

    latent_channels: int = 8
    base_channels: int = 128
    encoder_res_blocks: int = 2
    decoder_res_blocks: int = 2
    encoder_flow_channels: int = 64
    decoder_flow_channels: int = 128
    connect_res_blocks: int = 2
    norm: NormKind = "layernorm"
    time_interpolation: Interpolation = "trilinear"
    attention: bool = True
    dropout: float = 0.0
    """a field of the published json; only 0 is built"""
    level1_temporal: bool = False
    level2_temporal: bool = True
    scale: tuple[float, ...] = (0.18215,)
    shift: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        self.spread_scaling(self.latent_channels)
        if self.dropout:
            raise ConfigError(
                f"WFVAE: dropout is {self.dropout}; a run that resumes and blocks that are recomputed could not repeat "
                "its random draws; set it to 0 (dropout has no weights, so checkpoints fit either way)"
            )
        refuse_unknown(self.norm, ("layernorm", "groupnorm"), what="WFVAE norm")
        refuse_unknown(self.time_interpolation, ("trilinear", "nearest"), what="WFVAE time_interpolation")
        if self.norm == "groupnorm":
            base, flow = self.base_channels, self.decoder_flow_channels
            widths = (base, 2 * base + self.encoder_flow_channels, flow, 4 * base + flow)
            self.check_groups(widths, 32, "choose channel counts that are multiples of 32, or norm layernorm")

    @property
    def strides(self) -> tuple[int, int, int]:
        return 2 ** (1 + self.level1_temporal + self.level2_temporal), 8, 8

    @classmethod
    def from_original(cls, values: Mapping[str, Any]) -> WFVAEConfig:
        """Read the published json; what it leaves out takes the published class's defaults, not ours."""
        given = {key.replace("downsample_block", "dowmsample_block"): value for key, value in values.items()}
        levels = [_read_level(given, level) for level in (1, 2)]
        plain = {**_DEFAULTS, **{key: given[key] for key in given if not key.startswith(("_", "l1_", "l2_"))}}
        for key in plain:
            refuse_unknown(key, _PLAIN, what="key of a WFVAE config")
        fields = {_PLAIN[key]: value for key, value in plain.items()}
        return cls(**fields, level1_temporal=levels[0], level2_temporal=levels[1])

    def to_original(self) -> dict[str, Any]:
        """The published json of this architecture."""
        values: dict[str, Any] = {"_class_name": "WFVAEModel"}
        for key, name in _PLAIN.items():
            values[key] = to_json(getattr(self, name))
        for level, temporal in ((1, self.level1_temporal), (2, self.level2_temporal)):
            values |= {f"l{level}_{key}": names[temporal] for key, names in _LEVEL_OPTIONS.items()}
        return values


def _read_level(values: Mapping[str, Any], level: int) -> bool:
    """Whether a level halves the frames; its four options must agree, and so be all 2-D or all 3-D."""
    answers = {}
    for option, names in _LEVEL_OPTIONS.items():
        key = f"l{level}_{option}"
        name = values.get(key, names[level - 1])
        refuse_unknown(name, names, what=f"WFVAE {key}")
        answers[key] = names.index(name) == 1
    unknown = [key for key in values if key.startswith(f"l{level}_") and key not in answers]
    for key in unknown:
        refuse_unknown(key, answers, what="key of a WFVAE config")
    if len(set(answers.values())) > 1:
        mixed = ", ".join(f"{key} is {'3-D' if temporal else '2-D'}" for key, temporal in answers.items())
        raise ConfigError(f"WFVAE level {level}: {mixed}; make all four 2-D or all four 3-D")
    return answers.popitem()[1]


SIZES: dict[str, WFVAEConfig] = {
    "tiny": WFVAEConfig(
        latent_channels=10,
        base_channels=8,
        encoder_res_blocks=1,
        decoder_res_blocks=1,
        encoder_flow_channels=24,
        decoder_flow_channels=16,
        connect_res_blocks=1,
    ),
    "8ch": WFVAEConfig(),
    "16ch": WFVAEConfig(latent_channels=16),
}


SPEC = VAESpec(
    name="wfvae",
    sizes=SIZES,
    build="frameloom.models.vaes.wfvae.model:WFVAE",
    load_original="frameloom.models.vaes.wfvae.weights:load_original",
    start="frameloom.models.vaes.wfvae.weights:start_as_lowpass",
)
