"""Where metrics go: a JSON line per record, and TensorBoard. Both take up after a resume without double entries."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def log_images(self, step: int, name: str, image_HWC: Tensor) -> None: ...
    def close(self) -> None: ...


class JsonlTracker:
    """One JSON object per record; a value that is not finite is written as null, so every line is valid JSON."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def log_images(self, step: int, name: str, image_HWC: Tensor) -> None:
        """Pictures do not go into a text file."""

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Scalars and pictures for `tensorboard --logdir`; entries after the resumed step are purged."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def log_images(self, step: int, name: str, image_HWC: Tensor) -> None:
        self._writer.add_image(name, image_HWC.to(torch.uint8), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


def build_trackers(names: Sequence[str], *, metrics: Path, tensorboard: Path, first_step: int) -> list[Tracker]:
    trackers: list[Tracker] = []
    if "jsonl" in names:
        trackers.append(JsonlTracker(metrics))
    if "tensorboard" in names:
        trackers.append(TensorBoardTracker(tensorboard, first_step))
    return trackers
