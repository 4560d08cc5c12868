"""Reading a clip our way against the way of the published training codes, on the same files in turns within one run.

Ours decodes from the key frame before the first frame wanted and scales each wanted frame inside the decoder. Theirs
decodes the whole file to full-size RGB, picks the frames, and scales them as floating-point tensors. Both use one
thread and give the same frames at the same size.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.bench.scan import write_moving_texture
from frameloom.core.errors import DataError
from frameloom.data.decode import DecodeWork, open_video, probe_clip, read_clip
from frameloom.data.frames import cover
from frameloom.data.transforms import resize_and_cut

# A usual request: 33 frames at the 256px size of 16:9, somewhere in a clip of a few seconds.
_FRAMES, _HEIGHT, _WIDTH = 33, 192, 336
_CLIP_FRAMES = 120


@dataclass(frozen=True)
class DecodeCase:
    """Median seconds per clip; `ratio` is how often ours reads it in the time of one reading of theirs."""

    name: str
    ours_s: float
    theirs_s: float
    ours_cpu_s: float
    theirs_cpu_s: float
    num_wanted: int
    num_decoded: int
    num_frames: int

    @property
    def ratio(self) -> float:
        return self.theirs_s / self.ours_s

    @property
    def cpu_ratio(self) -> float:
        return self.theirs_cpu_s / self.ours_cpu_s


@dataclass(frozen=True)
class DecodeComparison:
    cases: list[DecodeCase]
    rounds: int

    def to_json(self) -> dict[str, object]:
        cases = [{**asdict(case), "ratio": case.ratio, "cpu_ratio": case.cpu_ratio} for case in self.cases]
        return {"name": "scaled decode against decode-then-resize", "rounds": self.rounds, "cases": cases}

    def describe(self) -> list[str]:
        lines = [f"scaled decode against decode-then-resize, medians of {self.rounds} rounds"]
        for case in self.cases:
            lines += [
                f"{case.name}: {case.num_wanted} of {case.num_frames} frames wanted, {case.num_decoded} decoded",
                f"  ours    {case.ours_s * 1e3:9.1f} ms   processor {case.ours_cpu_s * 1e3:9.1f} ms",
                f"  theirs  {case.theirs_s * 1e3:9.1f} ms   processor {case.theirs_cpu_s * 1e3:9.1f} ms",
                f"  {case.ratio:.1f}x as fast (processor {case.cpu_ratio:.1f}x)",
            ]
        return lines


def compare_decode(rounds: int = 5, *, clips: Sequence[Path] = ()) -> DecodeComparison:
    """Both ways on a window of each of `clips`; without any, on made 720p: a window, every 4th frame, and all of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            wanted = [(path.name, path, _window(path)) for path in clips] or _make_cases(Path(folder))
            return DecodeComparison([_measure(*case, rounds) for case in wanted], rounds)
    finally:
        torch.set_num_threads(threads)


def _make_cases(folder: Path) -> list[tuple[str, Path, NDArray[np.int64]]]:
    path = write_moving_texture(folder / "clip.mp4", frames=_CLIP_FRAMES)
    return [
        ("a window", path, np.arange(_CLIP_FRAMES // 2, _CLIP_FRAMES // 2 + _FRAMES)),
        ("every 4th frame", path, np.arange(1, _CLIP_FRAMES, 4)),
        ("the whole clip", path, np.arange(_CLIP_FRAMES)),
    ]


def _window(path: Path) -> NDArray[np.int64]:
    """The middle of a file, where a random start falls on average."""
    num_frames = probe_clip(path).frames
    if num_frames < _FRAMES:
        raise DataError(f"{path}: {num_frames} frames; the comparison needs at least {_FRAMES}")
    start = (num_frames - _FRAMES) // 2
    return np.arange(start, start + _FRAMES)


def _measure(name: str, path: Path, indices: NDArray[np.int64], rounds: int) -> DecodeCase:
    work = DecodeWork()
    read_clip(path, indices=indices, height=_HEIGHT, width=_WIDTH, work=work)
    num_frames = probe_clip(path).frames

    def ours() -> None:
        read_clip(path, indices=indices, height=_HEIGHT, width=_WIDTH)

    def theirs() -> None:
        decode_then_resize(path, indices, _HEIGHT, _WIDTH)

    theirs()
    times = [(*_time(ours), *_time(theirs)) for _ in range(rounds)]
    ours_s, ours_cpu_s, theirs_s, theirs_cpu_s = (statistics.median(column) for column in zip(*times, strict=True))
    counts = (len(indices), work.num_decoded, num_frames)
    return DecodeCase(name, ours_s, theirs_s, ours_cpu_s, theirs_cpu_s, *counts)


def decode_then_resize(path: Path, indices: NDArray[np.int64], height: int, width: int) -> Tensor:
    """As Open-Sora 2.0 reads a clip: every frame to RGB at full size, then bilinear without antialiasing."""
    with open_video(path) as (container, stream):
        whole = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
    frames_FHWC = torch.stack(whole)
    picked_CFHW = frames_FHWC[torch.from_numpy(indices)].permute(3, 0, 1, 2)
    place = cover(picked_CFHW.shape[2], picked_CFHW.shape[3], height, width)
    return resize_and_cut(picked_CFHW, place, height, width, antialias=False)


def _time(work: Callable[[], None]) -> tuple[float, float]:
    """Wall and processor seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu
