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


class Jobs:
    """Jobs from a stream, read by a separate thread so that a cancellation arrives while one runs.

    `waiting` ends with None.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._is_over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stream:
            message = json.loads(line)
            if "cancel" in message:
                self._cancelled.add(message["cancel"])
            else:
                self.waiting.put(message)
        self._is_over = True
        self.waiting.put(None)

    def check(self, number: int) -> None:
        if self._is_over or number in self._cancelled:
            raise Cancelled


class ModelCache:
    """The last model, loaded again when its files have changed; `on_load` is called before that."""

    def __init__(self, on_load: Callable[[], object] = lambda: None) -> None:
        self._on_load = on_load
        self._key = ""
        self._pipeline: Pipeline | None = None

    def open(self, path: Path) -> Pipeline:
        patterns = (RECIPE, f"../{RECIPE}", "checkpoints/step-*/state.json", "config.json", "export/config.json")
        files = [file for pattern in (*patterns, "*.safetensors") for file in sorted(path.glob(pattern))]
        key = digest_value([str(path), [_stamp(file) for file in files]])
        if self._pipeline is None or key != self._key:
            self.drop()
            self._on_load()
            self._pipeline, self._key = load_model(path), key
        return self._pipeline

    def drop(self) -> None:
        """Free the model before another one takes its place."""
        self._pipeline, self._key = None, ""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _stamp(path: Path) -> tuple[str, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # a run that still trains has deleted an old checkpoint meanwhile
    return str(path), status.st_mtime_ns, status.st_size


def serve(jobs: Jobs, send: Callable[[Event], None]) -> None:
    """Run jobs one by one; a job that fails does not end the process."""
    from frameloom.sampling.batch import run_job

    number = 0

    def report(kind: str, **values: Any) -> None:
        send({"id": number, "event": kind, **values})

    def on_step(count: int) -> None:
        report("step", count=count)
        jobs.check(number)

    models = ModelCache(lambda: report("loading"))
    while (job := jobs.waiting.get()) is not None:
        number, model = job["id"], Path(job["model"])
        try:
            jobs.check(number)
            request = make_request(job["request"], where="Form")
            check_media({label_of(name): getattr(request, name) for name in MEDIA})
            files = run_job(partial(models.open, model), [request], Path(OUT), num=job["num"], on_step=on_step)
            report("done", files=[path.as_posix() for path in files])
        except Cancelled:
            report("cancelled")
        except FrameloomError as error:
            report("failed", message=str(error))
        except Exception as error:  # a bug or too little memory: reported, logged, and the next job is taken
            traceback.print_exc()
            report("failed", message=_explain(error))
            models.drop()


def _explain(error: Exception) -> str:
    from frameloom.training.logging.trackers import is_resource_error

    if is_resource_error(error):
        return "memory or disk space ran out; ask for fewer frames or a smaller size"
    first = str(error).partition("\n")[0]
    return f"an error that should not happen: {type(error).__name__}: {first}"


def main() -> None:
    """Events have their own channel: what a library prints goes to the log."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    set_up_logging()

    def send(event: Event) -> None:
        channel.write(json.dumps(event) + "\n")
        channel.flush()

    try:
        serve(Jobs(sys.stdin), send)
    except BrokenPipeError:
        # The studio has ended; nobody reads events any more.
        os._exit(1)


if __name__ == "__main__":
    main()
