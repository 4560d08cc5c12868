"""The named metrics of a clip alone, with no reference beside it: motion, flicker, consistency, likeness to its prompt.

Shape letters: C channels, F frames, H height, W width, D width of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError, DataError
from frameloom.core.spelling import refuse_unknown
from frameloom.data.shapes import parse_caption
from frameloom.data.shapes_score import score_prompts
from frameloom.evaluate.frame_network import FrameNetwork, TextFrameNetwork, load_clip, load_frame_network
from frameloom.evaluate.motion import measure_flicker, measure_motion
from frameloom.evaluate.similarity import measure_consistency, measure_text_similarity

# By the name that a person writes: the column of the result.
CLIP_METRICS = {
    "flicker": "flicker",
    "motion": "motion_px",
    "consistency": "consistency",
    "clip": "clip_similarity",
    "shapes": "shapes_right",
}
OF_PROMPTS = ("clip", "shapes")


@dataclass(frozen=True)
class ClipMeasures:
    """Numbers of one clip by column; None where a clip has none, as a picture has no motion."""

    names: Sequence[str]
    network: FrameNetwork | None = None
    clip: TextFrameNetwork | None = None

    @property
    def columns(self) -> list[str]:
        return [CLIP_METRICS[name] for name in self.names]

    @property
    def needs_prompts(self) -> bool:
        return any(name in OF_PROMPTS for name in self.names)

    def __call__(
        self, pixels_CFHW: Tensor, prompt: str | None = None, *, features_FD: Tensor | None = None
    ) -> dict[str, float | None]:
        """Of uint8 pixels; `features_FD` are those of `network`, when the caller has them already."""
        return {CLIP_METRICS[name]: self._measure(name, pixels_CFHW, prompt, features_FD) for name in self.names}

    def _measure(self, name: str, pixels_CFHW: Tensor, prompt: str | None, features_FD: Tensor | None) -> float | None:
        if name == "flicker":
            return measure_flicker(pixels_CFHW)
        if name == "motion":
            return measure_motion(pixels_CFHW)
        if name == "consistency":
            assert self.network is not None
            return measure_consistency(self.network.encode_frames(pixels_CFHW) if features_FD is None else features_FD)
        if prompt is None:
            raise DataError(f"no prompt is known, which {name} is measured against; give prompts with --prompts FILE")
        if name == "clip":
            assert self.clip is not None
            return measure_text_similarity(self.clip.encode_frames(pixels_CFHW), self.clip.encode_text(prompt))
        return score_prompts([(pixels_CFHW.permute(1, 2, 3, 0).contiguous().numpy(), prompt)]).all_right


def build_clip_measures(
    names: Sequence[str] | None,
    *,
    network: Path | None = None,
    clip: Path | None = None,
    device: torch.device | str = "cpu",
    with_shapes: bool = False,
) -> ClipMeasures:
    """The metrics called `names`; without names motion, flicker, what the given networks can tell, and `with_shapes`
    whether the clips show what prompts of Moving Shapes say.
    """
    able = {"motion": True, "flicker": True, "consistency": network, "clip": clip, "shapes": with_shapes}
    chosen = list(dict.fromkeys(names if names is not None else [name for name, can in able.items() if can]))
    for name in chosen:
        refuse_unknown(name, CLIP_METRICS, what="metric")
    needed = {
        "consistency": (network, "a vision network such as DINOv2, as transformers saves it: --network FOLDER"),
        "clip": (clip, "both halves of a CLIP, as transformers saves it: --clip FOLDER"),
    }
    problems = [f"{name} needs {what}" for name, (folder, what) in needed.items() if name in chosen and folder is None]
    if problems:
        raise ConfigError(problems)
    return ClipMeasures(
        chosen,
        None if network is None else load_frame_network(network, device),
        load_clip(clip, device) if clip is not None and "clip" in chosen else None,
    )


def are_shapes(prompts: Sequence[str]) -> bool:
    """Whether all prompts are ones of Moving Shapes, which can be scored from pixels."""
    return bool(prompts) and all(parse_caption(prompt) is not None for prompt in prompts)
