"""The Python API: `train` a recipe, `load` a model to sample from, `load_recipe`. The commands are shells over it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frameloom.config.loading.recipe import Overrides, Source, load_recipe, load_with_locations, to_words
from frameloom.config.loading.render import render_yaml
from frameloom.config.rules.check import check_files
from frameloom.config.rules.parallel import check_world
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import FrameloomError, PeerFailed, RunError
from frameloom.distributed.ranks import read_ranks

if TYPE_CHECKING:
    import polars as pl
    import torch

    from frameloom.sampling.pipeline import Pipeline

__all__ = ["Run", "load", "load_recipe", "train"]
# Lines of the processes' output that an error message quotes.
_NUM_LAST_LINES = 12


@dataclass(frozen=True)
class Run:
    """A run's folder: what `train` returns, or `Run("runs/my-run")` for one that was trained before."""

    folder: Path

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe, every default filled in."""
        file = Path(self.folder) / "recipe.yaml"
        # Looked for when it is needed: a rank of another host may not see what the first one wrote.
        if not file.is_file():
            raise RunError(
                f"{self.folder}: not a run folder (it has no recipe.yaml); name the folder that train() gave"
            )
        return load_recipe(file)

    @property
    def metrics(self) -> pl.DataFrame:
        """One row per logged step and a column per value (`train/loss`, `validation/loss`, ...); null: not logged."""
        import polars as pl

        path = Path(self.folder) / "metrics.jsonl"
        if not path.is_file() or not path.stat().st_size:
            return pl.DataFrame(schema={"step": pl.Int64})
        rows = pl.read_ndjson(path, infer_schema_length=None)
        # Values of one step are logged in several lines.
        return rows.group_by("step", maintain_order=True).agg(pl.all().drop_nulls().last())

    def load(self, **options: Any) -> Pipeline:
        """The trained model, with the options of `frameloom.load`."""
        return load(self.folder, **options)


def train(
    recipe: Source,
    overrides: Overrides = (),
    *,
    processes: int = 1,
    accept_recipe_change: bool = False,
    accept_data_change: bool = False,
    data_position: int | None = None,
) -> Run:
    """Train a recipe to its end, from its newest checkpoint if there is one.

    recipe      a file, the name of a shipped recipe, a dictionary with the same keys, or what `load_recipe` gave
    overrides   values by dotted key, {"optim.lr": 1e-4}
    processes   of this machine, one for each GPU; under torchrun every process calls `train` and leaves this at 1

    An interrupt (Ctrl-C, the stop button of a notebook) lets the step finish, saves and raises; the same call resumes.
    `accept_recipe_change`, `accept_data_change` and `data_position` are the flags of `frameloom train`.
    """
    ranks = read_ranks()
    try:
        resolved, locations = load_with_locations(recipe, overrides)
        check_files(resolved, locations=locations)
        check_world(resolved, ranks.num_ranks if ranks.num_ranks > 1 else processes)
    except FrameloomError as error:
        if ranks.local_rank == 0:
            raise
        # All processes of a host find the same mistakes; one of them reports them.
        raise PeerFailed(error.exit_code) from error
    if processes > 1 and ranks.num_ranks == 1:
        _start_processes(resolved, processes, accept_recipe_change, accept_data_change, data_position)
        return Run(Path(resolved.run.folder) / resolved.name)
    from frameloom.training.run.resuming import ResumeChoices
    from frameloom.training.train import train as run_training

    return Run(run_training(resolved, ResumeChoices(accept_recipe_change, accept_data_change, data_position)))


def _start_processes(
    recipe: Recipe, processes: int, accept_recipe_change: bool, accept_data_change: bool, data_position: int | None
) -> None:
    """Run `frameloom train` under torchrun and show its messages; RunError with the last of them if it fails."""
    from frameloom.training.launch import Job, single_command

    options = ["--accept-recipe-change"] * accept_recipe_change + ["--accept-data-change"] * accept_data_change
    options += [] if data_position is None else ["--data-position", str(data_position)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(render_yaml(recipe), encoding="utf-8")
        command = single_command(Job(str(file), options, processes))
        last: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        # In a session of their own, so that one Ctrl-C of a terminal reaches them once, from here.
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as started:
            assert started.stdout is not None
            while True:
                try:
                    for line in started.stdout:
                        last.append(line)
                        sys.stderr.write(line)
                    break
                except KeyboardInterrupt:  # they save and end; their last messages are still to come
                    started.send_signal(signal.SIGINT)
        if started.returncode:
            said = "".join(last).rstrip()
            raise RunError(f"the {processes} processes ended with exit code {started.returncode}:\n{said}")


def load(
    path: str | Path,
    overrides: Overrides = (),
    *,
    step: int | None = None,
    family: str | None = None,
    recipe: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
) -> Pipeline:
    """A model, ready to sample: `load("runs/my-run").sample("a red circle", seed=1).save("circle.mp4")`.

    path        a run folder, an export, a recipe with weights, or published weights: a diffusers folder or a file
    overrides   values by dotted key, {"sample.guidance": 6}
    step        the checkpoint of a run; None: the newest
    family      of published weights that do not name it, or else the `recipe` that describes them
    dtype       of the denoiser: "fp32", "bf16", "fp16" or torch's
    """
    from frameloom.sampling.load import load_model

    return load_model(path, to_words(overrides), step=step, family=family, recipe=recipe, device=device, dtype=dtype)
