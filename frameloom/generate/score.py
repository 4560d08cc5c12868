"""How well a run follows held-out prompts of Moving Shapes: sampled, then measured from the pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frameloom.core.progress import ProgressBar
from frameloom.data.shapes import heldout_prompts
from frameloom.data.shapes_score import ScoreReport, score_prompts
from frameloom.generate.pipeline import Request, Result, Sampler, generate


@dataclass(frozen=True)
class ScoredRun:
    results: list[Result]
    report: ScoreReport

    def to_json(self) -> dict[str, Any]:
        report = self.report
        return {
            "accuracy": dict(report.accuracy),
            "chance": dict(report.chance),
            "all_right": report.all_right,
            "count": report.count,
        }


def score_run(sampler: Sampler, *, num_prompts: int, seed: int, batch_size: int = 24) -> ScoredRun:
    """Sample prompts whose combinations were never trained on, and score them; seeds count up from 0."""
    requests = [Request(prompt, number) for number, prompt in enumerate(heldout_prompts(num_prompts, seed=seed))]
    with ProgressBar("sampling", len(requests) * sampler.settings.steps) as bar:
        results = generate(sampler, requests, batch_size=batch_size, on_step=bar.advance)
    return ScoredRun(results, score_prompts([(result.frames_FHWC, result.request.prompt) for result in results]))


def is_right(result: Result) -> bool:
    """Whether every attribute that the prompt names is there."""
    return score_prompts([(result.frames_FHWC, result.request.prompt)]).all_right == 1
