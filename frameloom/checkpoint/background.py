"""Checkpoints written while training goes on: the step waits for a copy in host memory, a thread does the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from frameloom.checkpoint.store import Checkpoint, apply_retention, save_checkpoint

Tensors = dict[str, dict[str, Tensor]]


class Saver:
    """Saves one checkpoint at a time and keeps the newest `keep`.

    In the background, a save returns when the tensors are copied; the copies stay for the next save. An error of the
    thread is raised by the next call. What is on disk is complete or absent in any case.
    """

    def __init__(self, root: Path, keep: int, *, in_background: bool = False) -> None:
        self._root = root
        self._keep = keep
        self._in_background = in_background
        self._copies: Tensors = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        self.wait()
        if not self._in_background:
            self._write(checkpoint)
            return
        copied = Checkpoint(checkpoint.step, self._copy(checkpoint.tensors), checkpoint.state)
        self._thread = threading.Thread(target=self._guard(lambda: self._write(copied)), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self.wait()

    def _write(self, checkpoint: Checkpoint) -> None:
        save_checkpoint(self._root, checkpoint)
        apply_retention(self._root, self._keep)

    def _guard(self, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # told by the next call, in the thread that can act on it
                self._error = error

        return run

    def _copy(self, tensors: Tensors) -> Tensors:
        """The values in memory of our own, which is reused: fresh pages cost as much as the copying."""
        is_pinned = any(tensor.is_cuda for group in tensors.values() for tensor in group.values())
        copies: Tensors = {}
        for group, named in tensors.items():
            old = self._copies.get(group, {})
            copies[group] = {name: _copy_into(old.get(name), tensor, is_pinned) for name, tensor in named.items()}
        if is_pinned:
            torch.cuda.synchronize()
        self._copies = copies
        return copies


def _copy_into(buffer: Tensor | None, tensor: Tensor, is_pinned: bool) -> Tensor:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
    return buffer.copy_(tensor.detach(), non_blocking=is_pinned)
