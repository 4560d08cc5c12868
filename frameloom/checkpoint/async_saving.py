"""Saving checkpoints in the background: a step waits for a copy in host memory, a thread writes it.

With several processes, the threads of all use a process group of their own, never the one that gradients travel on.
Each process writes its files and sends their digests to the first one, which renames the folder when it has all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from frameloom.checkpoint.reader import Checkpoint
from frameloom.checkpoint.retention import apply_retention
from frameloom.checkpoint.writer import Save, Writer
from frameloom.distributed.context import Collective

Files = dict[str, dict[str, Tensor]]


class Saver:
    """Saves one checkpoint at a time and keeps the newest `keep`; all processes of `collective` call it alike.

    In the background, a save returns when the tensors are copied; the copies stay for the next save. An error of the
    thread is raised by the next call, on every process; `on_error` is called at once, in the thread. What is on disk
    is complete or absent in any case.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        *,
        in_background: bool = False,
        collective: Collective | None = None,
        on_error: Callable[[], object] = lambda: None,
    ) -> None:
        self._root = root
        self._keep = keep
        self._in_background = in_background
        self._collective = collective or Collective()
        self._on_error = on_error
        self._writer = Writer(root, self._collective)
        self._copies: Files = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        self.wait()
        save = self._writer.begin(checkpoint)
        if save is None:
            return
        if not self._in_background:
            self._write(save)
            return
        try:
            copied = replace(save, files=self._copy(save.files))
        except BaseException as error:
            save.held.__exit__(type(error), error, error.__traceback__)
            raise
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

    def _write(self, save: Save) -> None:
        self._writer.finish(save)
        if self._collective.is_first:
            apply_retention(self._root, self._keep)

    def _guard(self, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised by the next call, in the thread that can act on it
                self._error = error
                self._on_error()

        return run

    def _copy(self, files: Files) -> Files:
        """The values in memory of our own, which is reused: fresh pages cost as much as the copying."""
        is_pinned = any(tensor.is_cuda for named in files.values() for tensor in named.values())
        copies: Files = {}
        for file, named in files.items():
            old = self._copies.get(file, {})
            copies[file] = {name: _copy_into(old.get(name), tensor, is_pinned) for name, tensor in named.items()}
        if is_pinned:
            torch.cuda.synchronize()
        self._copies = copies
        return copies


def _copy_into(buffer: Tensor | None, tensor: Tensor, is_pinned: bool) -> Tensor:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
    return buffer.copy_(tensor.detach(), non_blocking=is_pinned)
