"""Reading a clip our way against other readers, on the same files in turns within one run.

Ours decodes from the key frame before the first frame wanted and scales each wanted frame inside the decoder. The
published training codes decode the whole file to full-size RGB, pick the frames, and scale them as floating-point
tensors; decord and OpenCV go to the first frame wanted and give full-size frames, which are scaled alike. All use one
thread and give the same frames at the same size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frameloom.bench.harness import Effort, Row, attempt, compare_times, take_turns
from frameloom.bench.peers import load_peer
from frameloom.bench.scan import write_moving_texture
from frameloom.core.errors import DataError
from frameloom.data.decode import DecodeWork, open_video, probe_clip, read_clip
from frameloom.data.frames import cover
from frameloom.data.transforms import resize_and_cut

# A usual request: 33 frames at the 256px size of 16:9, somewhere in a clip of a few seconds.
FRAMES, HEIGHT, WIDTH = 33, 192, 336
CLIP_FRAMES = 120

Indices = NDArray[np.int64]
Read = Callable[[Path, Indices, int, int], Tensor]


def measure(effort: Effort, *, clips: Sequence[Path] = ()) -> Iterator[Row]:
    """All ways on a window of each of `clips`; without any, on made 720p: windows of growing length, and every 4th."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            wanted = [(path.name, path, _window(path)) for path in clips] or _make_cases(Path(folder), effort)
            for name, path, indices in wanted:
                for against, read in WAYS.items():
                    if against == FIRST_WAY or name in ("a window", *(path.name for path in clips)):
                        yield from attempt("decode", name, _measure, name, path, indices, against, read, effort)
    finally:
        torch.set_num_threads(threads)


def _make_cases(folder: Path, effort: Effort) -> list[tuple[str, Path, Indices]]:
    path = write_moving_texture(folder / "clip.mp4", frames=CLIP_FRAMES)
    start = CLIP_FRAMES // 2
    cases = [("a window", path, np.arange(start, start + FRAMES))]
    if effort.is_quick:
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


def _measure(name: str, path: Path, indices: Indices, against: str, read: Read, effort: Effort) -> Row:
    work = DecodeWork()
    read_clip(path, indices=indices, height=HEIGHT, width=WIDTH, work=work)
    times = take_turns(
        {
            "ours": lambda: read_clip(path, indices=indices, height=HEIGHT, width=WIDTH),
            "other": lambda: read(path, indices, HEIGHT, WIDTH),
        },
        effort.rounds,
    )
    is_run = len(indices) == indices[-1] - indices[0] + 1
    return compare_times(
        "decode",
        f"{name}, {len(indices)} of {probe_clip(path).frames} frames",
        times["ours"],
        times["other"],
        against=against,
        note=f"{work.num_decoded} frames decoded",
        at=("frames", len(indices)) if is_run and against == FIRST_WAY else None,
    )


def decode_then_resize(path: Path, indices: NDArray[np.int64], height: int, width: int) -> Tensor:
    """As Open-Sora 2.0 reads a clip: every frame to RGB at full size, then bilinear without antialiasing."""
    with open_video(path) as (container, stream):
        whole = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
    return _scale(torch.stack(whole)[torch.from_numpy(indices)], height, width)


def read_with_decord(path: Path, indices: Indices, height: int, width: int) -> Tensor:
    """As Open-Sora-Plan and CogVideoX-Fun read a clip: decord goes to the frames, which are scaled afterwards."""
    decord = load_peer("decord")
    frames_FHWC = decord.VideoReader(str(path), num_threads=1).get_batch(indices.tolist()).asnumpy()
    return _scale(torch.from_numpy(frames_FHWC), height, width)


def read_with_opencv(path: Path, indices: Indices, height: int, width: int) -> Tensor:
    cv2: Any = load_peer("cv2")
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
    place = cover(picked_CFHW.shape[2], picked_CFHW.shape[3], height, width)
    return resize_and_cut(picked_CFHW, place, height, width, antialias=False)


FIRST_WAY = "decode all, resize after"
WAYS: dict[str, Read] = {
    FIRST_WAY: decode_then_resize,
    "decord, resize after": read_with_decord,
    "OpenCV, resize after": read_with_opencv,
}
