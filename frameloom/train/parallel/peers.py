"""The other processes of a run, as the step and the loop see them. This one has none: nothing is sent anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from frameloom.checkpoint.crew import Crew
from frameloom.checkpoint.store import Checkpoint, StoredCheckpoint
from frameloom.data.batch import BadClip, Batch
from frameloom.generate.parts import LoadedDenoiser, TextPipeline
from frameloom.train.halving import BatchLimits, Misfit, OutOfRoom
from frameloom.train.parallel.sharding import add_up_by_block
from frameloom.train.parallel.shares import Shares, Span

Answer = TypeVar("Answer")
Tensors = dict[str, dict[str, Tensor]]


class Peers:
    """One process alone. `MeshPeers` overrides what several processes do otherwise.

    A step calls, in this order: `begin`; for each micro-batch `expect`; after the last backward pass `join`.
    """

    rank = 0
    num_ranks = 1
    splits_weights = False
    """whether a forward pass needs all processes at once"""
    shares_text = False
    """whether a text is encoded by several processes at once"""
    passes_together = False
    """whether a pass, forward or backward, waits for other processes"""

    splits_state = False
    """whether weights or optimizer state are in parts on several processes"""

    def __init__(self, shares: Shares | None = None, *, zero: int = 0) -> None:
        self.shares = shares or Shares()
        self.zero = zero
        self.crew = Crew()
        self._has_failed = False

    @property
    def is_first(self) -> bool:
        """Whether this process logs, writes files and shows progress."""
        return self.rank == 0

    # A step

    def begin(self, step: int, span: Span) -> None:
        """Say which step comes next."""

    def count_samples(self, batches: Sequence[Batch]) -> int:
        """Samples of the step, on all processes."""
        return sum(len(batch.rows) for batch in batches if not batch.is_filler)

    def count_passes(self, batches: Sequence[Batch], limits: BatchLimits) -> list[int]:
        """Into how many pieces each micro-batch is cut."""
        return [limits.count_pieces(batch.bucket.name, batch.size) for batch in batches]

    def expect(self, *, is_last: bool) -> None:
        """A forward and backward pass comes; gradients are sent with the last one of a step only."""

    def join(
        self,
        totals: Mapping[str, Tensor],
        batches: Sequence[Batch],
        params: Sequence[nn.Parameter],
        misfit: Misfit | None = None,
    ) -> dict[str, Tensor]:
        """Add up `totals` and the gradients over all processes, after a look whether they did the same step.

        `misfit` is what did not fit in memory here; if there is one anywhere, all raise OutOfRoom instead.
        """
        if misfit is not None:
            raise OutOfRoom([misfit])
        return dict(totals)

    def gather(self, value: Answer) -> list[Answer]:
        """What each process has, in the order of ranks."""
        return [value]

    def agree_to_stop(self, asked: int | None) -> int | None:
        """The signal at which all stop now; `asked` is the one that this process got."""
        return asked

    def ask_to_stop(self, number: int) -> None:
        """This process got a signal; may be called from its handler."""

    def note_failure(self) -> None:
        """Something went wrong beside the steps, in a thread; may be called from it."""
        self._has_failed = True

    def agree_on_failure(self) -> bool:
        """Whether some process had noted a failure when the last step was taken."""
        return self._has_failed

    def take_bad_clips(self, batches: Sequence[Batch]) -> list[BadClip]:
        """Clips of the last step that could not be read, on all processes."""
        return [clip for batch in batches for clip in batch.bad]

    def name_culprits(self, batches: Sequence[Batch]) -> str:
        """The batches of a step whose loss is not finite, in words; all processes call it."""
        rows = [int(row) for batch in batches for row in batch.rows]
        return f"bucket {batches[0].bucket.name}, manifest rows {rows[:8]}"

    # What is split

    def split_model(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Split the weights of `model`, block by block; alone, only compute as those who do."""
        if self.zero >= 2:
            add_up_by_block(model, blocks)

    def share_tokens(self, denoiser: LoadedDenoiser) -> None:
        """Let the processes that see the same clip divide its tokens."""

    def split_optimizer(self, optimizer: Optimizer) -> None:
        """Leave each process the state of a part of the weights."""

    def share_text(self, text: TextPipeline) -> TextPipeline:
        """The text encoders as these processes use them together."""
        return text

    # Files

    def ask_first(self, work: Callable[[], Answer]) -> Answer:
        """What the first process finds, on all of them; an error there ends all."""
        return work()

    def do_first(self, work: Callable[[], object]) -> None:
        """Work of the first process, for which the others wait; an error there ends all."""
        self.ask_first(lambda: work() and None)

    def collect(self, tensors: Tensors) -> Tensors:
        """Whole tensors on the first process; on the others nothing."""
        return tensors

    def read(self, stored: StoredCheckpoint, own: Tensors) -> Checkpoint:
        """What this process needs of a checkpoint; `own` are its tensors now."""
        return stored.load()

    def close(self) -> None:
        """Leave in order."""


def has_gradient(param: nn.Parameter) -> bool:
    return param.grad is not None


@torch.no_grad()
def scale_gradients(params: Sequence[nn.Parameter], factor: float) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)
