"""How well a run follows held-out prompts of Moving Shapes: sampled, then measured from the pixels."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frameloom.core.progress import ProgressBar
from frameloom.core.random import numpy_stream
from frameloom.data.media import write_image
from frameloom.data.shapes import heldout_prompts, parse_caption, render_centred
from frameloom.data.shapes_score import ScoreReport, score_prompts
from frameloom.generate.pipeline import Request, Result, Sampler, generate


@dataclass(frozen=True)
class ScoredRun:
    """`first_frame_db` is the median likeness (PSNR) of first frames to the ones that were given."""

    results: list[Result]
    report: ScoreReport
    first_frame_db: float | None = None

    def to_json(self) -> dict[str, Any]:
        report = self.report
        return {
            "accuracy": dict(report.accuracy),
            "chance": dict(report.chance),
            "all_right": report.all_right,
            "count": report.count,
            **({} if self.first_frame_db is None else {"first_frame_db": self.first_frame_db}),
        }


def score_run(sampler: Sampler, *, num_prompts: int, seed: int, batch_size: int = 24) -> ScoredRun:
    """Sample prompts whose combinations were never trained on, and score them; seeds count up from 0."""
    requests = [Request(prompt, number) for number, prompt in enumerate(heldout_prompts(num_prompts, seed=seed))]
    return _score(_sample(sampler, requests, batch_size))


def score_from_first_frames(sampler: Sampler, *, num_prompts: int, seed: int, batch_size: int = 24) -> ScoredRun:
    """The same with a first frame given, drawn anew for each held-out prompt.

    What the frame shows is then for the model to keep; where it goes, only the prompt says.
    """
    prompts = heldout_prompts(num_prompts, seed=seed)
    frames = [_draw_first_frame(sampler, prompt, seed, number) for number, prompt in enumerate(prompts)]
    with tempfile.TemporaryDirectory() as folder:
        requests = []
        for number, (prompt, frame_HWC) in enumerate(zip(prompts, frames, strict=True)):
            path = Path(folder) / f"{number:04d}.png"
            write_image(path, frame_HWC)
            requests.append(Request(prompt, number, head=path))
        results = _sample(sampler, requests, batch_size)
    likeness = [_psnr_db(result.frames_FHWC[0], frame) for result, frame in zip(results, frames, strict=True)]
    return _score(results, median(likeness))


def is_right(result: Result) -> bool:
    """Whether every attribute that the prompt names is there."""
    return score_prompts([(result.frames_FHWC, result.request.prompt)]).all_right == 1


def _sample(sampler: Sampler, requests: Sequence[Request], batch_size: int) -> list[Result]:
    with ProgressBar("sampling", len(requests) * sampler.settings.steps) as bar:
        return generate(sampler, requests, batch_size=batch_size, on_step=bar.advance)


def _score(results: list[Result], first_frame_db: float | None = None) -> ScoredRun:
    report = score_prompts([(result.frames_FHWC, result.request.prompt) for result in results])
    return ScoredRun(results, report, first_frame_db)


def _draw_first_frame(sampler: Sampler, prompt: str, seed: int, number: int) -> NDArray[np.uint8]:
    attributes, settings = parse_caption(prompt), sampler.settings
    assert attributes is not None
    return render_centred(
        attributes,
        height_px=settings.height,
        width_px=settings.width,
        random=numpy_stream(seed, "shapes-first-frame", number),
    )


def _psnr_db(first_HWC: NDArray[np.uint8], second_HWC: NDArray[np.uint8]) -> float:
    error = float(np.mean((first_HWC.astype(np.float64) - second_HWC) ** 2))
    return float(10 * np.log10(255**2 / max(error, 1e-10)))
