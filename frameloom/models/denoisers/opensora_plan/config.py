"""Architecture of OpenSoraT2V (Open-Sora-Plan 1.3).

Field names are those of the published code, but for `context_in_dim`, which is `caption_channels` there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from frameloom.models.spec import DenoiserConfig, DenoiserSpec, find_too_small

WHERE = "opensora_plan denoiser"
Pattern = Literal["full", "single", "group"]

# Sparse layers lie between these, whatever the depth: the published code has the numbers of its 32 layers in it.
FIRST_SPARSE, LAST_SPARSE = 2, 29


@dataclass(frozen=True)
class OpenSoraPlanConfig(DenoiserConfig):
    """`in_channels` is that of the noisy latent and of the prediction."""

    in_channels: int
    context_in_dim: int
    """width of the text token states"""
    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    """channels of a head; a third each turns with the frame, the row and the column"""
    patch_size: int = 2
    sparse1d: bool = False
    """skiparse attention in layers 2 to 29: a token sees one in `sparse_n` of the others"""
    sparse_n: int = 4
    interpolation_scale_t: float = 1.0
    """positions are divided by these: 2 lets a model see twice the frames, rows or columns it was trained on"""
    interpolation_scale_h: float = 1.0
    interpolation_scale_w: float = 1.0
    norm_eps: float = 1e-6
    """of the norms in the blocks; the last norm has 1e-6, as published"""
    attention_bias: bool = True
    """of the projections to queries, keys and values; that of their result always has one"""
    dropout: float = 0.0
    """in training: of the results of both attentions, and in every MLP behind its activation"""
    inpaint: bool = False
    """also take a masked latent and a mask (images or frames that are given)"""
    vae_scale_factor_t: int = 4
    """pixel frames per latent frame of the autoencoder, which is the number of mask channels"""

    where = WHERE

    @property
    def condition(self) -> Literal["none", "inpaint"]:
        return "inpaint" if self.inpaint else "none"

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def interpolation_scales(self) -> tuple[float, float, float]:
        return self.interpolation_scale_t, self.interpolation_scale_h, self.interpolation_scale_w

    @property
    def cond_channels(self) -> int:
        """Channels beside the noisy latent: the masked latent, then the mask of every pixel frame of a latent frame."""
        return self.in_channels + self.vae_scale_factor_t if self.inpaint else 0

    def pattern(self, layer: int) -> Pattern:
        """Which tokens see each other in a layer."""
        if not self.sparse1d or self.sparse_n == 1 or not FIRST_SPARSE <= layer <= LAST_SPARSE:
            return "full"
        return "group" if layer % 2 else "single"

    def find_problems(self) -> list[str]:
        problems = find_too_small(self, _LEAST, where=WHERE)
        problems += [
            f"{WHERE}: {name} is {getattr(self, name)}; it must be above 0"
            for name in ("interpolation_scale_t", "interpolation_scale_h", "interpolation_scale_w", "norm_eps")
            if getattr(self, name) <= 0
        ]
        if not 0 <= self.dropout <= 1:
            problems.append(f"{WHERE}: dropout is {self.dropout}; it must be from 0 to 1")
        if self.attention_head_dim % 6:
            problems.append(
                f"{WHERE}: attention_head_dim {self.attention_head_dim} must be a multiple of 6: a head has pairs of "
                "channels for frame, row and column"
            )
        return problems


_LEAST = {
    "in_channels": 1,
    "context_in_dim": 1,
    "num_layers": 1,
    "num_attention_heads": 1,
    "attention_head_dim": 6,
    "patch_size": 1,
    "sparse_n": 1,
    "vae_scale_factor_t": 1,
}

_RELEASED = OpenSoraPlanConfig(
    in_channels=8,
    context_in_dim=4096,
    num_layers=32,
    num_attention_heads=24,
    attention_head_dim=96,
    sparse1d=True,
)
_TINY = replace(_RELEASED, context_in_dim=384, num_layers=4, num_attention_heads=4, attention_head_dim=24)

SIZES: dict[str, OpenSoraPlanConfig] = {
    "tiny": _TINY,
    "tiny-inpaint": replace(_TINY, inpaint=True),
    "2b": _RELEASED,
    "2b-inpaint": replace(_RELEASED, inpaint=True),
}

# Lists of repeated blocks, in the order of the forward pass.
BLOCK_LISTS = ("transformer_blocks",)

SPEC = DenoiserSpec(
    name="opensora_plan",
    sizes=SIZES,
    block_kinds=BLOCK_LISTS,
    supported_conditions=("known",),
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
    model="frameloom.models.denoisers.opensora_plan.model:OpenSoraT2V",
    weights="frameloom.models.denoisers.opensora_plan.weights",
)
