"""What a recipe must know of the models to be checked before any of them is imported.

Names, sizes, strides and frame rules only. The models own these facts; a test holds that both agree.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VAEFacts:
    """`strides` are pixels (frames, height, width) per latent cell; a causal one takes 1 + n * strides[0] frames."""

    strides: tuple[int, int, int]
    causal: bool
    sizes: tuple[str, ...]

    def accepts_frames(self, frames: int) -> bool:
        return frames >= 1 and (frames - self.causal) % self.strides[0] == 0

    @property
    def frame_rule(self) -> str:
        return f"{self.strides[0]}n+1" if self.causal else f"a multiple of {self.strides[0]}"


@dataclass(frozen=True)
class FamilyFacts:
    """`patch` is latent cells (frames, height, width) per token."""

    patch: tuple[int, int, int]
    sizes: tuple[str, ...]


@dataclass(frozen=True)
class TextFacts:
    """`max_length` is the longest text, in tokens, that the encoder was trained for."""

    max_length: int


VAES = {"wfvae": VAEFacts(strides=(4, 8, 8), causal=True, sizes=("tiny", "8ch", "16ch"))}
FAMILIES = {"opensora2": FamilyFacts(patch=(1, 2, 2), sizes=("tiny", "small", "11b", "11b-dcae", "flux-dev"))}
TEXT_ENCODERS = {"minilm": TextFacts(max_length=512)}
