"""The training loop: read, step, log, validate, save; stop at a signal and resume to the bit."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from frameloom.checkpoint.reader import Checkpoint, step_folder
from frameloom.checkpoint.writer import Saver
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.training import is_due
from frameloom.core.errors import CheckpointError, RunError
from frameloom.core.logging import get_logger
from frameloom.core.progress import ProgressBar
from frameloom.data.loading.batch import Batch
from frameloom.data.media.writing import write_image
from frameloom.data.order.rank_assignment import PlannedStep
from frameloom.training.logging.profiling import StepProfiler
from frameloom.training.logging.trackers import Media, Tracker
from frameloom.training.process_settings import scheduled_garbage
from frameloom.training.run.folder import RunFolder, versions
from frameloom.training.step import Stepper, StepResult
from frameloom.training.task import MODEL, Task

if TYPE_CHECKING:
    # What reads data and what samples is handed in; the loop calls three of their methods.
    from frameloom.training.feed import Feed
    from frameloom.training.logging.samples import TrainingSamples

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
    task: Task
    stepper: Stepper
    feed: Feed
    trackers: list[Tracker]
    saver: Saver
    samples: TrainingSamples | None
    profiler: StepProfiler
    step: int = 0
    epoch: int = 0
    position: int = 0
    nonfinite: int = 0
    _clock: float = field(default_factory=time.perf_counter)
    _tokens: int = 0
    _steps: int = 0

    def run(self) -> None:
        """Train to the last step, then export. Every way out leaves a complete checkpoint behind."""
        settings, context = self.recipe.train, self.stepper.parallel.context
        if self.step == 0:
            self.save()
            self.saver.wait()  # from its first step on a run has something to go on from
        samples = self.samples
        if samples is not None and not context.run_on_rank0(step_folder(samples.folder, self.step).is_dir):
            self.draw_samples()
        title = f"{self.recipe.name} ({self.recipe.task})"
        self.profiler.note(self.step)
        bar = ProgressBar(title, settings.num_steps, done=self.step, is_shown=context.is_first)
        with bar, closing(self.profiler), closing(self.saver), scheduled_garbage(settings.gc_every) as collect_garbage:
            for batches, planned in self.feed.steps(self.epoch, self.position, settings.accumulate):
                if self.step >= settings.num_steps:
                    break
                result = self.take_step(batches, planned)
                self.feed.bad_clips.add(self.stepper.agreement.gather_bad_clips(batches))
                self.epoch, self.position = planned.position
                speed = self._tokens / max(time.perf_counter() - self._clock, 1e-9)
                bar.advance(note=f"loss {_find(result, 'loss'):.4g}  {speed:,.0f} tokens/s")
                self.after_step(result)
                self.profiler.note(self.step)
                collect_garbage(self.step)
        self.export()

    def take_step(self, batches: list[Batch], planned: PlannedStep | None = None) -> StepResult:
        """Several ranks need the step as `planned`."""
        result = self.stepper.step(self.step + 1, batches, planned)
        self.step += 1
        self._steps += 1
        # The shares of a step are alike in cost, so one stands for all.
        own = sum(self.task.count_tokens(batch) for batch in batches if not batch.is_filler)
        self._tokens += own * self.feed.assignment.num_ranks
        if result.is_spike:
            text = (
                "step %d: gradient norm %.3g is far above the usual, bucket %s; weights unchanged, going on (%d so far)"
            )
            _log.warning(text, self.step, result.values["grad_norm"], batches[0].bucket.name, result.values["spikes"])
        if result.is_finite:
            self.nonfinite = 0
        elif result.is_overflow:
            text = "step %d: gradients overflow at loss scale %g, which shrinks; weights unchanged"
            _log.info(text, self.step, _find(result, "loss_scale"))
        else:
            self.refuse(batches, result)
        return result

    def refuse(self, batches: list[Batch], result: StepResult) -> None:
        """A loss or gradient that is not finite: weights are unchanged; stop, or go on with the next batch."""
        self.nonfinite += 1
        message = (
            f"step {self.step}: the loss ({_find(result, 'loss')}) or the gradient norm ({_find(result, 'grad_norm')}) "
            f"is not finite, {self.stepper.agreement.name_culprits(batches)}; weights unchanged"
        )
        if self.recipe.train.on_nonfinite == "stop" or self.nonfinite >= self.recipe.train.nonfinite_limit:
            raise RunError(f"{message}. {self.nonfinite} in a row: lower optim.lr or look at these clips")
        _log.warning("%s, going on", message)

    def after_step(self, result: StepResult) -> None:
        settings, is_last = self.recipe.train, self.step == self.recipe.train.num_steps
        if self.step % settings.log_every == 0 or is_last or result.is_spike or not result.is_finite:
            self.log({**result.values, "epoch": self.epoch, **self.rates()})
        validation = self.recipe.validation
        if validation is not None and validation.batches and (self.is_due(validation.every) or is_last):
            self.log(self.validate(), mark="validation")
        if self.stepper.agreement.has_failed:  # all ranks end after the same step
            self.saver.wait()
            raise CheckpointError("another process could not save a checkpoint; its message says why")
        stop_signal = self.stepper.agreement.stop_signal
        if self.is_due(settings.save_every) or is_last or stop_signal:
            self.save()
        if stop_signal and not is_last:
            name = signal.Signals(stop_signal).name
            raise Interrupted(f"{name}: saved step {self.step}; start the same command to go on", stop_signal)
        self.draw_samples()

    def is_due(self, interval: int | str) -> bool:
        return is_due(interval, self.step, self.epoch, self.position)

    def rates(self) -> dict[str, float]:
        """Steps and tokens per second since the last call."""
        now = time.perf_counter()
        elapsed = max(now - self._clock, 1e-9)
        rates = {"steps_per_s": self._steps / elapsed, "tokens_per_s": self._tokens / elapsed}
        self._clock, self._steps, self._tokens = now, 0, 0
        return rates

    def log(self, values: dict[str, float], mark: str = "train") -> None:
        for tracker in self.trackers:
            tracker.log(self.step, {f"{mark}/{name}": value for name, value in values.items()})

    def validate(self) -> dict[str, float]:
        model = self.task.model
        model.eval()
        try:
            with nullcontext() if self.stepper.ema is None else self.stepper.ema.applied(model):
                batches = self.feed.validation_batches()
                self.show(self.task.draw_pictures(batches))
                return self.task.validate(batches)
        finally:
            model.train()

    def show(self, pictures: Mapping[str, Tensor]) -> None:
        """Pictures of a validation, HWC in bytes: into the run's folder, and to the trackers."""
        if not self.stepper.parallel.context.is_first:
            return
        media = []
        for name, picture_HWC in pictures.items():
            path = self.folder.path / name / f"step-{self.step:08d}.png"
            path.parent.mkdir(exist_ok=True)
            write_image(path, picture_HWC.numpy())
            media.append(Media(f"validation/{name}", path))
        for tracker in self.trackers if media else ():
            tracker.log_media(self.step, media)

    def draw_samples(self) -> None:
        """Where they are due; after saving, so that a mistake there costs no step. Rates do not count their time."""
        if self.samples is None:
            return
        is_due = self.is_due(self.samples.section.every) if self.step else self.samples.section.at_start
        if not is_due and self.step != self.recipe.train.num_steps:
            return
        started = time.perf_counter()
        if self.stepper.parallel.context.is_first:
            self.samples.draw(self.step, self.stepper.ema, self.trackers)
        elif self.stepper.parallel.waits_in_passes:
            self.samples.generate(self.step, self.stepper.ema)  # the first process needs the parts of all
        self._clock += time.perf_counter() - started

    def save(self) -> None:
        snapshot, wanted = self.snapshot(), self.recipe.train.checkpoint
        parallel = self.stepper.parallel
        is_sharded = parallel.mesh is not None and parallel.section.zero > 0
        if wanted == "whole" or (wanted == "auto" and not is_sharded):
            snapshot = replace(snapshot, tensors=parallel.gather_tensors(snapshot.tensors))
        self.saver.save(snapshot)

    def snapshot(self) -> Checkpoint:
        state = {
            "epoch": self.epoch,
            "position": self.position,
            "nonfinite": self.nonfinite,
            **self.stepper.state(),
            "manifest": self.feed.manifest.fingerprint,
            **self.task.state(),
            "versions": versions(),
        }
        return Checkpoint(self.step, {**self.task.tensors(), **self.stepper.tensors()}, state)

    def export(self) -> None:
        """Write `export/`: the averaged weights where there are any, as a model folder or as LoRA files."""
        tensors, ema = self.task.tensors()[MODEL], self.stepper.ema
        if ema is not None and self.step < ema.section.every:
            text = "train.ema.every is %d, and the run has %d steps: the export has the weights as trained, no average"
            _log.warning(text, ema.section.every, self.step)
        elif ema is not None:
            tensors.update(ema.state_dict())
        parallel = self.stepper.parallel
        whole = parallel.gather_tensors({MODEL: tensors}).get(MODEL, {})
        parallel.context.run_on_rank0(lambda: self.task.export(self.folder.path, whole, self.feed.first_batches))


def _find(result: StepResult, name: str) -> float:
    """A value of the model's step, or of the discriminator's where that one alone took a turn."""
    return result.values[name] if name in result.values else result.values[f"discriminator_{name}"]
