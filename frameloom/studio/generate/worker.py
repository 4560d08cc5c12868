"""Worker process that samples for the studio: jobs in, events out; one model stays loaded between them.

Lines of JSON on standard input: {"id": 3, "model": …, "request": {…}, "num": 1} is a job, {"cancel": 3} ends it between
two steps. Events on standard output have the id and one of: loading, step, done (with files), cancelled, failed (with a
message). The process works in the studio's folder, where paths in recipes start. It ends when its input does.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from frameloom.config.schema.sampling import MEDIA
from frameloom.core.errors import FrameloomError
from frameloom.core.files import digest_value
from frameloom.core.logging import set_up_logging
from frameloom.sampling.load import RECIPE, load_model
from frameloom.sampling.pipeline import Pipeline
from frameloom.sampling.request import check_media, make_request
from frameloom.studio.generate.requests import OUT, label_of

Event = dict[str, Any]


class Cancelled(Exception):
    """The user cancelled the job."""


class Worker:
    """Runs jobs one by one; a thread reads the stream, so that a cancellation arrives while a job runs.

    The last model stays loaded until another one is asked for or its files change.
    """

    def __init__(self, stream: TextIO, send: Callable[[Event], None]) -> None:
        self._stream, self._send = stream, send
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._is_over = False
        self._number = 0
        self._model_key = ""
        self._pipeline: Pipeline | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stream:
            message = json.loads(line)
            if "cancel" in message:
                self._cancelled.add(message["cancel"])
            else:
                self._waiting.put(message)
        self._is_over = True
        self._waiting.put(None)

    def serve(self) -> None:
        """Run all jobs; one that fails does not end the process."""
        from frameloom.sampling.batch import run_job
        from frameloom.training.logging.trackers import is_resource_error

        while (job := self._waiting.get()) is not None:
            self._number, model = job["id"], Path(job["model"])
            try:
                self._refuse_cancelled()
                request = make_request(job["request"], where="Form")
                check_media({label_of(name): getattr(request, name) for name in MEDIA})
                files = run_job(partial(self._open, model), [request], Path(OUT), num=job["num"], on_step=self._on_step)
                self._report("done", files=[path.as_posix() for path in files])
            except Cancelled:
                self._report("cancelled")
            except FrameloomError as error:
                self._report("failed", message=str(error))
            except Exception as error:  # a bug or too little memory: reported, logged, and the next job is run
                traceback.print_exc()
                first = str(error).partition("\n")[0]
                message = f"an error that should not happen: {type(error).__name__}: {first}"
                if is_resource_error(error):
                    message = "memory or disk space ran out; ask for fewer frames or a smaller size"
                self._report("failed", message=message)
                self._drop_model()

    def _report(self, kind: str, **values: Any) -> None:
        self._send({"id": self._number, "event": kind, **values})

    def _on_step(self, count: int) -> None:
        self._report("step", count=count)
        self._refuse_cancelled()

    def _refuse_cancelled(self) -> None:
        if self._is_over or self._number in self._cancelled:
            raise Cancelled

    def _open(self, path: Path) -> Pipeline:
        patterns = (RECIPE, f"../{RECIPE}", "checkpoints/step-*/state.json", "config.json", "export/config.json")
        stamps = []
        for file in (file for pattern in (*patterns, "*.safetensors") for file in sorted(path.glob(pattern))):
            with suppress(OSError):  # a run that still trains deletes old checkpoints
                status = file.stat()
                stamps.append((str(file), status.st_mtime_ns, status.st_size))
        key = digest_value([str(path), stamps])
        if self._pipeline is None or key != self._model_key:
            self._drop_model()
            self._report("loading")
            self._pipeline, self._model_key = load_model(path), key
        return self._pipeline

    def _drop_model(self) -> None:
        """Free the model before another one takes its place."""
        self._pipeline, self._model_key = None, ""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    """Events have their own channel: what a library prints goes to the log."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    set_up_logging()

    def send(event: Event) -> None:
        channel.write(json.dumps(event) + "\n")
        channel.flush()

    try:
        Worker(sys.stdin, send).serve()
    except BrokenPipeError:
        # The studio has ended.
        os._exit(1)


if __name__ == "__main__":
    main()
