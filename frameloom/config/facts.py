"""What a recipe must know of the models to be checked before any of them is imported.

Names, sizes, strides, frame rules and what can be overridden. The models own these facts; a test holds that both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class VAEFacts:
    """`strides` are pixels (frames, height, width) per latent cell; a causal one takes 1 + n * strides[0] frames."""

    strides: tuple[int, int, int]
    causal: bool
    sizes: tuple[str, ...]
    fields: Mapping[str, type]

    def accepts_frames(self, frames: int) -> bool:
        return frames >= 1 and (frames - self.causal) % self.strides[0] == 0

    @property
    def frame_rule(self) -> str:
        return f"{self.strides[0]}n+1" if self.causal else f"a multiple of {self.strides[0]}"


@dataclass(frozen=True)
class FamilyFacts:
    """`patch` is latent cells (frames, height, width) per token; `fields` are those of its architecture that a recipe
    may override, with their types (tuple: a list)."""

    patch: tuple[int, int, int]
    sizes: tuple[str, ...]
    fields: Mapping[str, type]


@dataclass(frozen=True)
class TextFacts:
    """`max_length` is the longest text, in tokens, that the encoder was trained for."""

    max_length: int


_WFVAE_FIELDS: dict[str, type] = {
    **dict.fromkeys(("latent_channels", "base_channels", "encoder_res_blocks", "decoder_res_blocks"), int),
    **dict.fromkeys(("encoder_flow_channels", "decoder_flow_channels", "connect_res_blocks"), int),
    **dict.fromkeys(("norm", "time_interpolation"), str),
    **dict.fromkeys(("attention", "level1_temporal", "level2_temporal"), bool),
    "dropout": float,
    **dict.fromkeys(("scale", "shift"), tuple),
}
_OPENSORA2_FIELDS: dict[str, type] = {
    **dict.fromkeys(("hidden_size", "num_heads", "depth", "depth_single_blocks", "theta", "patch_size"), int),
    "mlp_ratio": float,
    "axes_dim": tuple,
    "init": str,
    **dict.fromkeys(("qkv_bias", "guidance_embed", "cond_embed", "fused_qkv", "use_liger_rope"), bool),
    **dict.fromkeys(("normalize_vec", "absolute_positions"), bool),
}

VAES = {"wfvae": VAEFacts(strides=(4, 8, 8), causal=True, sizes=("tiny", "8ch", "16ch"), fields=_WFVAE_FIELDS)}
FAMILIES = {
    "opensora2": FamilyFacts(
        patch=(1, 2, 2), sizes=("tiny", "small", "11b", "11b-dcae", "flux-dev"), fields=_OPENSORA2_FIELDS
    )
}
TEXT_ENCODERS = {"minilm": TextFacts(max_length=512)}
