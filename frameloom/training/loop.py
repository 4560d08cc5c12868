"""The training loop: read, step, log, validate, save; stop at a signal and resume to the bit."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from frameloom.checkpoint.model_folder import write_model_folder
from frameloom.checkpoint.reader import Checkpoint
from frameloom.checkpoint.writer import Saver
from frameloom.config.schema.recipe import Recipe
from frameloom.config.schema.training import is_due
from frameloom.core.errors import CheckpointError, RunError
from frameloom.core.logging import get_logger
from frameloom.core.progress import ProgressBar
from frameloom.data.loading.batch import Batch
from frameloom.data.media.writing import write_image
from frameloom.training.feed import Feed
from frameloom.training.logging.profiling import StepProfiler
from frameloom.training.logging.samples import TrainingSamples
from frameloom.training.logging.trackers import Media, Tracker
from frameloom.training.memory.oom_split import read_notes
from frameloom.training.memory.preflight import is_wanted, rehearse
from frameloom.training.peers import Peers
from frameloom.training.process_settings import scheduled_garbage
from frameloom.training.run.folder import RunFolder, versions
from frameloom.training.run.resuming import ResumeChoices, check_data, check_groups, load_weights
from frameloom.training.step import AnyStepper, StepResult
from frameloom.training.tasks.build import BuiltTask

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
    stepper: AnyStepper
    feed: Feed
    trackers: list[Tracker]
    samples: TrainingSamples | None = None
    step: int = 0
    epoch: int = 0
    position: int = 0
    nonfinite: int = 0
    stop_signal: int | None = None
    profiler: StepProfiler = field(default_factory=StepProfiler)
    peers: Peers = field(default_factory=Peers)
    saver: Saver = field(init=False)
    _clock: float = field(default_factory=time.perf_counter)
    _tokens: int = 0
    _steps: int = 0

    def __post_init__(self) -> None:
        settings = self.recipe.train
        peers = self.peers
        # The copy of a save in the background may fail while steps go on; the next step tells all processes.
        self.saver = Saver(
            self.folder.checkpoints,
            settings.keep,
            in_background=settings.async_save,
            collective=peers.checkpoint_collective,
            on_error=peers.note_failure,
        )

    def run(self) -> None:
        """Train to the last step, then export. Every way out leaves a complete checkpoint behind."""
        settings = self.recipe.train
        self.rehearse()
        if self.step == 0:
            self.save()
            self.saver.wait()  # from its first step on a run has something to go on from
        samples = self.samples
        if samples is not None and not self.peers.context.run_on_rank0(lambda: samples.is_drawn(self.step)):
            self.draw_samples()
        title = f"{self.recipe.name} ({self.recipe.task})"
        self.profiler.note(self.step)
        bar = ProgressBar(title, settings.num_steps, done=self.step, is_shown=self.peers.is_first)
        with bar, closing(self.profiler), closing(self.saver), scheduled_garbage(settings.gc_every) as collect_garbage:
            for batches, planned in self.feed.steps(self.epoch, self.position, settings.accumulate):
                if self.step >= settings.num_steps:
                    break
                self.peers.begin(self.step + 1, planned)
                result = self.take_step(batches)
                self.feed.bad_clips.add(self.peers.take_bad_clips(batches))
                self.epoch, self.position = planned.position
                bar.advance(note=self.note(result))
                self.after_step(result)
                self.profiler.note(self.step)
                collect_garbage(self.step)
        self.export()

    def rehearse(self) -> None:
        """Halve what did not fit before, and try out what is left, if the recipe wants it."""
        notes = self.peers.context.run_on_rank0(lambda: read_notes(self.folder.path, after_step=self.step))
        self.stepper.limits.tighten(notes)
        settings = self.recipe.train
        if is_wanted(settings, self.feed.device):
            tokens = self.built.task.count_tokens
            more = {"epoch": self.epoch, "accumulate": settings.accumulate}
            rehearse(self.stepper, self.feed, self.peers, tokens, **more)

    def take_step(self, batches: list[Batch]) -> StepResult:
        result = self.stepper.step(self.step + 1, batches)
        self.step += 1
        self._steps += 1
        # The shares of a step are alike in cost, so one stands for all.
        own = sum(self.built.task.count_tokens(batch) for batch in batches if not batch.is_filler)
        self._tokens += own * self.peers.shares.num_ranks
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
            f"is not finite, {self.peers.name_culprits(batches)}; weights unchanged"
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
        self.check_saving()
        stop_signal = self.peers.agree_to_stop(self.stop_signal)
        if self.is_due(settings.save_every) or is_last or stop_signal:
            self.save()
        if stop_signal and not is_last:
            name = signal.Signals(stop_signal).name
            raise Interrupted(f"{name}: saved step {self.step}; start the same command to go on", stop_signal)
        self.draw_samples()

    def is_due(self, interval: int | str) -> bool:
        return is_due(interval, step=self.step, epoch=self.epoch, position=self.position)

    def rates(self) -> dict[str, float]:
        """Steps and tokens per second since the last call."""
        now = time.perf_counter()
        elapsed = max(now - self._clock, 1e-9)
        rates = {"steps_per_s": self._steps / elapsed, "tokens_per_s": self._tokens / elapsed}
        self._clock, self._steps, self._tokens = now, 0, 0
        return rates

    def note(self, result: StepResult) -> str:
        elapsed = max(time.perf_counter() - self._clock, 1e-9)
        return f"loss {_find(result, 'loss'):.4g}  {self._tokens / elapsed:,.0f} tokens/s"

    def log(self, values: dict[str, float], mark: str = "train") -> None:
        for tracker in self.trackers:
            tracker.log(self.step, {f"{mark}/{name}": value for name, value in values.items()})

    def validate(self) -> dict[str, float]:
        model = self.built.task.model
        model.eval()
        try:
            with nullcontext() if self.stepper.ema is None else self.stepper.ema.applied(model):
                batches = self.feed.validation_batches()
                self.show(self.built.task.draw_pictures(batches))
                return self.built.task.validate(batches)
        finally:
            model.train()

    def show(self, pictures: Mapping[str, Tensor]) -> None:
        """Pictures of a validation, HWC in bytes: into the run's folder, and to the trackers."""
        if not self.peers.is_first:
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
        is_due = self.is_due(self.samples.every) if self.step else self.samples.at_start
        if not is_due and self.step != self.recipe.train.num_steps:
            return
        started = time.perf_counter()
        if self.peers.is_first:
            self.samples.draw(self.step, self.stepper.ema, self.trackers)
        elif self.peers.passes_together:
            self.samples.generate(self.step, self.stepper.ema)  # the first process needs the parts of all
        self._clock += time.perf_counter() - started

    def save(self) -> None:
        snapshot, wanted = self.snapshot(), self.recipe.train.checkpoint
        if wanted == "whole" or (wanted == "auto" and not self.peers.splits_state):
            snapshot = dataclasses.replace(snapshot, tensors=self.peers.collect(snapshot.tensors))
        self.saver.save(snapshot)

    def check_saving(self) -> None:
        """An error of a save in the background ends all processes after the same step."""
        if self.peers.agree_on_failure():
            self.saver.wait()
            raise CheckpointError("another process could not save a checkpoint; its message says why")

    def snapshot(self) -> Checkpoint:
        adapters = self.built.adapters
        tensors = {
            "model": dict(self.built.task.model.state_dict()) if adapters is None else adapters.tensors(),
            **self.stepper.tensors(),
            **self.built.extra,
        }
        if self.built.beside:
            tensors["beside"] = dict(self.built.beside)
        state = {
            "epoch": self.epoch,
            "position": self.position,
            "nonfinite": self.nonfinite,
            **self.stepper.state(),
            "manifest": self.feed.manifest.fingerprint,
            "kind": self.built.kind,
            "name": self.built.name,
            "architecture": dataclasses.asdict(self.built.config),
            "versions": versions(),
            **({} if adapters is None else {adapters.key: adapters.state()}),
        }
        return Checkpoint(self.step, tensors, state)

    def restore(self, checkpoint: Checkpoint, choices: ResumeChoices | None = None) -> None:
        """Take up a checkpoint; refuse one that was made on other data or for another model."""
        check_data(self.folder, checkpoint, self.feed, choices or ResumeChoices())
        check_groups(self.folder, checkpoint, self.snapshot().tensors)
        load_weights(self.folder, checkpoint, self.built)
        self.stepper.load(checkpoint.tensors)
        for name, parameter in self.built.beside.items():
            parameter.data.copy_(checkpoint.tensors["beside"][name])
        self.step = checkpoint.step
        self.epoch, self.position = checkpoint.state["epoch"], checkpoint.state["position"]
        self.nonfinite = checkpoint.state["nonfinite"]
        self.stepper.load_state(checkpoint.state)

    def export(self) -> None:
        """Write `export/`: the averaged weights where there are any, as a model folder or as LoRA files."""
        adapters = self.built.adapters
        tensors = dict(self.built.task.model.state_dict()) if adapters is None else adapters.tensors()
        ema = self.stepper.ema
        if ema is not None and self.step < ema.section.every:
            text = "train.ema.every is %d, and the run has %d steps: the export has the weights as trained, no average"
            _log.warning(text, ema.section.every, self.step)
        elif ema is not None:
            tensors.update(ema.state_dict())
        whole = self.peers.collect({"model": tensors}).get("model", {})
        config: dict[str, Any] = {}
        if adapters is None:
            config = dataclasses.asdict(self.built.export_config(self.feed.first_batches))

        def write() -> None:
            self.built.export_beside(self.folder.path)
            if adapters is not None:
                adapters.export(self.folder.export, whole)
                return
            write_model_folder(
                self.folder.export, kind=self.built.kind, name=self.built.name, config=config, tensors=whole
            )

        self.peers.context.run_on_rank0(write)


def _find(result: StepResult, name: str) -> float:
    """A value of the model's step, or of the discriminator's where that one alone took a turn."""
    return result.values[name] if name in result.values else result.values[f"discriminator_{name}"]
