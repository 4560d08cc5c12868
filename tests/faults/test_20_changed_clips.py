"""A flipped bit in a clip mostly decodes to other pixels without an error; the digests of the manifest find each."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from frameloom.core.errors import DataError
from frameloom.core.files import digest_file
from frameloom.core.random import numpy_stream
from frameloom.data.curation.verify import verify_files
from frameloom.data.manifest.sources.reading import read_source
from frameloom.data.media.decode import read_clip
from frameloom.data.media.writing import write_video

COUNT = 150


@pytest.fixture
def data(world):
    return shutil.copytree(world.shared / "data", world.folder / "data")


def flip(content: bytes, number: int) -> bytes:
    """One bit of the pictures, not of the index."""
    draw = numpy_stream(number, "flipped clip")
    start, index = content.index(b"mdat") + 4, content.index(b"moov")
    end = index - 4 if index > start else len(content)
    changed = bytearray(content)
    changed[int(draw.integers(start, end))] ^= 1 << int(draw.integers(8))
    return bytes(changed)


def write_clip(path: Path) -> None:
    """A clip with much in it, so that a bit of the file is mostly a bit of a picture."""
    steps_FHWC = numpy_stream(0, "pixels").integers(-9, 10, (16, 64, 64, 3))
    write_video(path, (120 + steps_FHWC.cumsum(0).clip(-60, 60)).astype(np.uint8), 24, preset="ultrafast")


def test_every_flip_is_found_by_digest_and_most_pass_the_decoder(tmp_path, tally):
    path, num_silent = tmp_path / "a.mp4", 0
    write_clip(path)
    content, right = path.read_bytes(), read_clip(path, indices=range(16), height=32, width=32)
    table = pl.DataFrame({"path": ["a.mp4"], "sha256": [digest_file(path)]})
    for number in range(COUNT):
        path.write_bytes(flip(content, number))
        tally.inject()
        with pytest.raises(DataError, match=r"1 of 1 files[^$]*\n  a.mp4: its bytes have changed$"):
            verify_files(table, tmp_path, name="one")
        if number < 20:  # the control: what decoding alone makes of it
            try:
                num_silent += not read_clip(path, indices=range(16), height=32, width=32).equal(right)
            except DataError:
                continue
    assert num_silent >= 10, "decoders notice most changes: digests are not needed"
    path.write_bytes(content)
    assert verify_files(table, tmp_path, name="one") == 1


def test_the_command_names_what_changed_or_is_gone(warm, data, tally):
    manifest = str(data / "manifest.parquet")
    whole = warm.command("data", "verify", manifest)
    assert warm.wait(whole) == 0 and "40 files are what they were" in whole.output
    paths = pl.read_parquet(manifest)["path"].to_list()
    (data / paths[0]).unlink()
    (data / paths[1]).write_bytes(b"else")
    tally.inject(2)
    found = warm.command("data", "verify", manifest)
    assert warm.wait(found) == 2
    assert "2 of 40 files are not what they were" in found.output
    assert f"{paths[0]}: missing" in found.output and f"{paths[1]}: its bytes have changed" in found.output


def test_a_manifest_without_digests_is_told_how_to_get_them(warm, data):
    manifest, other = data / "plain.parquet", data / "with.parquet"
    pl.read_parquet(data / "manifest.parquet").drop("sha256").write_parquet(manifest)
    refused = warm.command("data", "verify", str(manifest))
    assert warm.wait(refused) == 2 and "--out" in refused.output
    assert warm.wait(warm.command("data", "verify", str(manifest), "--out", str(other))) == 0
    wanted = pl.read_parquet(data / "manifest.parquet")["sha256"].to_list()
    assert read_source(other).table["sha256"].to_list() == wanted
