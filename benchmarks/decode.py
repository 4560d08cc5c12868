"""Reading a clip, and only its header, our way against other readers, on the same files in turns within one run.

`decode`: ours decodes from the key frame before the first frame wanted and scales each wanted frame inside the decoder.
The published training codes decode the whole file to full-size RGB, pick the frames, and scale them as floating-point
tensors; decord and OpenCV go to the first frame wanted and give full-size frames, which are scaled alike. All use one
thread and give the same frames at the same size.

`scan`: our reading of a header against decoding all of the clip, and against other readers' way to its length.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness import BenchSettings, Row, Work, compare_times, load_baseline, measure_or_skip, take_turns
from frameloom.core.errors import DataError
from frameloom.core.random import numpy_stream
from frameloom.data.media import decode
from frameloom.data.media.decode import open_video, probe_clip, read_clip
from frameloom.data.media.probe import probe_header
from frameloom.data.media.transforms import cover_rule
from frameloom.data.media.writing import write_video

# A usual request: 33 frames at the 256px size of 16:9, somewhere in a clip of a few seconds.
FRAMES, HEIGHT, WIDTH = 33, 192, 336
CLIP_FRAMES = 120
# The clip whose header is read, a usual one of the field: ten seconds of 720p.
_SCAN_FRAMES, _SCAN_HEIGHT, _SCAN_WIDTH, _SCAN_FPS = 300, 720, 1280, 30
_DECODED_PX = 64  # frames are scaled down inside the decoder, so that memory does not count
_HEADERS = 10  # read in a round

Indices = NDArray[np.int64]
Read = Callable[[Path, Indices, int, int], Tensor]


def measure(bench: BenchSettings, *, clips: Sequence[Path] = ()) -> Iterator[Row]:
    """All ways on a window of each of `clips`; without any, on made 720p: windows of growing length, and every 4th."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            wanted = [(path.name, path, _window(path)) for path in clips] or _make_cases(Path(folder), bench)
            for name, path, indices in wanted:
                for against, read in WAYS.items():
                    if against == FIRST_WAY or name in ("a window", *(path.name for path in clips)):
                        yield from measure_or_skip("decode", name, _measure, name, path, indices, against, read, bench)
    finally:
        torch.set_num_threads(threads)


def _make_cases(folder: Path, bench: BenchSettings) -> list[tuple[str, Path, Indices]]:
    path = write_moving_texture(folder / "clip.mp4", frames=CLIP_FRAMES)
    start = CLIP_FRAMES // 2
    cases = [("a window", path, np.arange(start, start + FRAMES))]
    if bench.is_quick:
        return cases
    return [
        ("9 frames", path, np.arange(start, start + 9)),
        *cases,
        ("every 4th frame", path, np.arange(1, CLIP_FRAMES, 4)),
        ("the whole clip", path, np.arange(CLIP_FRAMES)),
    ]


def _window(path: Path) -> NDArray[np.int64]:
    """The middle of a file, where a random start falls on average."""
    num_frames = probe_clip(path).frames
    if num_frames < FRAMES:
        raise DataError(f"{path}: {num_frames} frames; the comparison needs at least {FRAMES}")
    start = (num_frames - FRAMES) // 2
    return np.arange(start, start + FRAMES)


def _measure(name: str, path: Path, indices: Indices, against: str, read: Read, bench: BenchSettings) -> Row:
    num_decoded = _count_decoded(path, indices)
    times = take_turns(
        {
            "ours": lambda: read_clip(path, indices=indices, height=HEIGHT, width=WIDTH),
            "other": lambda: read(path, indices, HEIGHT, WIDTH),
        },
        bench.rounds,
    )
    is_run = len(indices) == indices[-1] - indices[0] + 1
    return compare_times(
        "decode",
        f"{name}, {len(indices)} of {probe_clip(path).frames} frames",
        times["ours"],
        times["other"],
        against=against,
        note=f"{num_decoded} frames decoded",
        at=("frames", len(indices)) if is_run and against == FIRST_WAY else None,
    )


def _count_decoded(path: Path, indices: Indices) -> int:
    """Frames that come out of our decoder for a window."""
    num_decoded = 0
    fill = decode._fill

    def count(pixels_CFHW: Tensor, numbered: Iterator[tuple[int, Any]], *rest: Any) -> int:
        def counted() -> Iterator[tuple[int, Any]]:
            nonlocal num_decoded
            for item in numbered:
                num_decoded += 1
                yield item

        return fill(pixels_CFHW, counted(), *rest)

    with patch.object(decode, "_fill", count):
        read_clip(path, indices=indices, height=HEIGHT, width=WIDTH)
    return num_decoded


def decode_then_resize(path: Path, indices: NDArray[np.int64], height: int, width: int) -> Tensor:
    """As Open-Sora 2.0 reads a clip: every frame to RGB at full size, then bilinear without antialiasing."""
    with open_video(path) as (container, stream):
        whole = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
    return _scale(torch.stack(whole)[torch.from_numpy(indices)], height, width)


