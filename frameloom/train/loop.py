"""The training loop: read, step, log, validate, save; stop at a signal and resume to the bit.

`train(recipe)` is the whole run. `build_trainer` is a list of calls, each to the module that owns the work.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.checkpoint.store import (
    Checkpoint,
    apply_retention,
    clear_leftovers,
    load_latest,
    save_checkpoint,
)
from frameloom.config.schema import Recipe
from frameloom.core.errors import CheckpointError, RunError
from frameloom.core.log import get_logger
from frameloom.core.progress import ProgressBar
from frameloom.data.batch import Batch
from frameloom.train.feed import Feed
from frameloom.train.optimizer import load_optimizer_tensors, optimizer_tensors
from frameloom.train.run_folder import RunFolder, versions
from frameloom.train.step import Stepper, StepResult
from frameloom.train.tasks import BuiltTask
from frameloom.train.trackers import Tracker

_log = get_logger(__name__)


class Interrupted(RunError):
    """A signal asked the run to stop; it was saved first."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@dataclass
class Trainer:
    """Holds what it is handed; `run` is the loop."""

    recipe: Recipe
    folder: RunFolder
    built: BuiltTask
    stepper: Stepper
    feed: Feed
    trackers: list[Tracker]
    step: int = 0
    epoch: int = 0
    position: int = 0
    nonfinite: int = 0
    stop_signal: int | None = None
    _clock: float = field(default_factory=time.perf_counter)
    _tokens: int = 0
    _steps: int = 0

    def run(self) -> None:
        """Train to the last step, then export. Every way out leaves a complete checkpoint behind."""
        settings = self.recipe.train
        if self.step == 0:
            self.save()
        title = f"{self.recipe.name} ({self.recipe.task})"
        with ProgressBar(title, settings.steps, done=self.step) as bar:
            for batches, position in self.feed.steps(self.epoch, self.position, settings.accumulate):
                if self.step >= settings.steps:
                    break
                result = self.take_step(batches)
                self.epoch, self.position = position
                bar.advance(note=self.note(result))
                self.after_step(result)
        self.export()

    def take_step(self, batches: list[Batch]) -> StepResult:
        result = self.stepper.step(self.step + 1, batches)
        self.step += 1
        self._steps += 1
        self._tokens += sum(self.built.task.count_tokens(batch) for batch in batches)
        if result.is_spike:
            text = (
                "step %d: gradient norm %.3g is far above the usual, bucket %s; weights unchanged, going on (%d so far)"
            )
            _log.warning(text, self.step, result.values["grad_norm"], batches[0].bucket.name, result.values["spikes"])
        if result.is_finite:
            self.nonfinite = 0
        else:
            self.refuse(batches, result)
        return result

    def refuse(self, batches: list[Batch], result: StepResult) -> None:
        """A loss or gradient that is not finite: weights are unchanged; stop, or go on with the next batch."""
        self.nonfinite += 1
        rows = [int(row) for batch in batches for row in batch.rows]
        message = (
            f"step {self.step}: the loss ({result.values['loss']}) or the gradient norm ({result.values['grad_norm']}) "
            f"is not finite, bucket {batches[0].bucket.name}, manifest rows {rows[:8]}; weights unchanged"
        )
        if self.recipe.train.on_nonfinite == "stop" or self.nonfinite >= self.recipe.train.nonfinite_limit:
            raise RunError(f"{message}. {self.nonfinite} in a row: lower optim.lr or look at these clips")
        _log.warning("%s, going on", message)

    def after_step(self, result: StepResult) -> None:
        settings, is_last = self.recipe.train, self.step == self.recipe.train.steps
        if self.step % settings.log_every == 0 or is_last or result.is_spike or not result.is_finite:
            self.log({**result.values, "epoch": self.epoch, **self.rates()})
        validation = self.recipe.validation
        if validation is not None and (self.step % validation.every == 0 or is_last):
            self.log(self.validate(), mark="validation")
        if self.step % settings.save_every == 0 or is_last or self.stop_signal:
            self.save()
        if self.stop_signal and not is_last:
            name = signal.Signals(self.stop_signal).name
            raise Interrupted(f"{name}: saved step {self.step}; start the same command to go on", self.stop_signal)

    def rates(self) -> dict[str, float]:
        """Steps and tokens per second since the last call."""
        now = time.perf_counter()
        elapsed = max(now - self._clock, 1e-9)
        rates = {"steps_per_s": self._steps / elapsed, "tokens_per_s": self._tokens / elapsed}
        self._clock, self._steps, self._tokens = now, 0, 0
        return rates

    def note(self, result: StepResult) -> str:
        elapsed = max(time.perf_counter() - self._clock, 1e-9)
        return f"loss {result.values['loss']:.4g}  {self._tokens / elapsed:,.0f} tokens/s"

    def log(self, values: dict[str, float], mark: str = "train") -> None:
        for tracker in self.trackers:
            tracker.log(self.step, {f"{mark}/{name}": value for name, value in values.items()})

    def validate(self) -> dict[str, float]:
        model = self.built.task.model
        model.eval()
        try:
            if self.stepper.ema is None:
                return self.built.task.validate(self.feed.validation_batches())
            with self.stepper.ema.applied(model):
                return self.built.task.validate(self.feed.validation_batches())
        finally:
            model.train()

    def save(self) -> None:
        save_checkpoint(self.folder.checkpoints, self.snapshot())
        apply_retention(self.folder.checkpoints, self.recipe.train.keep)

    def snapshot(self) -> Checkpoint:
        names = [name for name, parameter in self.built.task.model.named_parameters() if parameter.requires_grad]
        adapters = self.built.adapters
        tensors = {
            "model": dict(self.built.task.model.state_dict()) if adapters is None else adapters.tensors(),
            "optimizer": optimizer_tensors(self.stepper.optimizer, names),
            **self.built.extra,
        }
        if self.stepper.ema is not None:
            tensors["ema"] = self.stepper.ema.state_dict()
        state = {
            "epoch": self.epoch,
            "position": self.position,
            "nonfinite": self.nonfinite,
            "spikes": self.stepper.guard.state() if self.stepper.guard else None,
            "manifest": self.feed.manifest.fingerprint,
            "architecture": dataclasses.asdict(self.built.config),
            "versions": versions(),
            **({} if adapters is None else {"lora": adapters.state()}),
        }
        return Checkpoint(self.step, tensors, state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint; refuse one that was made on other data or for another model."""
        if checkpoint.state["manifest"] != self.feed.manifest.fingerprint:
            raise CheckpointError(
                f"{self.folder.path}: the manifest has changed since step {checkpoint.step}, so the order of the clips "
                "would differ; restore the manifest, or start a new run with --name"
            )
        if ("ema" in checkpoint.tensors) != (self.stepper.ema is not None):
            raise CheckpointError(
                f"{self.folder.path}: train.ema was switched since step {checkpoint.step}; switch it back"
            )
        self.restore_weights(checkpoint)
        model = self.built.task.model
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        load_optimizer_tensors(self.stepper.optimizer, names, checkpoint.tensors["optimizer"])
        if self.stepper.ema is not None:
            self.stepper.ema.load_state_dict(checkpoint.tensors["ema"])
        self.step = checkpoint.step
        self.epoch, self.position = checkpoint.state["epoch"], checkpoint.state["position"]
        self.nonfinite = checkpoint.state["nonfinite"]
        if self.stepper.guard is not None and checkpoint.state.get("spikes"):
            self.stepper.guard.load(checkpoint.state["spikes"])

    def restore_weights(self, checkpoint: Checkpoint) -> None:
        """The whole model, or adapters after a look at what they stand beside."""
        where, adapters = f"{self.folder.path}: step {checkpoint.step}", self.built.adapters
        if ("lora" in checkpoint.state) != (adapters is not None):
            raise CheckpointError(
                f"{where} was trained {'with' if adapters is None else 'without'} lora, the recipe has it switched; "
                "switch it back, or start a new run with --name"
            )
        if adapters is not None:
            adapters.load(checkpoint.tensors["model"], checkpoint.state["lora"], where=where)
            return
        try:
            self.built.task.model.load_state_dict(checkpoint.tensors["model"])
        except RuntimeError as error:
            raise CheckpointError(
                f"{where} does not fit the recipe's model ({error}); "
                "restore the model section or start a new run with --name"
            ) from error

    def export(self) -> None:
        """Write `export/`: the averaged weights where there are any, as a model folder or as LoRA files."""
        adapters = self.built.adapters
        tensors = dict(self.built.task.model.state_dict()) if adapters is None else adapters.tensors()
        if self.stepper.ema is not None:
            tensors.update(self.stepper.ema.state_dict())
        if adapters is not None:
            adapters.export(self.folder.export, tensors)
            return
        config: dict[str, Any] = dataclasses.asdict(self.built.export_config(self.feed.first_batches()))
        write_model_folder(
            self.folder.export, kind=self.built.kind, name=self.built.name, config=config, tensors=tensors
        )


@contextmanager
def stop_on_signals(trainer: Trainer) -> Iterator[None]:
    """The first SIGINT or SIGTERM lets the step finish and saves; a second one ends the process at once."""

    def request_stop(number: int, frame: FrameType | None) -> None:
        trainer.stop_signal = number
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(recipe: Recipe) -> Path:
    """Run a recipe to its end, from the newest complete checkpoint if there is one; gives the run's folder."""
    from frameloom.train.build import build_trainer

    folder = RunFolder(Path(recipe.run.folder) / recipe.name)
    with folder.locked():
        if recipe.run.resume == "never" and folder.is_used:
            raise RunError(f"{folder.path}: holds a run already and run.resume is never; choose another --name")
        clear_leftovers(folder.checkpoints)
        checkpoint = load_latest(folder.checkpoints, set_aside=True)
        if checkpoint is not None:
            folder.trim_metrics(checkpoint.step)
            _log.info("%s: resuming from step %d", folder.path, checkpoint.step)
        elif folder.has_trained:
            raise CheckpointError(
                f"{folder.path}: has trained before but holds no complete checkpoint; restore one into "
                f"{folder.checkpoints}, or move the folder away to start again"
            )
        trainer = build_trainer(recipe, folder, first_step=checkpoint.step + 1 if checkpoint else 1)
        try:
            if checkpoint is not None:
                trainer.restore(checkpoint)
            folder.write_recipe(recipe)
            with stop_on_signals(trainer):
                trainer.run()
        finally:
            for tracker in trainer.trackers:
                tracker.close()
    return folder.path
