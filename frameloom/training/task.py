"""What a run trains: networks, the phases of a step, and what checkpoints and exports hold of them.

A family of methods is a subclass of `Task`; the stepper runs the phases that are due and knows nothing else of it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from frameloom.checkpoint.model_folder import EXPORT, write_model_folder
from frameloom.checkpoint.reader import Checkpoint
from frameloom.config.schema.optim import OptimSection
from frameloom.core.errors import CheckpointError
from frameloom.data.loading.batch import Batch
from frameloom.models.state_dict import check_fit

Tensors = dict[str, dict[str, Tensor]]
"""by group, then by name, as a checkpoint has them"""
ReadBatches = Callable[[], Sequence[Batch]]
MODEL = "model"
"""the network that the run is about; groups of tensors and logged values of other networks begin with their names"""


@dataclass(frozen=True)
class StepContext:
    """What a pass knows of its step, counted from 0; `made` is what earlier phases leave for later ones."""

    step: int
    made: dict[Any, Any] = field(default_factory=dict)


class Losses(NamedTuple):
    """Of every sample of a micro-batch, with parts for the log."""

    loss_B: Tensor
    parts: Mapping[str, Tensor] = {}


@dataclass(frozen=True)
class Phase:
    """One update within a step: which network trains, with which optimizer settings, on which losses, when.

    A denoiser has one phase, an autoencoder with a discriminator two, and distillation with a second score network two
    with a ratio.
    """

    network: str
    losses: Callable[[StepContext, Batch], Losses]
    optim: OptimSection
    companions: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """what moves with the network and is not averaged"""
    is_due: Callable[[int], bool] = lambda step: True
    first_step: int = 0
    """from which on its passes are complete"""
    ema: bool = True

    @property
    def prefix(self) -> str:
        return "" if self.network == MODEL else f"{self.network}_"


@dataclass(frozen=True)
class TrainedPart:
    """What trains within a frozen model (LoRA, a new word): checkpoints and exports hold it instead of the model."""

    key: str
    """where a checkpoint keeps `state`"""
    parameters: Callable[[], Mapping[str, Tensor]]
    """as they are now: sharding replaces parameters"""
    state: Mapping[str, Any]
    """what a checkpoint must say besides, to be used with the right weights"""
    check: Callable[[Mapping[str, Any], str], None]
    """refuses the state of another base or shape, with where it comes from"""
    export: Callable[[Path, Mapping[str, Tensor]], None]

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, where: str) -> None:
        self.check(state, where)
        own = self.parameters()
        check_fit(own, tensors, where=where)
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


@dataclass(kw_only=True)
class Task(ABC):
    """What is trained. `networks` are those that train, `MODEL` first, by the names of their tensor groups."""

    kind: ClassVar[str]
    """of the exported model folder"""
    name: str
    config: Any
    networks: Mapping[str, nn.Module]
    blocks: Sequence[nn.Module] = ()
    """the repeated blocks of the model, one of which is gathered at a time where several ranks shard it"""
    companions: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """what trains with the model and is no part of it: in checkpoints, but not averaged and not exported"""
    constants: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """measured once and kept in checkpoints, by group"""
    part: TrainedPart | None = None
    """what trains within a frozen model and is saved instead of it"""
    statistics: Sequence[Tensor] = ()
    """buffers that passes change; a phase that moves no weight leaves them as they were"""

    @abstractmethod
    def phases(self, optim: OptimSection) -> Sequence[Phase]:
        """The updates of a step; `optim` is the recipe's section."""

    @abstractmethod
    def validate(self, batches: Sequence[Batch]) -> dict[str, float]: ...

    @abstractmethod
    def count_tokens(self, batch: Batch) -> int: ...

    def draw_pictures(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Pictures of a validation, HWC in bytes, by name."""
        return {}

    def export_config(self, read_batches: ReadBatches) -> Any:
        """The exported model's config. Only a task that measures the trained model reads batches of pixels for it: the
        clips of a cached run may be gone."""
        return self.config

    @property
    def model(self) -> nn.Module:
        return self.networks[MODEL]

    def tensors(self) -> Tensors:
        """What a checkpoint holds of the task, by group."""
        found = {name: dict(network.state_dict()) for name, network in self.networks.items()}
        if self.part is not None:
            found[MODEL] = dict(self.part.parameters())
        found |= {group: dict(tensors) for group, tensors in self.constants.items()}
        if self.companions:
            found["beside"] = dict(self.companions)
        return found

    def state(self) -> dict[str, Any]:
        own = {} if self.part is None else {self.part.key: dict(self.part.state)}
        return {"kind": self.kind, "name": self.name, "architecture": dataclasses.asdict(self.config), **own}

    def load(self, checkpoint: Checkpoint, *, where: str) -> None:
        """The networks, or the part of one that trains after a look at what it stands in."""
        for key in ("lora", "inversion"):
            if (key in checkpoint.state) != (self.part is not None and self.part.key == key):
                found = "with" if key in checkpoint.state else "without"
                raise CheckpointError(
                    f"{where} was trained {found} {key}, the recipe has it switched; "
                    "switch it back, or start a new run with --name"
                )
        for name, network in self.networks.items():
            if name == MODEL and self.part is not None:
                self.part.load(checkpoint.tensors[MODEL], checkpoint.state[self.part.key], where=where)
                continue
            try:
                network.load_state_dict(checkpoint.tensors[name])
            except RuntimeError as error:
                key = "the model section" if name == MODEL else f"autoencoder.{name}"
                raise CheckpointError(
                    f"{where}: its {name} does not fit the recipe's ({error}); restore {key}, or start a new run with "
                    "--name"
                ) from error
        for name, parameter in self.companions.items():
            parameter.data.copy_(checkpoint.tensors["beside"][name])

    def export(self, run: Path, tensors: Mapping[str, Tensor], read_batches: ReadBatches) -> None:
        """Write the export into the run's folder; `tensors` are whole, and averaged where the run has an average."""
        if self.part is not None:
            self.part.export(run / EXPORT, tensors)
            return
        kind, name, config = self.kind, self.name, dataclasses.asdict(self.export_config(read_batches))
        write_model_folder(run / EXPORT, kind=kind, name=name, config=config, tensors=tensors)
