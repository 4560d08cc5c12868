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
from frameloom.demo.report import series, write_report
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
        folder = self.folder
        words = ["--run.folder", str(folder), "--data.manifest", str(folder / "data" / "manifest.parquet")]
        if name == self.denoiser_recipe:
            words += ["--vae.weights", str(folder / "vae")]
            words += ["--data.cache.latents", str(folder / "cache" / "latents")]
            words += ["--data.cache.text", str(folder / "cache" / "text")]
        return load_recipe(name, [*words, *self.overrides])


SHORT = DemoPlan()
LONG = DemoPlan(
    folder=Path("runs/demo-long"), vae_recipe="shapes/long-vae", denoiser_recipe="shapes/long", num_clips=6000
)


def run_demo(plan: DemoPlan, say: Callable[[str], None]) -> Path:
    """Run all stages and give the report's path; `say` prints a line for the person who watches."""
    folder = plan.folder
    stages: dict[str, Callable[[], object]] = {
        "making Moving Shapes": lambda: write_shapes(folder / "data", count=plan.num_clips, seed=plan.seed),
        "training the autoencoder": lambda: _train_once(plan.load(plan.vae_recipe), folder / "vae"),
        "encoding clips and captions": lambda: _cache(plan),
        "training the denoiser": lambda: _train_once(plan.load(plan.denoiser_recipe), folder / "denoiser"),
        "sampling held-out prompts": lambda: _sample(plan),
    }
    # Seconds spent in each stage over all starts of the demo.
    times = folder / "times.json"
    seconds: dict[str, float] = json.loads(times.read_text()) if times.is_file() else {}
    for number, (title, stage) in enumerate(stages.items(), 1):
        say(f"[{number}/{len(stages)}] {title}")
        started = time.monotonic()
        try:
            stage()
        finally:
            seconds[title] = seconds.get(title, 0.0) + time.monotonic() - started
            write_json(times, seconds)
    report = folder / "report.html"
    write_report(report, folder, seconds)
    for line in summary(plan):
        say(line)
    return report


def summary(plan: DemoPlan) -> list[str]:
    scores = json.loads((plan.folder / "samples" / "scores.json").read_text())
    psnr = series(read_records(plan.folder / "vae" / "metrics.jsonl"), "validation/psnr_db")[-1][1]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in scores["accuracy"].items())
    return [
        f"autoencoder: {psnr:.1f} dB on held-out clips",
        f"held-out prompts ({scores['count']}): {shares}; all attributes right {scores['all_right']:.0%}",
        f"look at {plan.folder / 'report.html'} and {plan.folder / 'samples' / 'contact-sheet.png'}",
        f'try it: frameloom sample {plan.folder / "denoiser"} --prompt "{heldout_prompts(1, seed=5)[0]}"',
    ]


def _cache(plan: DemoPlan) -> None:
    recipe = plan.load(plan.denoiser_recipe)
    check_files(recipe, skip_caches=True)
    for line in write_caches(recipe):
        _log.debug(line)


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
