"""A run's folder: its lock, resolved recipe, metrics, checkpoints and export.

runs/<name>/recipe.yaml  versions.json  metrics.jsonl  bad_clips.jsonl  lock
            tensorboard/  checkpoints/step-…/  samples/  export/
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import frameloom
from frameloom.checkpoint.model_folder import EXPORT
from frameloom.config.load import load_recipe
from frameloom.config.render import render_yaml
from frameloom.config.schema import Recipe
from frameloom.core.errors import RunError
from frameloom.core.files import remove_partial, write_json, write_text
from frameloom.core.log import get_logger

_log = get_logger(__name__)

# Keys that may change between two starts of one run without a word: they cannot change what is learnt.
_FREE = (
    "run.",
    "data.workers",
    "data.timeout_s",
    "data.bad_limit",
    "train.log_every",
    "train.save_every",
    "train.keep",
    "sample.",
    "validation.samples",
    "parallel.zero",
    "parallel.replicate",
    "parallel.shard",
    "parallel.sequence",
    "parallel.tensor",
    "parallel.encoders",
    "parallel.timeout_s",
)


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

    @property
    def is_used(self) -> bool:
        return self.checkpoints.is_dir()

    @property
    def has_trained(self) -> bool:
        """Whether a step was ever logged here or a checkpoint was found damaged."""
        return (self.metrics.is_file() and self.metrics.stat().st_size > 0) or any(self.checkpoints.glob("damaged-*"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; a second process is refused. The lock of a dead process counts for nothing."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise RunError(
                    f"{self.path}: in use by {holder}; wait for it, stop it, or choose another --name"
                ) from error
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            remove_partial(self.path)
            remove_partial(self.samples)
            try:
                yield
            finally:
                self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        """A start that was refused leaves no folder behind; a lock is harmless to remove while it is held."""
        if [path.name for path in self.path.iterdir()] == ["lock"]:
            (self.path / "lock").unlink()
            self.path.rmdir()

    def write_recipe(self, recipe: Recipe) -> None:
        """Save the resolved recipe and the versions; say which fields differ from the start before."""
        if self.recipe.is_file():
            for line in recipe_changes(load_recipe(self.recipe, []), recipe):
                _log.warning("%s: changed since the last start: %s", self.path, line)
        write_text(self.recipe, render_yaml(recipe))
        write_json(self.path / "versions.json", versions())

    def trim_metrics(self, step: int) -> None:
        """Drop metrics after `step`: the resumed run writes those lines again, equal to the bit."""
        if not self.metrics.is_file():
            return
        lines = self.metrics.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        if len(kept) != len(lines):
            write_text(self.metrics, "".join(kept))


def versions() -> dict[str, str]:
    return {"frameloom": frameloom.__version__, "torch": torch.__version__, "python": platform.python_version()}


def recipe_changes(before: Recipe, after: Recipe) -> list[str]:
    """`key: old -> new` for every field that differs and matters."""
    old, new = _flatten(before.model_dump(mode="json")), _flatten(after.model_dump(mode="json"))
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(_FREE)
    ]


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix.removesuffix("."): value}
    return {key: leaf for name, part in value.items() for key, leaf in _flatten(part, f"{prefix}{name}.").items()}
