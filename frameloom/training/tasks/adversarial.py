"""Training with a discriminator: two steppers, one for each network, that take turns.

Each has its own task, optimizer and clipping; the average of the weights is of the autoencoder alone. What a turn
draws is a function of the seed and the batch, and whose turn it is follows from the step, so a run resumes to the bit.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.checkpoint.model_folder import read_weights
from frameloom.config.schema.models import DiscriminatorSection
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.random import stream
from frameloom.data.loading.batch import Batch
from frameloom.models.vaes.discriminator import (
    Discriminator,
    DiscriminatorConfig,
    build_discriminator,
    load_discriminator,
)
from frameloom.models.vaes.losses import AdversarialSettings, discriminator_loss, generator_term
from frameloom.training.memory.oom_split import BatchLimits, Misfit
from frameloom.training.optim.ema import EMA
from frameloom.training.optim.optimizer import allocate_state, build_optimizer
from frameloom.training.optim.precision import LossScale
from frameloom.training.step import Stepper, StepResult
from frameloom.training.tasks.autoencoder import AutoencoderTask, spread_losses

_NAME = "discriminator"


@dataclass
class AdversarialStepper:
    """A step is the autoencoder's, the discriminator's, or both, one after the other."""

    autoencoder: Stepper
    discriminator: Stepper
    judge: Judge

    @property
    def ema(self) -> EMA | None:
        return self.autoencoder.ema

    @property
    def limits(self) -> BatchLimits:
        return self.autoencoder.limits

    def step(self, number: int, batches: Sequence[Batch]) -> StepResult:
        settings, step = self.judge.settings, number - 1
        self.judge.step = step
        self.judge.made.clear()
        results = []
        if settings.trains_autoencoder(step):
            results.append(self._take_turn(self.autoencoder, number, batches))
        if settings.trains_discriminator(step):
            result = self._take_turn(self.discriminator, number, batches)
            values = {f"{_NAME}_{name}": value for name, value in result.values.items()}
            results.append(StepResult(values, result.is_finite, result.is_spike, result.is_overflow))
        self.judge.made.clear()
        return _join(results)

    def try_out(self, pieces: Sequence[Batch]) -> Misfit | None:
        """Both turns, as they are once the discriminator has a say."""
        step, self.judge.step = self.judge.step, max(self.judge.step, self.judge.settings.start)
        try:
            for stepper in (self.autoencoder, self.discriminator):
                stepper.undo = self._remember()
                misfit = stepper.try_out(pieces)
                if misfit is not None:
                    return misfit
            return None
        finally:
            self.judge.step = step
            self.judge.made.clear()

    def _take_turn(self, stepper: Stepper, number: int, batches: Sequence[Batch]) -> StepResult:
        """A turn that changes no weight leaves the discriminator's running statistics as they were, too."""
        stepper.undo = self._remember()
        result = stepper.step(number, batches)
        if not result.is_finite or result.is_spike:
            stepper.undo()
        return result

    def _remember(self) -> Callable[[], None]:
        """A function that puts back what passes change besides gradients: running statistics."""
        buffers = list(self.judge.model.buffers())
        before = [buffer.clone() for buffer in buffers]

        def put_back() -> None:
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)

        return put_back

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        own = {f"{_NAME}_{group}": tensors for group, tensors in self.discriminator.tensors().items()}
        return {**self.autoencoder.tensors(), _NAME: dict(self.judge.model.state_dict()), **own}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        try:
            self.judge.model.load_state_dict(tensors[_NAME])
        except RuntimeError as error:
            raise CheckpointError(
                f"the checkpoint's discriminator does not fit the recipe's ({error}); restore "
                "autoencoder.discriminator, or start a new run with --name"
            ) from error
        self.autoencoder.load(tensors)
        prefix = f"{_NAME}_"
        self.discriminator.load({key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)})

    def state(self) -> dict[str, Any]:
        return {**self.autoencoder.state(), _NAME: self.discriminator.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.autoencoder.load_state(state)
        self.discriminator.load_state(state[_NAME])


def _join(results: Sequence[StepResult]) -> StepResult:
    values = {name: value for result in results for name, value in result.values.items()}
    failed = [result for result in results if not result.is_finite]
    return StepResult(
        values,
        is_finite=not failed,
        is_spike=any(result.is_spike for result in results),
        is_overflow=bool(failed) and all(result.is_overflow for result in failed),
    )


@dataclass
class Judge:
    """The discriminator and what both turns must know of it; `step` counts from 0, as the published rules do."""

    model: Discriminator
    settings: AdversarialSettings
    seed: int
    device: torch.device
    step: int = 0
    made: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = field(default_factory=dict)
    """of the autoencoder's turn, where the other one follows in the same step: by micro-batch, for each piece of it
    where it begins, clips and reconstructions"""

    def judge(self, pixels_BCFHW: Tensor, batch: Batch, purpose: str) -> Tensor:
        generator = None
        if self.model.config.dropout:
            # The draws of a piece are its own: norms and draws are those of what is computed at once.
            counters = (batch.epoch, batch.index, *([batch.part] if batch.part else ()))
            generator = stream(self.seed, f"{_NAME} dropout {purpose}", *counters, device=str(self.device))
        logits: Tensor = self.model(pixels_BCFHW, generator)
        return logits

    def keep(self, batch: Batch, pixels_BCFHW: Tensor, decoded_BCFHW: Tensor) -> None:
        place = batch.epoch, batch.index
        if batch.part == 0 and not batch.is_filler:
            self.made.pop(place, None)  # of passes that did not fit in memory
        self.made.setdefault(place, []).append((batch.part, pixels_BCFHW, decoded_BCFHW))


@dataclass
class AutoencoderTurn:
    """The autoencoder's losses, with the discriminator's opinion once it has a say."""

    own: AutoencoderTask
    judge: Judge

    @property
    def model(self) -> nn.Module:
        return self.own.model

    def losses(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        made = self.own.reconstruct(batch)
        compared = self.own.compare(made)
        judge, settings = self.judge, self.judge.settings
        if judge.step < settings.start:
            return spread_losses(compared.loss, compared.parts, batch)
        with _frozen(judge.model):
            logits = judge.judge(made.decoded_BCFHW, batch, "autoencoder")
        last_layer = self.own.vae.last_layer()
        term = generator_term(logits, compared.reconstruction, last_layer, settings, judge.step)
        if settings.turns == "both":
            judge.keep(batch, made.pixels_BCFHW, made.decoded_BCFHW.detach())
        parts = {**compared.parts, "generator": term.made, "adversarial_weight": term.weight}
        return spread_losses(compared.loss + term.loss, parts, batch)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Gradients pass through `model` and leave none in it."""
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.requires_grad_(True)


@dataclass
class DiscriminatorTurn:
    """The discriminator's own loss on clips and reconstructions, which are made here unless the turn before did."""

    own: AutoencoderTask
    judge: Judge

    @property
    def model(self) -> nn.Module:
        return self.judge.model

    def losses(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        kept = self.judge.made.get((batch.epoch, batch.index))
        pixels, decoded = self._reconstruct(batch) if kept is None else _find_rows(kept, batch)
        real = self.judge.judge(pixels, batch, "clips")
        made = self.judge.judge(decoded, batch, "reconstructions")
        loss = discriminator_loss(real, made, self.judge.settings, self.judge.step)
        with torch.no_grad():
            right = [(real > 0).float().mean(), (made < 0).float().mean()]
            parts = {"accuracy": (right[0] + right[1]) / 2, "real": real.float().mean(), "made": made.float().mean()}
        return spread_losses(loss, parts, batch)

    def _reconstruct(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            made = self.own.reconstruct(batch)
        return made.pixels_BCFHW, made.decoded_BCFHW


def _find_rows(kept: Sequence[tuple[int, Tensor, Tensor]], batch: Batch) -> tuple[Tensor, Tensor]:
    """The rows of a piece, which may be cut otherwise than the pieces that were kept; those are in order."""
    place, end = batch.part, batch.part + batch.size
    parts = []
    for start, pixels, decoded in kept:
        if start <= place < min(end, start + len(pixels)):
            rows = slice(place - start, end - start)
            parts.append((pixels[rows], decoded[rows]))
            place = start + len(pixels)
    if len(parts) == 1:
        return parts[0]
    parts = parts or [(pixels[:0], decoded[:0]) for _, pixels, decoded in kept[:1]]
    return torch.cat([pixels for pixels, _ in parts]), torch.cat([decoded for _, decoded in parts])


def add_discriminator(
    stepper: Stepper, recipe: Recipe, task: AutoencoderTask, lr_at: Callable[[int], float], scaler: LossScale | None
) -> AdversarialStepper:
    """The stepper of an autoencoder together with that of the discriminator of its recipe.

    `lr_at` is the learning rate of the autoencoder; `scaler` is one of the discriminator's own.
    """
    section, optim = recipe.autoencoder.discriminator, recipe.optim
    assert section is not None
    if section.adaptive and not task.vae.last_layer().requires_grad:
        raise ConfigError(
            "autoencoder.discriminator.adaptive compares gradients at the decoder's last layer, which does not train; "
            "let it train (optim.trainable, optim.frozen), or set adaptive to false with a weight of your choice"
        )
    judge = Judge(_build(section, recipe.seed, task.device), _settings_of(section), recipe.seed, task.device)
    own = {"lr": section.lr or optim.lr, "weight_decay": section.weight_decay, "groups": ()}
    optimizer = build_optimizer(judge.model.named_parameters(), optim.model_copy(update=own))
    allocate_state(optimizer)
    share = 1.0 if section.lr is None else section.lr / optim.lr
    second = Stepper(
        DiscriminatorTurn(task, judge),
        optimizer,
        None,
        lambda step: share * lr_at(step),
        section.clip_norm,
        stepper.device_type,
        stepper.bf16,
        fp16=stepper.fp16,
        scaler=scaler,
        peers=stepper.peers,
        limits=stepper.limits,
    )
    # Its norms and the balance of gradients are those of what is computed at once, so numbers differ a little.
    stepper.limits.remark = "the discriminator judges the pieces apart"
    stepper.task = AutoencoderTurn(task, judge)
    return AdversarialStepper(stepper, second, judge)


def _settings_of(section: DiscriminatorSection) -> AdversarialSettings:
    return AdversarialSettings(
        start=section.start,
        weight=section.weight,
        loss=section.loss,
        turns=section.update,
        adaptive=section.adaptive,
    )


def _build(section: DiscriminatorSection, seed: int, device: torch.device) -> Discriminator:
    config = DiscriminatorConfig(
        channels=section.channels, num_layers=section.num_layers, dropout=section.dropout, kind=section.kind
    )
    model = build_discriminator(config, stream(seed, f"{_NAME} weights"))
    if section.weights is not None:
        load_discriminator(model, dict(read_weights(Path(section.weights)).tensors))
    return model.to(device).train()
