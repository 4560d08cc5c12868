"""Trackers that keep runs by project: wandb and trackio, both optional.

A run keeps the id that it got at its first start in `trackers.json` of its folder, so a resumed run goes on there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from frameloom.core.errors import MissingExtra, RunError
from frameloom.core.files import write_json
from frameloom.train.trackers import Media, TrackedRun

IDS = "trackers.json"


def import_tracker(name: str) -> Any:
    """The package of a tracker; MissingExtra if it, or something that it needs, is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = name if error.name == name else f"{error.name}, which {name} needs,"
        raise MissingExtra(f"run.trackers: {missing}", name) from error


def keep_id(folder: Path, tracker: str) -> str:
    """The id of this run in a tracker: made once and kept with the run."""
    path = folder / IDS
    try:
        ids = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise RunError(f"{path}: is damaged ({error}); remove it to start a new run in the trackers") from error
    if tracker not in ids:
        ids[tracker] = uuid4().hex[:8]
        write_json(path, ids)
    return str(ids[tracker])


class WandbTracker:
    """Files are written to `wandb/` in the run folder; steps after the resumed one are drawn over, not deleted."""

    def __init__(self, run: TrackedRun) -> None:
        self._wandb = import_tracker("wandb")
        settings = run.settings
        try:
            self._run = self._wandb.init(
                project=settings.project,
                name=settings.name or run.name,
                id=keep_id(run.folder, "wandb"),
                tags=list(settings.tags),
                config=dict(run.config),
                dir=str(run.folder.absolute()),
                mode="offline" if settings.offline else None,
                resume="allow",
            )
        except self._wandb.errors.Error as error:
            raise RunError(
                f"run.trackers: wandb does not start ({error}); call `wandb login`, or set run.tracking.offline: true"
            ) from error
        # Our own axis: a resumed run may log a step again, which wandb's own counter would refuse.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def log_media(self, step: int, media: Sequence[Media]) -> None:
        self._run.log({"step": step, **{item.name: self._wrap(item) for item in media}})

    def _wrap(self, item: Media) -> Any:
        if item.fps is None:
            return self._wandb.Image(str(item.path), caption=item.caption or None)
        return self._wandb.Video(str(item.path), caption=item.caption or None, format="mp4")

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """trackio knows runs by their name within a project and keeps them on this machine unless it is told otherwise."""

    def __init__(self, run: TrackedRun) -> None:
        self._trackio = import_tracker("trackio")
        settings, name = run.settings, run.settings.name or run.name
        self._run = self._trackio.init(
            project=settings.project,
            # Another run folder may use the same name, so the id is part of it.
            name=f"{name}-{keep_id(run.folder, 'trackio')}",
            config={**run.config, "tags": ", ".join(settings.tags)},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log({key: value for key, value in values.items() if math.isfinite(value)}, step=step)

    def log_media(self, step: int, media: Sequence[Media]) -> None:
        self._trackio.log({item.name: self._wrap(item) for item in media}, step=step)

    def _wrap(self, item: Media) -> Any:
        kind = self._trackio.Image if item.fps is None else self._trackio.Video
        return kind(str(item.path), caption=item.caption or None)

    def close(self) -> None:
        self._trackio.finish()
