"""Where metrics, pictures and clips of a run go. All take up after a resume: the same run, without double entries
where the tracker can drop them.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from frameloom.config.tracking_settings import TrackingSection


@dataclass(frozen=True)
class Media:
    """A finished png or mp4 file. A clip has its frames (uint8) and its rate beside it, a picture has no rate."""

    name: str
    path: Path
    frames_FHWC: NDArray[np.uint8] | None = None
    fps: float | None = None
    caption: str = ""


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def log_media(self, step: int, media: Sequence[Media]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """What trackers are told of a run: its folder, where it starts now, and how it shall be shown."""

    folder: Path
    name: str
    first_step: int
    config: Mapping[str, Any]
    settings: TrackingSection


class JsonlTracker:
    """One JSON object per record; a value that is not finite is written as null, so every line is valid JSON."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def log_media(self, step: int, media: Sequence[Media]) -> None:
        """Files stay where they are: in the run folder, by step."""

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Scalars, pictures and moving pictures for `tensorboard --logdir`; entries after the resumed step are purged."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def log_media(self, step: int, media: Sequence[Media]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for item in media:
            if item.frames_FHWC is not None and item.fps is not None:
                # Encoded by us: the writer's own function for clips needs a package that nothing else here does.
                encoded = encode_gif(item.frames_FHWC, item.fps)
            else:
                encoded = item.path.read_bytes()
            with Image.open(io.BytesIO(encoded)) as image:
                width, height = image.size
            picture = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
            summary = Summary(value=[Summary.Value(tag=item.name, image=picture)])
            self._writer._get_file_writer().add_summary(summary, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()


def encode_gif(frames_FHWC: NDArray[np.uint8], fps: float) -> bytes:
    """A clip as an endless moving picture, which is all the motion that TensorBoard shows."""
    first, *rest = [Image.fromarray(np.ascontiguousarray(frame)) for frame in frames_FHWC]
    file = io.BytesIO()
    first.save(file, format="GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)
    return file.getvalue()


def build_trackers(names: Sequence[str], run: TrackedRun, *, metrics: Path, tensorboard: Path) -> list[Tracker]:
    """The trackers of a recipe, each once; MissingExtra names the extra of one that is not installed."""
    from frameloom.train.hosted_trackers import TrackioTracker, WandbTracker

    build: dict[str, Any] = {
        "jsonl": lambda: JsonlTracker(metrics),
        "tensorboard": lambda: TensorBoardTracker(tensorboard, run.first_step),
        "wandb": lambda: WandbTracker(run),
        "trackio": lambda: TrackioTracker(run),
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
