"""Architecture of the SDXL UNet; field names and values are those of the published code."""

from __future__ import annotations

from dataclasses import dataclass, replace

from frameloom.models.spec import DenoiserConfig, DenoiserSpec

WHERE = "sdxl denoiser"


@dataclass(frozen=True)
class SDXLConfig(DenoiserConfig):
    """A UNet of `len(channel_mult)` levels; each one below the first has half the height and width."""

    in_channels: int
    """latent channels, in and out"""
    context_in_dim: int
    """width of the text token states: of all text encoders together"""
    vec_in_dim: int
    """width of the pooled text vector; 0 without one"""
    model_channels: int
    channel_mult: tuple[int, ...]
    """width of each level, in units of model_channels"""
    transformer_depth: tuple[int, ...]
    """transformer blocks at each level that has attention; the last number is also the depth of the middle"""
    attention_resolutions: tuple[int, ...] = (4, 2)
    """levels with attention, as the factor by which they are smaller than the latent"""
    num_res_blocks: int = 2
    num_head_channels: int = 64
    norm_groups: int = 32
    size_embed_dim: int = 256
    """width of the sinusoids of each size condition"""
    aesthetic: bool = False
    """the refiner's conditions: an aesthetic score stands in the place of the target size"""

    where = WHERE

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.model_channels * factor for factor in self.channel_mult)

    @property
    def attention_levels(self) -> tuple[int, ...]:
        return tuple(level for level in range(len(self.channel_mult)) if 2**level in self.attention_resolutions)

    def find_problems(self) -> list[str]:
        numbers = [(name, getattr(self, name)) for name in _POSITIVE]
        numbers += [(name, number) for name in _LISTS for number in getattr(self, name)]
        problems = [
            f"{WHERE}: {name} has {number!r}; it must be a whole number of at least 1"
            for name, number in numbers
            if not isinstance(number, int) or number < 1
        ]
        if problems:
            return problems
        num_levels = len(self.channel_mult)
        if num_levels == 0 or len(self.transformer_depth) != num_levels:
            problems.append(
                f"{WHERE}: transformer_depth {list(self.transformer_depth)} and channel_mult {list(self.channel_mult)} "
                "must have one number for each level"
            )
        factors = [2**level for level in range(num_levels)]
        strange = [factor for factor in self.attention_resolutions if factor not in factors]
        if strange:
            problems.append(f"{WHERE}: attention_resolutions has {strange[0]}; the levels have {factors}")
        for name, divisor in (("norm_groups", self.norm_groups), ("num_head_channels", self.num_head_channels)):
            # Heads are only cut where there is attention: at the chosen levels and in the middle.
            counted = range(num_levels) if name == "norm_groups" else {*self.attention_levels, num_levels - 1}
            wrong = [width for level, width in enumerate(self.widths) if width % divisor and level in counted]
            if wrong:
                problems.append(f"{WHERE}: a level of {wrong[0]} channels is not a multiple of {name} {divisor}")
        for name in ("model_channels", "size_embed_dim"):
            if getattr(self, name) % 2:
                problems.append(f"{WHERE}: {name} {getattr(self, name)} must be even, for pairs of sine and cosine")
        return problems


_POSITIVE = (
    "in_channels",
    "context_in_dim",
    "model_channels",
    "num_res_blocks",
    "num_head_channels",
    "norm_groups",
    "size_embed_dim",
)
_LISTS = ("channel_mult", "transformer_depth", "attention_resolutions")

_BASE = SDXLConfig(
    in_channels=4,
    context_in_dim=2048,
    vec_in_dim=1280,
    model_channels=320,
    channel_mult=(1, 2, 4),
    transformer_depth=(1, 2, 10),  # the first level has no attention, so its number is not used
)

SIZES: dict[str, SDXLConfig] = {
    "tiny": replace(
        _BASE,
        context_in_dim=384,
        vec_in_dim=384,
        model_channels=32,
        channel_mult=(1, 2, 3),
        transformer_depth=(1, 1, 1),
        num_res_blocks=1,
        num_head_channels=32,
        norm_groups=8,
        size_embed_dim=16,
    ),
    "base": _BASE,
    "refiner": replace(
        _BASE,
        context_in_dim=1280,
        model_channels=384,
        channel_mult=(1, 2, 4, 4),
        transformer_depth=(4, 4, 4, 4),
        aesthetic=True,
    ),
}

# Thirds of the UNet, in the order of the forward pass.
STAGES = ("down_blocks", "mid_block", "up_blocks")
# Lists of repeated blocks, wherever they stand in a stage; together they hold nearly all weights. Whole levels are no
# blocks: they pass tuples of skip connections.
BLOCK_LISTS = ("resnets", "transformer_blocks")

SPEC = DenoiserSpec(
    name="sdxl",
    sizes=SIZES,
    block_kinds=BLOCK_LISTS,
    supported_conditions=("sizes", "log_sigma"),
    text_join="concat",
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
    model="frameloom.models.denoisers.sdxl.model:SDXLUNet",
    weights="frameloom.models.denoisers.sdxl.weights",
)
