"""A run's folder: its lock, resolved recipe, metrics, checkpoints and export.

runs/<name>/recipe.yaml  versions.json  metrics.jsonl  bad_clips.jsonl  rows.parquet  lock
            tensorboard/  checkpoints/step-…/  samples/  export/
"""

from __future__ import annotations

import fcntl
import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch

from frameloom.checkpoint.model_folder import EXPORT
from frameloom.checkpoint.reader import step_folder
from frameloom.config.loading.render import render_yaml
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import RunError
from frameloom.core.files import PARTIAL, remove_partial, write_json, write_text
from frameloom.core.logging import get_logger
from frameloom.core.text_files import parse_record, read_lines
from frameloom.core.version import VERSION

_log = get_logger(__name__)


class RunFolder:
    """Paths of one run, and what is written there besides checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.bad_clips = path / "bad_clips.jsonl"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"
        self.export = path / EXPORT
        self.rows = path / "rows.parquet"

    @property
    def has_trained(self) -> bool:
        """Whether a step has left something here: its metrics, samples, a damaged checkpoint, a finished model."""
        has_logged = self.metrics.is_file() and self.metrics.stat().st_size > 0
        has_drawn = any(folder != step_folder(self.samples, 0) for folder in self.samples.glob("step-*"))
        return has_logged or has_drawn or self.export.exists() or any(self.checkpoints.glob("damaged-*"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; a second process is refused. The lock of a dead process counts for nothing."""
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            if self.checkpoints.is_dir():  # whether the run can write is found out now, and not at its first save
                probe = self.checkpoints / f"{PARTIAL}probe-{os.getpid()}"
                probe.mkdir()
                probe.rmdir()
            opened = (self.path / "lock").open("a+")
        with opened as file:
            self._take(file)
            remove_partial(self.path)
            remove_partial(self.samples)
            try:
                yield
            finally:
                # A name that is still there was left by a process that died.
                file.truncate(0)
                # A start that was refused leaves no folder behind; a lock is harmless to remove while it is held.
                if [path.name for path in self.path.iterdir()] == ["lock"]:
                    (self.path / "lock").unlink()
                    self.path.rmdir()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{error.filename or self.path}: cannot be written ({error.strerror}), and a run saves there; give "
                "yourself the right to write, make room, or choose another --run.folder"
            ) from error

    def _take(self, file: TextIO) -> None:
        """Lock the file and write our name into it; the system frees the lock of a process that is gone."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise RunError(
                f"{self.path}: in use by {holder}; wait for it, stop it, or choose another --name"
            ) from error
        except OSError as error:
            _log.warning("%s: its file system has no locks (%s); see to it that only one run uses it", self.path, error)
        file.seek(0)
        if holder := file.read().strip():
            _log.info("%s: the lock of %s, which is gone, is taken over", self.path, holder)
        with self._writing():
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())

    def write_recipe(self, recipe: Recipe) -> None:
        """Save the resolved recipe and the versions of this start."""
        write_text(self.recipe, render_yaml(recipe))
        write_json(self.path / "versions.json", versions())

    def trim_metrics(self, step: int) -> None:
        """Drop metrics after `step`: the resumed run writes those lines again, equal to the bit."""
        lines = read_lines(self.metrics)
        records = [parse_record(line) for line in lines]
        if num_damaged := sum(record is None for record in records[:-1]):
            _log.warning("%s: %d damaged lines are dropped", self.metrics, num_damaged)
        kept = [line for line, found in zip(lines, records, strict=True) if found is not None and found["step"] <= step]
        if len(kept) != len(lines):
            write_text(self.metrics, "".join(kept))


def versions() -> dict[str, str]:
    return {"frameloom": VERSION, "torch": torch.__version__, "python": platform.python_version()}
