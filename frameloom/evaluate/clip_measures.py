"""The named metrics of a clip alone, with no reference beside it: motion, flicker, consistency, likeness to its prompt.

Shape letters: C channels, F frames, H height, W width, D width of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from frameloom.core.errors import ConfigError, DataError
from frameloom.core.spelling import refuse_unknown
from frameloom.evaluate.frame_network import FrameNetwork, TextFrameNetwork, load_clip, load_frame_network
from frameloom.evaluate.motion import measure_flicker, measure_motion
from frameloom.evaluate.similarity import measure_consistency, measure_text_similarity

# By the name that a person writes: the column of the result.
CLIP_METRICS = {
    "flicker": "flicker",
    "motion": "motion_px",
    "consistency": "consistency",
    "clip": "clip_similarity",
}


@dataclass(frozen=True)
class PromptMetric:
    """A number of a clip (C, F, H, W as uint8) and its prompt that a caller adds, such as the score of Moving Shapes.

    `applies` says of a set of prompts whether the metric can be measured against all of them.
    """

    column: str
    measure: Callable[[Tensor, str], float]
    applies: Callable[[Sequence[str]], bool]


@dataclass(frozen=True)
class ClipMeasures:
    """Numbers of one clip by column; None where a clip has none, as a picture has no motion."""

    names: Sequence[str]
    network: FrameNetwork | None = None
    clip: TextFrameNetwork | None = None
    prompt_metrics: Mapping[str, PromptMetric] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        return [self._column(name) for name in self.names]

    @property
    def needs_prompts(self) -> bool:
        return any(name == "clip" or name in self.prompt_metrics for name in self.names)

    def _column(self, name: str) -> str:
        return self.prompt_metrics[name].column if name in self.prompt_metrics else CLIP_METRICS[name]

    def __call__(
        self, pixels_CFHW: Tensor, prompt: str | None = None, *, features_FD: Tensor | None = None
    ) -> dict[str, float | None]:
        """Of uint8 pixels; `features_FD` are those of `network`, when the caller has them already."""
        return {self._column(name): self._measure(name, pixels_CFHW, prompt, features_FD) for name in self.names}

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
        return self.prompt_metrics[name].measure(pixels_CFHW, prompt)


def build_clip_measures(
    names: Sequence[str] | None,
    *,
    network: Path | None = None,
    clip: Path | None = None,
    device: torch.device | str = "cpu",
    prompt_metrics: Mapping[str, PromptMetric] | None = None,
    prompts: Sequence[str] = (),
) -> ClipMeasures:
    """The metrics called `names`; without names motion, flicker, what the given networks can measure, and those of
    `prompt_metrics` that apply to all `prompts`.
    """
    added = prompt_metrics or {}
    able = {"motion": True, "flicker": True, "consistency": network, "clip": clip}
    able |= {name: bool(prompts) and metric.applies(prompts) for name, metric in added.items()}
    chosen = list(dict.fromkeys(names if names is not None else [name for name, can in able.items() if can]))
    for name in chosen:
        refuse_unknown(name, [*CLIP_METRICS, *added], what="metric")
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
        added,
    )
