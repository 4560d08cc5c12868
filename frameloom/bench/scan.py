"""Reading the header of a clip against decoding all of it, on the same files, in turns within one run."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from frameloom.core.random import numpy_stream
from frameloom.data.decode import read_clip
from frameloom.data.media import write_video
from frameloom.data.probe import probe_header

# A usual clip of the field: ten seconds of 720p.
_FRAMES, _HEIGHT, _WIDTH, _FPS = 300, 720, 1280, 30
_DECODED_PX = 64  # frames are scaled down inside the decoder, so that memory does not count


@dataclass(frozen=True)
class ScanCase:
    """Median seconds per file; `ratio` is how many headers are read in the time of one full decode."""

    name: str
    header_s: float
    decode_s: float
    header_cpu_s: float
    decode_cpu_s: float
    num_frames: int
    num_bytes: int

    @property
    def ratio(self) -> float:
        return self.decode_s / self.header_s

    def to_json(self) -> dict[str, float | str]:
        return {**asdict(self), "ratio": self.ratio, "cpu_ratio": self.decode_cpu_s / self.header_cpu_s}

    def describe(self) -> list[str]:
        return [
            f"{self.name}: {self.num_frames} frames, {self.num_bytes / 1e6:.1f} MB",
            f"  header       {self.header_s * 1e3:9.2f} ms   processor {self.header_cpu_s * 1e3:9.2f} ms",
            f"  full decode  {self.decode_s * 1e3:9.2f} ms   processor {self.decode_cpu_s * 1e3:9.2f} ms",
            f"  {self.ratio:.0f}x as fast (processor {self.decode_cpu_s / self.header_cpu_s:.0f}x)",
        ]


@dataclass(frozen=True)
class ScanComparison:
    cases: list[ScanCase]
    rounds: int

    def to_json(self) -> dict[str, object]:
        return {"rounds": self.rounds, "cases": [case.to_json() for case in self.cases]}

    def describe(self) -> list[str]:
        title = f"header scan against full decode, medians of {self.rounds} rounds"
        return [title, *(line for case in self.cases for line in case.describe())]


def compare_scan(rounds: int = 5, *, clips: Sequence[Path] = (), headers_per_round: int = 10) -> ScanComparison:
    """Both ways on each of `clips`, or on a made one of 300 frames of 720p; a round is one decode and many headers."""
    with tempfile.TemporaryDirectory() as folder:
        paths = clips or [write_moving_texture(Path(folder) / "made clip.mp4")]
        return ScanComparison([_measure(path, rounds, headers_per_round) for path in paths], rounds)


def _measure(path: Path, rounds: int, headers_per_round: int) -> ScanCase:
    facts = probe_header(path)

    def decode() -> None:
        read_clip(path, indices=range(facts.frames), height=_DECODED_PX, width=_DECODED_PX)

    def read_headers() -> None:
        for _ in range(headers_per_round):
            probe_header(path)

    read_headers()
    times = [(*_time(read_headers), *_time(decode)) for _ in range(rounds)]
    header, header_cpu, whole, whole_cpu = (statistics.median(column) for column in zip(*times, strict=True))
    return ScanCase(
        name=path.name,
        header_s=header / headers_per_round,
        decode_s=whole,
        header_cpu_s=header_cpu / headers_per_round,
        decode_cpu_s=whole_cpu,
        num_frames=facts.frames,
        num_bytes=path.stat().st_size,
    )


def write_moving_texture(path: Path, *, frames: int = _FRAMES, height: int = _HEIGHT, width: int = _WIDTH) -> Path:
    """A clip with detail and motion everywhere, as film has: a flat one would decode too fast to be fair."""
    coarse = numpy_stream(0, "bench texture").integers(0, 256, size=(height // 8 + 1, (width + frames) // 8 + 1, 3))
    texture = np.kron(coarse, np.ones((8, 8, 1))).astype(np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(texture, width, axis=1)
    clip_FHWC = windows[:height, :frames].transpose(1, 0, 3, 2)
    write_video(path, clip_FHWC, _FPS, crf=23, preset="veryfast")
    return path


def _time(work: Callable[[], None]) -> tuple[float, float]:
    """Wall and processor seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu
