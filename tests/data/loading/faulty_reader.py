"""A reader that fails in a chosen way at one row; in a module of its own so that worker processes can import it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

from frameloom.core.errors import MissingExtra
from frameloom.data.loading.batch import Batch, BatchRequest, OnOpen, ignore_open
from frameloom.data.loading.reader import BatchReader, Sample


class FaultyReader(BatchReader):
    fault = ""
    row = -1
    flag: Path | None = None
    """a file that is removed at the first failure, after which all is well"""

    def read_sample(self, row: int, *args, **kwargs) -> Sample:
        if row == self.row and self._is_due():
            self.fail()
        return super().read_sample(row, *args, **kwargs)

    def read(self, request: BatchRequest, on_open: OnOpen = ignore_open) -> Batch:
        batch = super().read(request, on_open)
        if self.fault == "between" and self.row in request.rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    def __setstate__(self, state: dict) -> None:
        if state.get("fault") == "start":
            os._exit(3)
        self.__dict__.update(state)

    def _is_due(self) -> bool:
        if self.flag is None:
            return True
        exists = self.flag.exists()
        self.flag.unlink(missing_ok=True)
        return exists

    def fail(self) -> None:
        if self.fault == "hang":
            time.sleep(600)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "segfault":
            ctypes.string_at(0)
        if self.fault == "raise":
            raise KeyError("a mistake of ours")
        if self.fault == "extra":
            raise MissingExtra("a package", "its name")
