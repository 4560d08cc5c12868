"""Block caching across solver steps: a block whose inputs hardly changed since it last ran is skipped.

From one step to the next most blocks of a denoiser see nearly the same tokens. What such a block added to its input the
last time is added again. The change of an input is its mean distance from the input at the last real run, relative to
the size of that input, so changes add up until the block runs. Only the tokens that a block adds to are compared: its
other inputs, such as the noise level, change at every step. Where several ranks hold parts of a clip's tokens, the
change is that of all parts together, so that all of them run a block or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.distributed.sequence_parallel import ALONE, SequenceGroup


@dataclass
class CacheCount:
    """Calls of blocks, and how many of them were skipped."""

    calls: int = 0
    skipped: int = 0


@contextmanager
def skipping_blocks(
    blocks: Sequence[nn.Module], threshold: float, count: CacheCount | None = None, *, group: SequenceGroup = ALONE
) -> Iterator[None]:
    """Inside, blocks are skipped whose inputs changed less than `threshold`; 0 changes nothing."""
    if threshold <= 0:
        yield
        return
    count = count if count is not None else CacheCount()
    for block in blocks:
        # An attribute of the instance stands before the method of its class.
        block.forward = _CachedForward(block.forward, threshold, count, group)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


class _CachedForward:
    """The forward of one block with what it saw and gave at its last real run."""

    def __init__(self, forward: Callable[..., Any], threshold: float, count: CacheCount, group: SequenceGroup) -> None:
        self._forward, self._threshold, self._count, self._group = forward, threshold, count, group
        self._inputs: list[Tensor] = []
        self._added: list[Tensor] = []
        self._sources: list[int | None] = []
        self._is_single = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._count.calls += 1
        if self._has_hardly_changed(inputs):
            self._count.skipped += 1
            pairs = zip(self._sources, self._added, strict=True)
            outputs = [added if source is None else inputs[source] + added for source, added in pairs]
            return outputs[0] if self._is_single else tuple(outputs)
        result = self._forward(*args, **kwargs)
        self._remember(inputs, result)
        return result

    def _has_hardly_changed(self, inputs: list[Tensor]) -> bool:
        before = self._inputs
        if len(before) != len(inputs) or any(a.shape != b.shape for a, b in zip(before, inputs, strict=True)):
            return False
        tokens = [source for source in self._sources if source is not None] or range(len(inputs))
        # Of all inputs, before any is judged: processes that share a clip must send equally often.
        changes = [_change(before[index], inputs[index], self._group) for index in tokens]
        return all(change < self._threshold for change in changes)

    def _remember(self, inputs: list[Tensor], result: Any) -> None:
        self._is_single = isinstance(result, Tensor)
        outputs: list[Tensor] = [result] if self._is_single else list(result)
        self._inputs, self._sources, self._added = [part.detach() for part in inputs], [], []
        free = list(range(len(inputs)))
        for output in outputs:
            # A residual block gives its inputs back in order; the first of the same shape is the one it added to.
            source = next((index for index in free if inputs[index].shape == output.shape), None)
            if source is not None:
                free.remove(source)
            self._sources.append(source)
            self._added.append(output.detach() if source is None else output.detach() - inputs[source])


def _change(before: Tensor, now: Tensor, group: SequenceGroup) -> float:
    """Mean distance relative to mean size; infinite for what is no number and not the same."""
    if before is now:
        distance, size = 0.0, 0.0
    elif not now.is_floating_point():
        distance, size = (0.0 if torch.equal(before, now) else float("inf")), 0.0
    else:
        distance, size = (float(part.abs().sum(dtype=torch.float32)) for part in (now - before, before))
    distance, size = group.add_up([distance, size], now.device)
    if distance == 0:
        return 0.0
    return distance / size if size else float("inf")
