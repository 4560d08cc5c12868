"""Trackers of metrics, pictures and clips: JSON lines, TensorBoard, wandb and trackio.

A resumed run continues in each tracker, without duplicate entries where the tracker can drop them. For wandb and
trackio, both optional, the run's id there is kept in `trackers.json` of its folder.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import MissingExtra, RunError
from frameloom.core.files import write_json
from frameloom.core.logging import get_logger
from frameloom.data.media.writing import write_gif
from frameloom.training.run.folder import RunFolder

IDS = "trackers.json"
_log = get_logger(__name__)
_RESOURCES = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def is_resource_error(error: BaseException) -> bool:
    """Whether memory, disk space or file handles ran out, which may be different at the next step."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in _RESOURCES
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


@contextmanager
def log_resource_errors(lost: str, level: int = logging.ERROR) -> Iterator[None]:
    """A resource error in the block is logged with what is `lost`; any other error ends the run."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_resource_error(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        _log.log(level, "%s, for lack of resources (%s); training goes on", lost, reason)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Media:
    """A finished png or mp4 file. A clip has its frames (uint8) and its rate beside it, a picture has no rate."""

    name: str
    path: Path
    frames_FHWC: NDArray[np.uint8] | None = None
    fps: float | None = None
    caption: str = ""


class Tracker(ABC):
    """A resource error loses what was logged and is reported once; training continues."""

    name: str
    _has_warned = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try(f"step {step}", lambda: self._log(step, values))

    def log_media(self, step: int, media: Sequence[Media]) -> None:
        self._try(f"step {step}", lambda: self._log_media(step, media))

    def close(self) -> None:
        self._try("at the end", self._close)

    def _try(self, when: str, act: Callable[[], object]) -> None:
        is_done, level = False, logging.DEBUG if self._has_warned else logging.ERROR
        with log_resource_errors(f"{when}: nothing more for the tracker '{self.name}'", level):
            act()
            is_done = True
        self._has_warned |= not is_done

    @abstractmethod
    def _log(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _log_media(self, step: int, media: Sequence[Media]) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


class JsonlTracker(Tracker):
    """One JSON object per record; a value that is not finite is written as null, so every line is valid JSON."""

    name = "jsonl"

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        """A line is there as a whole or, on a full disk, not at all."""
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        line = (json.dumps({"step": step, **finite}) + "\n").encode()
        size = os.fstat(self._file.fileno()).st_size
        written = self._file.write(line)
        if written != len(line):
            self._file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)

    def _log_media(self, step: int, media: Sequence[Media]) -> None:
        """The files are in the run folder."""

    def _close(self) -> None:
        self._file.close()


class TensorBoardTracker(Tracker):
    """Scalars, pictures and moving pictures for `tensorboard --logdir`; entries after the resumed step are purged."""

    name = "tensorboard"

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def _log_media(self, step: int, media: Sequence[Media]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for item in media:
            if item.frames_FHWC is not None and item.fps is not None:
                # Encoded by us: the writer's own function for clips needs a package that nothing else here does.
                buffer = io.BytesIO()
                write_gif(buffer, item.frames_FHWC, item.fps)
                encoded = buffer.getvalue()
            else:
                encoded = item.path.read_bytes()
            with Image.open(io.BytesIO(encoded)) as image:
                width, height = image.size
            picture = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
            summary = Summary(value=[Summary.Value(tag=item.name, image=picture)])
            self._writer._get_file_writer().add_summary(summary, step)  # type: ignore[no-untyped-call]

    def _close(self) -> None:
        self._writer.close()


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


class WandbTracker(Tracker):
    """Files are written to `wandb/` in the run folder; steps after the resumed one are drawn over, not deleted."""

    name = "wandb"

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._wandb = import_tracker("wandb")
        settings = recipe.run.tracking
        try:
            self._run = self._wandb.init(
                **settings.model_dump(include={"project"}),
                name=settings.name or recipe.name,
                id=keep_id(folder, "wandb"),
                tags=list(settings.tags),
                config=recipe.model_dump(mode="json"),
                dir=str(folder.absolute()),
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

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def _log_media(self, step: int, media: Sequence[Media]) -> None:
        files: dict[str, Any] = {}
        for item in media:
            kind, more = (self._wandb.Image, {}) if item.fps is None else (self._wandb.Video, {"format": "mp4"})
            files[item.name] = kind(str(item.path), caption=item.caption or None, **more)
        self._run.log({"step": step, **files})

    def _close(self) -> None:
        self._run.finish()


class TrackioTracker(Tracker):
    """trackio knows runs by their name within a project and keeps them on this machine by default."""

    name = "trackio"

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._trackio = import_tracker("trackio")
        settings = recipe.run.tracking
        self._run = self._trackio.init(
            **settings.model_dump(include={"project"}),
            # Another run folder may use the same name, so the id is part of it.
            name=f"{settings.name or recipe.name}-{keep_id(folder, 'trackio')}",
            config={**recipe.model_dump(mode="json"), "tags": ", ".join(settings.tags)},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
        )

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log({key: value for key, value in values.items() if math.isfinite(value)}, step=step)

    def _log_media(self, step: int, media: Sequence[Media]) -> None:
        files: dict[str, Any] = {}
        for item in media:
            kind = self._trackio.Image if item.fps is None else self._trackio.Video
            files[item.name] = kind(str(item.path), caption=item.caption or None)
        self._trackio.log(files, step=step)

    def _close(self) -> None:
        self._trackio.finish()


def build_trackers(names: Sequence[str], recipe: Recipe, folder: RunFolder, first_step: int) -> list[Tracker]:
    """The trackers of a recipe, each once; MissingExtra names the extra of one that is not installed."""
    build: dict[str, Any] = {
        "jsonl": lambda: JsonlTracker(folder.metrics),
        "tensorboard": lambda: TensorBoardTracker(folder.tensorboard, first_step),
        "wandb": lambda: WandbTracker(recipe, folder.path),
        "trackio": lambda: TrackioTracker(recipe, folder.path),
    }
    trackers: list[Tracker] = []
    try:
        for name in dict.fromkeys(names):
            trackers.append(build[name]())
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers
