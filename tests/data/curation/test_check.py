"""Reasons for leaving rows out, and the search for clips that look alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import av
import numpy as np
import polars as pl
import pytest
from PIL import Image

from frameloom.core.random import numpy_stream
from frameloom.data.curation.check import CheckOptions, check_files, describe_check, reasons_path
from frameloom.data.curation.frame_signatures import (
    COLOUR_BYTES,
    _candidate_pairs,
    find_duplicates,
    hash_frame,
    sign_frames,
)
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.writing import write_image, write_video


def draw_clip(seed: int, frames: int = 12, height: int = 64, width: int = 96) -> np.ndarray:
    """Soft blobs that drift: content with low frequencies, different for every seed."""
    coarse = numpy_stream(seed, "blobs").integers(0, 256, size=(5, 9, 3)).astype(np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((width + frames, height), Image.Resampling.BICUBIC))
    return np.stack([picture[:, number : number + width] for number in range(frames)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "clips"
    root.mkdir()
    for seed in range(5):
        write_video(root / f"{seed}.mp4", draw_clip(seed), 24, crf=16, preset="ultrafast")
        write_image(root / f"{seed}.png", draw_clip(100 + seed)[0])
    return root


def check(root: Path, paths: list[str], *, captions: list[str] | None = None, **options: object) -> dict[str, str]:
    """Reason by path, joined with a comma when a row has several."""
    table = pl.DataFrame({"path": paths, "caption": captions or ["a clip"] * len(paths)})
    out = root.parent / f"clean-{options.get('duplicates', 'near')}.parquet"
    result = check_files(table, root, out, CheckOptions(workers=0, **options))  # type: ignore[arg-type]
    assert pl.read_parquet(reasons_path(out)).equals(result.reasons)
    assert not result.good.height or len(Manifest.read(out, root=root)) == result.good.height
    assert result.good.height + result.reasons["row"].n_unique() == len(paths)
    assert f"{result.good.height:,} of {len(paths):,} rows" in describe_check(result)[0]
    return dict(result.reasons.group_by("path").agg(pl.col("reason").str.join(", ")).iter_rows())


ALL = [f"{seed}{suffix}" for seed in range(5) for suffix in (".mp4", ".png")]


def test_different_clips_are_all_clean(root: Path) -> None:
    assert check(root, ALL) == {}


def test_every_reason_is_found(root: Path) -> None:
    (root / "empty.mp4").write_bytes(b"")
    shutil.copy(root / "0.png", root / "picture.mp4")
    write_video(root / "short.mp4", draw_clip(20, frames=3), 24)
    write_image(root / "small.png", draw_clip(21, height=16, width=16)[0])
    paths = [*ALL, "none.mp4", "empty.mp4", "picture.mp4", "short.mp4", "small.png", "2.mp4"]
    captions = ["a clip"] * len(paths)
    captions[2] = "  "
    assert check(root, paths, captions=captions, min_frames=5, min_side=32) == {
        "1.mp4": "empty caption",
        "2.mp4": "duplicate path",
        "none.mp4": "missing",
        "empty.mp4": "empty file",
        "picture.mp4": "wrong extension",
        "short.mp4": "too short",
        "small.png": "too small",
    }


def test_captions_are_asked_for_unless_one_says_otherwise(root: Path) -> None:
    captions = [""] * len(ALL)
    assert set(check(root, ALL, captions=captions).values()) == {"empty caption"}
    assert check(root, ALL, captions=captions, needs_captions=False) == {}


def test_copies_in_other_sizes_and_codecs_are_found_and_the_largest_stays(root: Path) -> None:
    clip = draw_clip(1)
    larger = np.stack([np.asarray(Image.fromarray(frame).resize((192, 128))) for frame in clip])
    write_video(root / "larger.mp4", larger, 24, crf=30, preset="ultrafast")
    with av.open(str(root / "other.webm"), "w") as output:
        stream = output.add_stream("libvpx-vp9", rate=12, options={"cpu-used": "8", "crf": "40", "b:v": "0"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for frame in clip:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")))
        output.mux(stream.encode())
    Image.open(root / "3.png").save(root / "3.jpg", quality=60)
    paths = [*ALL, "other.webm", "larger.mp4", "3.jpg"]
    assert check(root, paths) == {
        "1.mp4": "near duplicate",
        "other.webm": "near duplicate",
        "3.png": "near duplicate",
    }
    assert check(root, paths, duplicates="exact") == {}
    assert check(root, paths, duplicates="off") == {}


def test_same_bytes_are_found_without_decoding(root: Path) -> None:
    shutil.copy(root / "2.mp4", root / "z.mp4")
    assert check(root, [*ALL, "z.mp4"], duplicates="exact") == {"z.mp4": "duplicate content"}
    assert check(root, [*ALL, "z.mp4"], duplicates="near") == {"z.mp4": "near duplicate"}


@pytest.mark.parametrize("duplicates", ["exact", "near"])
def test_a_copy_stays_when_something_else_speaks_against_its_original(root: Path, duplicates: str) -> None:
    shutil.copy(root / "2.mp4", root / "z.mp4")
    captions = ["" if path == "2.mp4" else "a clip" for path in [*ALL, "z.mp4"]]
    assert check(root, [*ALL, "z.mp4"], captions=captions, duplicates=duplicates) == {"2.mp4": "empty caption"}
    captions[-1] = ""
    assert check(root, [*ALL, "z.mp4"], captions=captions, duplicates=duplicates) == dict.fromkeys(
        ("2.mp4", "z.mp4"), "empty caption"
    )


def test_a_second_row_of_a_file_stays_when_the_first_has_no_caption(root: Path) -> None:
    found = check(root, ["1.mp4"] * 3, captions=["", "a clip", "a clip"])
    assert found == {"1.mp4": "empty caption, duplicate path"}


def test_columns_of_the_source_are_kept_whatever_their_names(root: Path) -> None:
    names = ("row", "reason", "error", "stage", "size", "audited", "mtime_ns", "noted_ns", "first", "area", "detail")
    (root / "bad.mp4").write_bytes(b"")
    table = pl.DataFrame({"path": ["0.mp4", "bad.mp4", "0.png"], "caption": "a clip"} | dict.fromkeys(names, "mine"))
    result = check_files(table, root, root.parent / "out.parquet", CheckOptions(workers=0))
    assert result.reasons.select("row", "path", "reason").rows() == [(1, "bad.mp4", "empty file")]
    written = pl.read_parquet(root.parent / "out.parquet")
    assert written["path"].to_list() == ["0.mp4", "0.png"]
    assert written.select(names).equals(table[[0, 2]].select(names))


def test_another_colour_or_another_order_of_frames_is_no_copy(root: Path) -> None:
    write_video(root / "swapped.mp4", draw_clip(1)[..., [2, 0, 1]], 24, crf=16)
    other = np.concatenate([draw_clip(1, frames=6), draw_clip(50, frames=6)])
    write_video(root / "half.mp4", other, 24, crf=16)
    assert check(root, [*ALL, "swapped.mp4", "half.mp4"]) == {}


def test_second_call_decodes_nothing_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from frameloom.data.curation.inspection import FileWork

    first = check(root, ALL)
    looked: list[object] = []
    monkeypatch.setitem(FileWork.__call__.__globals__, "sign_clip", lambda *args: looked.append(args))
    assert check(root, ALL) == first
    assert not looked


def test_hash_survives_noise_and_brightness_and_separates_pictures() -> None:
    pictures = [
        np.asarray(Image.fromarray(draw_clip(seed)[0]).resize((32, 32), Image.Resampling.BOX)) for seed in range(40)
    ]
    for seed, picture in enumerate(pictures):
        noise = numpy_stream(seed, "noise").integers(-6, 7, size=picture.shape)
        near = (picture * 0.9 + noise).clip(0, 255).astype(np.uint8)
        assert (hash_frame(picture) ^ hash_frame(near)).bit_count() <= 6
    apart = [
        (hash_frame(first) ^ hash_frame(second)).bit_count()
        for i, first in enumerate(pictures)
        for second in pictures[:i]
    ]
    assert min(apart) >= 8


def test_banded_search_finds_exactly_the_pairs_of_the_slow_search() -> None:
    rng = numpy_stream(0, "hashes")
    hashes = rng.integers(0, 2**63, size=(300, 3), dtype=np.uint64)
    for copy in range(200, 300):  # from 0 to 15 bits away from clip copy - 200
        hashes[copy] = hashes[copy - 200]
        for bit in rng.choice(192, size=copy % 16, replace=False):
            hashes[copy, bit // 64] ^= np.uint64(1) << np.uint64(bit % 64)
    colours = np.zeros((300, 3 * COLOUR_BYTES), np.uint8)
    distances = np.bitwise_count(hashes[:, None] ^ hashes[None]).sum(axis=2)
    slow = {copy for copy in range(300) if (distances[copy, :copy] <= 11).any()}
    found = find_duplicates(hashes, colours)
    assert {clip for clip, _, _ in found} == slow
    assert all(like == clip - 200 and num_bits == clip % 16 for clip, like, num_bits in found)
    assert len(slow) == sum(copy % 16 <= 11 for copy in range(200, 300))
    colours[200:] = 90
    assert find_duplicates(hashes, colours) == []


def test_copies_of_one_look_are_all_found_however_many_there_are() -> None:
    hashes_K, colours_of_one = sign_frames(np.zeros((1, 32, 32, 3), np.uint8))
    hashes = np.tile(hashes_K, (5000, 1))
    colours = np.tile(np.frombuffer(colours_of_one, np.uint8), (5000, 1))
    assert [one[:2] for one in find_duplicates(hashes, colours)] == [(place, 0) for place in range(1, 5000)]


def test_cost_grows_with_the_number_of_clips_and_not_with_its_square() -> None:
    hashes = numpy_stream(1, "hashes").integers(0, 2**64, size=(200_000, 3), dtype=np.uint64)
    num_compared = sum(len(first) for first, _ in _candidate_pairs(hashes))
    assert num_compared < 30 * len(hashes)  # every pair would be a hundred thousand comparisons a clip
    crowded = np.zeros_like(hashes[:20_000])
    assert sum(len(first) for first, _ in _candidate_pairs(crowded)) < 400 * len(crowded)


def test_a_copy_of_a_copy_is_laid_to_the_clip_that_stays() -> None:
    hashes = np.array([[0b0], [0b1], [0b1]], dtype=np.uint64)
    colours = np.zeros((3, COLOUR_BYTES), np.uint8)
    assert find_duplicates(hashes, colours) == [(1, 0, 1), (2, 0, 1)]
