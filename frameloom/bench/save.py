"""How long a step waits for a checkpoint: written at once, or copied and written in the background."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from frameloom.checkpoint.background import Saver
from frameloom.checkpoint.store import Checkpoint
from frameloom.core.random import stream

_NUM_TENSORS = 125
_MIB = 2**20


@dataclass(frozen=True)
class SaveComparison:
    """Median seconds that a save holds a step up, and how long the background writing took after that."""

    name: str
    background_s: float
    direct_s: float
    writing_s: float
    share: float
    rounds: int

    def to_json(self) -> dict[str, float | str]:
        return asdict(self)

    def describe(self) -> list[str]:
        return [
            f"{self.name}, {self.rounds} rounds in turn",
            f"  in the background  {self.background_s * 1e3:8.1f} ms (then {self.writing_s * 1e3:.0f} ms of writing)",
            f"  at once            {self.direct_s * 1e3:8.1f} ms",
            f"  a step waits {self.share:.1%} of a direct save, median of the rounds",
        ]


def compare_save(rounds: int = 5, megabytes: int = 500) -> SaveComparison:
    """Both ways in turn, on a state of `megabytes`; the first save of each is not counted."""
    generator = stream(0, "state")
    count = megabytes * _MIB // 4 // _NUM_TENSORS
    tensors = {f"weight {index}": torch.randn(count, generator=generator) for index in range(_NUM_TENSORS)}
    with tempfile.TemporaryDirectory() as folder:
        background = Saver(Path(folder) / "background", 1, in_background=True)
        direct = Saver(Path(folder) / "direct", 1)
        times = [_time_round(background, direct, tensors, step) for step in range(rounds + 1)][1:]
    waits, writes, directs = zip(*times, strict=True)
    return SaveComparison(
        f"checkpoint of {megabytes} MB",
        statistics.median(waits),
        statistics.median(directs),
        statistics.median(writes),
        statistics.median(wait / direct for wait, direct in zip(waits, directs, strict=True)),
        rounds,
    )


def _time_round(
    background: Saver, direct: Saver, tensors: dict[str, torch.Tensor], step: int
) -> tuple[float, float, float]:
    checkpoint = Checkpoint(step, {"model": tensors}, {})
    started = time.perf_counter()
    background.save(checkpoint)
    copied = time.perf_counter()
    background.wait()
    written = time.perf_counter()
    direct.save(checkpoint)
    return copied - started, written - copied, time.perf_counter() - written