def read_with_decord(path: Path, indices: Indices, height: int, width: int) -> Tensor:
    """As Open-Sora-Plan and CogVideoX-Fun read a clip: decord goes to the frames, which are scaled afterwards."""
    decord = load_baseline("decord")
    frames_FHWC = decord.VideoReader(str(path), num_threads=1).get_batch(indices.tolist()).asnumpy()
    return _scale(torch.from_numpy(frames_FHWC), height, width)


def read_with_opencv(path: Path, indices: Indices, height: int, width: int) -> Tensor:
    cv2: Any = load_baseline("cv2")
    cv2.setNumThreads(1)
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    capture.set(cv2.CAP_PROP_POS_FRAMES, int(indices[0]))
    wanted, frames = set(indices.tolist()), []
    for index in range(int(indices[0]), int(indices[-1]) + 1):
        capture.grab()
        if index in wanted:
            frames.append(torch.from_numpy(cv2.cvtColor(capture.retrieve()[1], cv2.COLOR_BGR2RGB)))
    capture.release()
    return _scale(torch.stack(frames), height, width)


def _scale(frames_FHWC: Tensor, height: int, width: int) -> Tensor:
    picked_CFHW = frames_FHWC.permute(3, 0, 1, 2)
    place = cover_rule(height, width)(picked_CFHW.shape[2], picked_CFHW.shape[3])
    frames_FCHW = picked_CFHW.transpose(0, 1).float() / 255
    if frames_FCHW.shape[2:] != place[:2]:
        frames_FCHW = F.interpolate(frames_FCHW, place[:2], mode="bilinear", antialias=False, align_corners=False)
    cut_FCHW = frames_FCHW[:, :, place.top : place.top + height, place.left : place.left + width]
    return (2 * cut_FCHW - 1).transpose(0, 1).contiguous()


FIRST_WAY = "decode all, resize after"
WAYS: dict[str, Read] = {
    FIRST_WAY: decode_then_resize,
    "decord, resize after": read_with_decord,
    "OpenCV, resize after": read_with_opencv,
}


def measure_scan(bench: BenchSettings, *, clips: Sequence[Path] = ()) -> Iterator[Row]:
    """Each of `clips`, or a made one of 300 frames of 720p; a round is many headers against one reading of others."""
    with tempfile.TemporaryDirectory() as folder:
        for path in clips or [write_moving_texture(Path(folder) / "720p.mp4", frames=bench.pick(_SCAN_FRAMES, 60))]:
            facts = probe_header(path)
            note = f"{facts.frames} frames, {path.stat().st_size / 1e6:.1f} MB"
            for against, build in SCAN_WAYS.items():
                yield from measure_or_skip("scan", path.name, _measure_header, path, build, against, note, bench)


def _measure_header(path: Path, build: Callable[[Path], Work], against: str, note: str, bench: BenchSettings) -> Row:
    other = build(path)

    def read_headers() -> None:
        for _ in range(_HEADERS):
            probe_header(path)

    times = take_turns({"ours": read_headers, "other": other}, bench.rounds)
    row = compare_times("scan", f"header of {path.name}", times["ours"], times["other"], against=against, note=note)
    assert row.ours is not None and row.ours_cpu_s is not None and row.ratio is not None
    changes = {"ours": row.ours / _HEADERS, "ours_cpu_s": row.ours_cpu_s / _HEADERS, "ratio": row.ratio * _HEADERS}
    return Row(**{**vars(row), **changes})


def _decode_all(path: Path) -> Work:
    num_frames = probe_header(path).frames
    return lambda: read_clip(path, indices=range(num_frames), height=_DECODED_PX, width=_DECODED_PX)


def _open_decord(path: Path) -> Work:
    decord = load_baseline("decord")
    return lambda: len(decord.VideoReader(str(path), num_threads=1))


def _open_opencv(path: Path) -> Work:
    cv2 = load_baseline("cv2")

    def count() -> None:
        capture = cv2.VideoCapture(str(path))
        capture.get(cv2.CAP_PROP_FRAME_COUNT)
        capture.release()

    return count


SCAN_WAYS: dict[str, Callable[[Path], Work]] = {
    "decoding all of it": _decode_all,
    "decord's reader, opened": _open_decord,
    "OpenCV's capture, opened": _open_opencv,
}


def write_moving_texture(
    path: Path, *, frames: int = _SCAN_FRAMES, height: int = _SCAN_HEIGHT, width: int = _SCAN_WIDTH
) -> Path:
    """A clip with detail and motion everywhere, as film has: a flat one would decode too fast to be fair."""
    coarse = numpy_stream(0, "bench texture").integers(0, 256, size=(height // 8 + 1, (width + frames) // 8 + 1, 3))
    texture = np.kron(coarse, np.ones((8, 8, 1))).astype(np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(texture, width, axis=1)
    clip_FHWC = windows[:height, :frames].transpose(1, 0, 3, 2)
    write_video(path, clip_FHWC, _SCAN_FPS, crf=23, preset="veryfast")
    return path
