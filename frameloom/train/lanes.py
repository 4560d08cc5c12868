"""Two halves of a micro-batch side by side on a CPU, each in a thread of its own with half of the cores.

An operation that all cores share ends when the last of them is done, and a step has thousands of operations. Halves go
their own way instead: while one moves memory, the other multiplies. Every draw is keyed by a sample's slot, and a sum
of two does not depend on which comes first, so a run still repeats to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from frameloom.core.log import get_logger
from frameloom.data.batch import Batch
from frameloom.train.denoiser import DenoiserTask
from frameloom.train.halving import cut_batch
from frameloom.train.parallel.peers import Peers

_log = get_logger(__name__)

NUM_LANES = 2
"""with more, gradients would depend on which half is done first"""
MIN_TOKENS, MIN_FLOPS = 4096, 1e11
"""of a pass, from which it pays: with few tokens adding up gradients outweighs it, in short passes both wait for the
interpreter"""

Answer = TypeVar("Answer")


@dataclass
class Lanes:
    """`num_threads` are the cores that an operation of a half may use; `is_worth` says of which batches it is used."""

    num_threads: int
    is_worth: Callable[[Batch], bool] = lambda batch: True
    _pool: ThreadPoolExecutor = field(init=False, repr=False)
    _known: set[Hashable] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_LANES, "lane", torch.set_num_threads, (self.num_threads,))

    def cut(self, batch: Batch) -> list[Batch]:
        return cut_batch(batch, NUM_LANES) if batch.size >= NUM_LANES and self.is_worth(batch) else [batch]

    def run(self, shape: Hashable, halves: Sequence[Callable[[], Answer]]) -> list[Answer]:
        """The answers of both, once neither of them runs any more.

        The first time of a shape they run one after the other: only one of them compiles blocks and computes tables. So
        they do, in this thread, while steps are recorded: a recording sees no other.
        """
        if torch._C._autograd._profiler_enabled():
            with _using_threads(self.num_threads):
                return [half() for half in halves]
        if shape not in self._known:
            answers = [self._pool.submit(half).result() for half in halves]
            self._known.add(shape)
            return answers
        running = [self._pool.submit(half) for half in halves]
        wait(running)
        return [half.result() for half in running]


@contextmanager
def _using_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def adding_up(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients from before come to the sum of those from the block, whichever half has been first there.

    After an error none are left: the step is begun anew, or the run ends.
    """
    before = {param: param.grad for param in params if param.grad is not None}
    for param in before:
        param.grad = None
    yield
    for param, grad in before.items():
        if param.grad is not None:
            grad += param.grad
        param.grad = grad


def least_tokens(model: nn.Module) -> float:
    """Of a pass that gains by halves."""
    return max(MIN_TOKENS, MIN_FLOPS / (6 * sum(param.numel() for param in model.parameters())))


def build_lanes(wanted: bool | str, task: DenoiserTask, device: torch.device, peers: Peers) -> Lanes | None:
    """What a recipe's `train.side_by_side` asks for; None where halves cannot run so."""
    if not wanted:
        return None
    hindrance = _find_hindrance(task, device, peers)
    if hindrance is not None:
        if wanted is True:
            _log.warning("train.side_by_side is true, which has no effect %s", hindrance)
        return None
    least = 0 if wanted is True else least_tokens(task.model)

    def is_worth(batch: Batch) -> bool:
        return task.count_tokens(batch) >= least and task.only_denoises(batch)

    return Lanes(torch.get_num_threads() // NUM_LANES, is_worth)


def _find_hindrance(task: DenoiserTask, device: torch.device, peers: Peers) -> str | None:
    if device.type != "cpu":
        return f"on the {device.type.upper()}"
    if torch.get_num_threads() < NUM_LANES:
        return "with one thread (OMP_NUM_THREADS)"
    # Sums over processes are kept in the order that any number of them has.
    if peers.num_ranks > 1 or peers.shares.num_shares > 1 or peers.zero >= 2:
        return "where gradients are added up as those of several processes (parallel)"
    if any(param.dtype != torch.float32 for param in task.model.parameters()):
        return "on half-precision weights (train.weights_precision)"
    return None
