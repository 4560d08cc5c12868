"""The demo: make Moving Shapes, train an autoencoder and a denoiser on them, sample, score and report.

Every stage leaves files that mark it as done, so an interrupted demo continues where it stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.rules.check import check_files
from frameloom.config.schema.recipe import Recipe
from frameloom.core.files import write_json
from frameloom.core.logging import get_logger
from frameloom.core.text_files import read_records
from frameloom.demo.report import write_report
from frameloom.demo.shapes import heldout_prompts
from frameloom.demo.shapes_score import is_right, score_run
from frameloom.demo.shapes_set import write_shapes
from frameloom.sampling.load import load_model
from frameloom.sampling.outputs import write_samples
from frameloom.training.caching import write_caches
from frameloom.training.train import train

_log = get_logger(__name__)


@dataclass(frozen=True)
class DemoPlan:
    """What the demo runs; the two recipes read and write below `folder`."""

    folder: Path = Path("runs/demo")
    vae_recipe: str = "shapes/demo-vae"
    denoiser_recipe: str = "shapes/demo"
    num_clips: int = 2400
    num_prompts: int = 96
    num_shown: int = 24
    seed: int = 1
    overrides: tuple[str, ...] = ()
    """extra settings for both recipes, as on the command line"""

    def load(self, name: str) -> Recipe:
        return load_recipe(name, [*self._places(name), *self.overrides])

    def _places(self, name: str) -> list[str]:
        folder = self.folder
        places = ["--run.folder", str(folder), "--data.manifest", str(folder / "data" / "manifest.parquet")]
        if name == self.denoiser_recipe:
            places += ["--vae.weights", str(folder / "vae")]
            places += ["--data.cache.latents", str(folder / "cache" / "latents")]
            places += ["--data.cache.text", str(folder / "cache" / "text")]
        return places


SHORT = DemoPlan()
LONG = DemoPlan(
    folder=Path("runs/demo-long"), vae_recipe="shapes/long-vae", denoiser_recipe="shapes/long", num_clips=6000
)


def run_demo(plan: DemoPlan, say: Callable[[str], None]) -> Path:
    """Run all stages and give the report's path; `say` prints a line for the person who watches."""
    stages: list[tuple[str, Callable[[DemoPlan], None]]] = [
        ("making Moving Shapes", _make_clips),
        ("training the autoencoder", _train_vae),
        ("encoding clips and captions", _cache),
        ("training the denoiser", _train_denoiser),
        ("sampling held-out prompts", _sample),
    ]
    times = _Times(plan.folder / "times.json")
    for number, (title, stage) in enumerate(stages, 1):
        say(f"[{number}/{len(stages)}] {title}")
        with times.measure(title):
            stage(plan)
    report = plan.folder / "report.html"
    write_report(report, plan.folder, times.seconds)
    for line in summary(plan):
        say(line)
    return report


def summary(plan: DemoPlan) -> list[str]:
    scores = json.loads((plan.folder / "samples" / "scores.json").read_text())
    psnr = last_value(plan.folder / "vae" / "metrics.jsonl", "validation/psnr_db")
    shares = ", ".join(f"{name} {share:.0%}" for name, share in scores["accuracy"].items())
    return [
        f"autoencoder: {psnr:.1f} dB on held-out clips",
        f"held-out prompts ({scores['count']}): {shares}; all attributes right {scores['all_right']:.0%}",
        f"look at {plan.folder / 'report.html'} and {plan.folder / 'samples' / 'contact-sheet.png'}",
        f'try it: frameloom sample {plan.folder / "denoiser"} --prompt "{heldout_prompts(1, seed=5)[0]}"',
    ]


def last_value(metrics: Path, key: str) -> float:
    """The newest value of a metric in a metrics file."""
    values = [record[key] for record in read_records(metrics) if key in record]
    return float(values[-1])


def _make_clips(plan: DemoPlan) -> None:
    write_shapes(plan.folder / "data", count=plan.num_clips, seed=plan.seed)


def _train_vae(plan: DemoPlan) -> None:
    _train_once(plan.load(plan.vae_recipe), plan.folder / "vae")


def _cache(plan: DemoPlan) -> None:
    recipe = plan.load(plan.denoiser_recipe)
    check_files(recipe, skip_caches=True)
    for line in write_caches(recipe):
        _log.debug(line)


def _train_denoiser(plan: DemoPlan) -> None:
    _train_once(plan.load(plan.denoiser_recipe), plan.folder / "denoiser")


def _train_once(recipe: Recipe, folder: Path) -> None:
    """Train unless the run has exported already: the export is the last thing that a run writes."""
    if not (folder / "export").is_dir():
        check_files(recipe)
        train(recipe)


def _sample(plan: DemoPlan) -> None:
    """Held-out prompts: all are scored, the first few are kept as files; `scores.json` is written last."""
    done = plan.folder / "samples" / "scores.json"
    if done.is_file():
        return
    scored = score_run(load_model(plan.folder / "denoiser"), num_prompts=plan.num_prompts, seed=plan.seed)
    shown = scored.results[: plan.num_shown]
    paths = write_samples(shown, plan.folder / "samples")
    clips = [
        {"file": path.name, "prompt": result.request.prompt, "right": is_right(result)}
        for result, path in zip(shown, paths, strict=True)
    ]
    write_json(done, {**scored.to_json(), "clips": clips})


class _Times:
    """Seconds spent in each stage over all starts of the demo, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}

    def measure(self, title: str) -> _Stopwatch:
        return _Stopwatch(self, title)

    def add(self, title: str, seconds: float) -> None:
        self.seconds[title] = self.seconds.get(title, 0.0) + seconds
        write_json(self._path, self.seconds)


class _Stopwatch:
    def __init__(self, times: _Times, title: str) -> None:
        self._times, self._title = times, title

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._times.add(self._title, time.monotonic() - self._started)
