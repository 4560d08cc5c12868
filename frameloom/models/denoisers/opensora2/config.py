"""Architecture of the Open-Sora 2.0 MMDiT; field names and defaults are those of the published code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from frameloom.core.errors import ConfigError
from frameloom.models.spec import DenoiserConfig, DenoiserSpec, find_too_small

WHERE = "opensora2 denoiser"


@dataclass(frozen=True)
class MMDiTConfig(DenoiserConfig):
    """`in_channels` is the width of a packed token: latent channels times patch_size squared."""

    in_channels: int
    vec_in_dim: int
    """width of the pooled text vector"""
    context_in_dim: int
    """width of the text token states"""
    hidden_size: int
    num_heads: int
    depth: int
    """double-stream blocks: text and video keep their own weights"""
    depth_single_blocks: int
    axes_dim: tuple[int, ...]
    """rotary channels of a head for (frame, row, column); they add up to hidden_size / num_heads"""
    mlp_ratio: float = 4.0
    theta: int = 10_000
    qkv_bias: bool = True
    """biases of q, k and v in the double blocks; the single blocks always have them"""
    guidance_embed: bool = False
    cond_embed: bool = False
    """take an image or video condition: a mask and masked latents, added to the video tokens"""
    fused_qkv: bool = True
    """one projection for q, k and v; else three"""
    use_liger_rope: bool = False
    """rotary pairs are channels (j, j + half) of a head; else (2j, 2j + 1)"""
    patch_size: int = 2
    normalize_vec: bool = False
    """scale the pooled text vector to unit variance first; not in the published code"""
    absolute_positions: bool = False
    """also add sinusoids of frame, row and column to the video tokens; not in the published code"""
    init: Literal["zero", "default"] = "zero"
    """fresh weights: "zero" starts modulation and the last layer from zeros, "default" is the published code's"""

    where = WHERE

    @property
    def condition(self) -> Literal["none", "inpaint"]:
        return "inpaint" if self.cond_embed else "none"

    @property
    def heads(self) -> int:
        return self.num_heads

    def derive_widths(
        self, *, latent_channels: int, text_width: int, pooled_width: int, overrides: Mapping[str, Any]
    ) -> dict[str, int]:
        patch_size = overrides.get("patch_size", self.patch_size)
        if not isinstance(patch_size, int) or isinstance(patch_size, bool) or patch_size < 1:
            raise ConfigError(f"model.overrides: 'patch_size' is {patch_size!r}; it should be like {self.patch_size}")
        packed = latent_channels * patch_size**2
        return {"in_channels": packed, "context_in_dim": text_width, "vec_in_dim": pooled_width}

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def mlp_hidden_dim(self) -> int:
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def latent_channels(self) -> int:
        return self.in_channels // self.patch_size**2

    @property
    def cond_channels(self) -> int:
        """A packed condition token: the mask's patch, then the latent's."""
        return self.in_channels + self.patch_size**2

    def find_problems(self) -> list[str]:
        problems = find_too_small(self, _LEAST, where=WHERE)
        if problems:
            return problems
        if self.hidden_size % self.num_heads:
            problems.append(f"{WHERE}: hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        elif sum(self.axes_dim) != self.head_dim or len(self.axes_dim) != 3:
            problems.append(
                f"{WHERE}: axes_dim {list(self.axes_dim)} must be three numbers that add up to hidden_size / num_heads "
                f"= {self.head_dim}; set axes_dim to fit"
            )
        if any(not isinstance(dim, int) or dim < 2 or dim % 2 for dim in self.axes_dim):
            problems.append(f"{WHERE}: axes_dim {list(self.axes_dim)} must be even whole numbers")
        if self.in_channels % self.patch_size**2:
            problems.append(f"{WHERE}: in_channels {self.in_channels} is not a multiple of patch_size squared")
        if self.init not in ("zero", "default"):
            problems.append(f"{WHERE}: init is '{self.init}'; choose zero or default")
        return problems


_LEAST = {
    "in_channels": 1,
    "vec_in_dim": 1,
    "context_in_dim": 1,
    "hidden_size": 1,
    "num_heads": 1,
    "depth": 0,
    "depth_single_blocks": 0,
    "mlp_ratio": 0.01,
    "theta": 1,
    "patch_size": 1,
}

_RELEASED = MMDiTConfig(
    in_channels=64,
    vec_in_dim=768,
    context_in_dim=4096,
    hidden_size=3072,
    num_heads=24,
    depth=19,
    depth_single_blocks=38,
    axes_dim=(16, 56, 56),
    cond_embed=True,
    fused_qkv=False,
    use_liger_rope=True,
    init="default",
)

# The small sizes keep the layout of Flux (fused, pairwise rotary): fewer and cheaper operations on a CPU.
_TINY = MMDiTConfig(
    in_channels=32,
    vec_in_dim=384,
    context_in_dim=384,
    hidden_size=128,
    num_heads=4,
    depth=2,
    depth_single_blocks=2,
    axes_dim=(8, 12, 12),
    theta=100,  # rotary waves as long as the few tokens of a small clip
    normalize_vec=True,
    absolute_positions=True,
    init="default",
)

SIZES: dict[str, MMDiTConfig] = {
    "tiny": _TINY,
    "small": replace(_TINY, hidden_size=256, depth=2, depth_single_blocks=5, axes_dim=(16, 24, 24)),
    "11b": _RELEASED,
    "11b-dcae": replace(_RELEASED, in_channels=128, patch_size=1),
    "flux-dev": replace(_RELEASED, cond_embed=False, guidance_embed=True, fused_qkv=True, use_liger_rope=False),
}

# Lists of repeated blocks, in the order of the forward pass.
BLOCK_LISTS = ("double_blocks", "single_blocks")

SPEC = DenoiserSpec(
    name="opensora2",
    sizes=SIZES,
    block_kinds=BLOCK_LISTS,
    supported_conditions=("known",),
    supported_masks="ends",
    # Attention of both kinds of blocks, with fused and with split projections.
    lora_targets=("*_attn.*", "single_blocks.*.[qk]_proj", "single_blocks.*.v_mlp", "single_blocks.*.linear?"),
    model="frameloom.models.denoisers.opensora2.model:MMDiT",
    weights="frameloom.models.denoisers.opensora2.weights",
)
