"""Reading the header of a clip against decoding all of it, and against other readers' way to its length."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from frameloom.bench.harness import Effort, Row, Work, attempt, compare_times, take_turns
from frameloom.bench.peers import load_peer
from frameloom.core.random import numpy_stream
from frameloom.data.decode import read_clip
from frameloom.data.media import write_video
from frameloom.data.probe import probe_header

# A usual clip of the field: ten seconds of 720p.
_FRAMES, _HEIGHT, _WIDTH, _FPS = 300, 720, 1280, 30
_DECODED_PX = 64  # frames are scaled down inside the decoder, so that memory does not count
_HEADERS = 10  # read in a round


def measure(effort: Effort, *, clips: Sequence[Path] = ()) -> Iterator[Row]:
    """Each of `clips`, or a made one of 300 frames of 720p; a round is many headers against one reading of others."""
    with tempfile.TemporaryDirectory() as folder:
        for path in clips or [write_moving_texture(Path(folder) / "720p.mp4", frames=effort.pick(_FRAMES, 60))]:
            facts = probe_header(path)
            note = f"{facts.frames} frames, {path.stat().st_size / 1e6:.1f} MB"
            for against, build in WAYS.items():
                yield from attempt("scan", path.name, _measure, path, build, against, note, effort)


def _measure(path: Path, build: Callable[[Path], Work], against: str, note: str, effort: Effort) -> Row:
    other = build(path)

    def read_headers() -> None:
        for _ in range(_HEADERS):
            probe_header(path)

    times = take_turns({"ours": read_headers, "other": other}, effort.rounds)
    row = compare_times("scan", f"header of {path.name}", times["ours"], times["other"], against=against, note=note)
    assert row.ours is not None and row.ours_cpu_s is not None and row.ratio is not None
    changes = {"ours": row.ours / _HEADERS, "ours_cpu_s": row.ours_cpu_s / _HEADERS, "ratio": row.ratio * _HEADERS}
    return Row(**{**vars(row), **changes})


def _decode_all(path: Path) -> Work:
    num_frames = probe_header(path).frames
    return lambda: read_clip(path, indices=range(num_frames), height=_DECODED_PX, width=_DECODED_PX)


def _open_decord(path: Path) -> Work:
    decord = load_peer("decord")
    return lambda: len(decord.VideoReader(str(path), num_threads=1))


def _open_opencv(path: Path) -> Work:
    cv2 = load_peer("cv2")

    def count() -> None:
        capture = cv2.VideoCapture(str(path))
        capture.get(cv2.CAP_PROP_FRAME_COUNT)
        capture.release()

    return count


WAYS: dict[str, Callable[[Path], Work]] = {
    "decoding all of it": _decode_all,
    "decord's reader, opened": _open_decord,
    "OpenCV's capture, opened": _open_opencv,
}


def write_moving_texture(path: Path, *, frames: int = _FRAMES, height: int = _HEIGHT, width: int = _WIDTH) -> Path:
    """A clip with detail and motion everywhere, as film has: a flat one would decode too fast to be fair."""
    coarse = numpy_stream(0, "bench texture").integers(0, 256, size=(height // 8 + 1, (width + frames) // 8 + 1, 3))
    texture = np.kron(coarse, np.ones((8, 8, 1))).astype(np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(texture, width, axis=1)
    clip_FHWC = windows[:height, :frames].transpose(1, 0, 3, 2)
    write_video(path, clip_FHWC, _FPS, crf=23, preset="veryfast")
    return path
