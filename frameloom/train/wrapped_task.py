"""A denoiser's task with something around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from frameloom.data.batch import Batch
from frameloom.train.denoiser import DenoiserTask


@dataclass(frozen=True)
class WrappedTask:
    """All that it does not change is up to `inner`."""

    inner: DenoiserTask

    @property
    def model(self) -> nn.Module:
        return self.inner.model

    def losses(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.inner.losses(batch)

    def validate(self, batches: Sequence[Batch]) -> dict[str, float]:
        return self.inner.validate(batches)

    def count_tokens(self, batch: Batch) -> int:
        return self.inner.count_tokens(batch)

    def draw_pictures(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        return self.inner.draw_pictures(batches)


def unwrap(task: object) -> DenoiserTask:
    found = task.inner if isinstance(task, WrappedTask) else task
    assert isinstance(found, DenoiserTask)
    return found
