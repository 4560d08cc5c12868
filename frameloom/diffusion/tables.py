"""Names of samplers and of kinds of conditioning masks, without torch: `samplers.py` and `conditioning.py` run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

RegionKind = Literal[
    "rectangle", "all", "head", "ends", "moment", "pixels", "blocks", "ellipse", "disc", "scattered frames"
]
FrameKind = Literal["all", "head", "ends", "continuation", "none", "scattered frames"]

# Shares of the kinds as CogVideoX-Fun draws them; "all" is text to video, "head" and "ends" are image to video.
CLIP_SHARES: Mapping[RegionKind, float] = dict(
    zip(get_args(RegionKind), (0.05, 0.2, 0.2, 0.2, 0.05, 0.05, 0.05, 0.1, 0.05, 0.05), strict=True)
)
IMAGE_SHARES: Mapping[RegionKind, float] = {"rectangle": 0.2, "all": 0.8}
# Open-Sora-Plan's names are t2iv, i2v, transition, continuation, clear and random_temporal; its image weights are all
# zero, which it reads as equal shares of "all" and "none".
FRAME_SHARES: Mapping[FrameKind, float] = dict(zip(get_args(FrameKind), (1, 8, 8, 2, 0, 1), strict=True))
IMAGE_FRAME_SHARES: Mapping[FrameKind, float] = {"all": 1, "none": 1}

# Latent frames at the head and at the tail for an autoencoder that is not causal.
END_KINDS: dict[str, tuple[int, int]] = {
    "t2v": (0, 0),
    "i2v_head": (1, 0),
    "i2v_tail": (0, 1),
    "i2v_loop": (1, 1),
    "v2v_head": (8, 0),
    "v2v_tail": (0, 8),
    "v2v_head_easy": (16, 0),
    "v2v_tail_easy": (0, 16),
}
# Those of the published image-to-video stages.
END_SHARES: dict[str, float] = {"t2v": 1, "i2v_head": 5, "i2v_loop": 1, "i2v_tail": 1}

# By the recipe's `known.law`: the kinds of clips, and those of single images.
MASK_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ends": (tuple(END_KINDS), ("t2v",)),
    "frames": (tuple(FRAME_SHARES), tuple(IMAGE_FRAME_SHARES)),
    "regions": (tuple(CLIP_SHARES), tuple(IMAGE_SHARES)),
}

SamplerName = Literal["default", "euler", "euler_ancestral", "ddim", "dpmpp_2m", "unipc", "ddpm", "heun"]

_DDPM: tuple[SamplerName, ...] = ("default", "ddim", "euler", "euler_ancestral", "dpmpp_2m", "unipc", "ddpm")
# Samplers by kind of objective.
SAMPLERS: dict[str, tuple[SamplerName, ...]] = {
    "flow": ("default", "euler", "heun", "dpmpp_2m", "unipc"),
    "v": _DDPM,
    "epsilon": _DDPM,
    "sample": _DDPM,
    "edm": ("default", "euler", "heun"),
}
