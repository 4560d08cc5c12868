from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import polars as pl
import pytest
import torch

from frameloom.data.manifest.manifest import Manifest
from frameloom.data.media.decode import ClipError, read_clip, read_image
from frameloom.data.media.tar_members import Member
from frameloom.demo.shapes_set import write_shapes


def pack(folder: Path, tar: Path) -> pl.DataFrame:
    """The clips of Moving Shapes as a webdataset shard: media, caption and facts of a sample under one name."""
    table = pl.read_parquet(folder / "manifest.parquet")
    with tarfile.open(tar, "w") as archive:
        for number, row in enumerate(table.iter_rows(named=True)):
            media = folder / row["path"]
            archive.add(media, arcname=f"{number:04d}{media.suffix}")
            facts = {name: row[name] for name in ("height", "width", "frames", "fps") if row[name] is not None}
            for suffix, text in ((".txt", row["caption"]), (".json", json.dumps(facts))):
                info = tarfile.TarInfo(f"{number:04d}{suffix}")
                info.size = len(text.encode())
                archive.addfile(info, io.BytesIO(text.encode()))
    return table


def test_clips_inside_a_tar_give_the_pixels_of_the_files(tmp_path: Path) -> None:
    manifest_file = write_shapes(tmp_path / "set", count=8, seed=3, num_workers=1)
    (tmp_path / "shards").mkdir()
    table = pack(tmp_path / "set", tmp_path / "shards" / "00000.tar")
    files, tars = Manifest.read(manifest_file), Manifest.read(tmp_path / "shards")
    assert len(tars) == table.height and {"video", "image"} == set(table["kind"])
    size = {"height": 32, "width": 32}
    seen = []
    for row in range(len(tars)):
        member = tars.member(row)
        assert member is not None and files.member(row) is None and tars.caption(row) == files.caption(row)
        if files.clip(row).kind == "image":
            assert torch.equal(read_image(member, **size), read_image(files.file(row), **size))
        else:
            inside = read_clip(member, indices=[0, 4, 8], **size)
            assert torch.equal(inside, read_clip(files.file(row), indices=[0, 4, 8], **size))
            seen.append(inside)
    assert len(seen) > 1 and not torch.equal(seen[0], seen[1])


def test_a_broken_member_is_a_bad_clip_that_names_its_tar(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"no video" * 100)
    with pytest.raises(ClipError, match=r"x\.tar: 0001\.mp4: cannot be read as mp4"):
        read_clip(Member(tmp_path / "x.tar", "0001.mp4", 8, 400), indices=[0], height=8, width=8)
    with pytest.raises(ClipError, match=r"x\.tar: 0001\.mp3: '\.mp3' is no known video"):
        read_clip(Member(tmp_path / "x.tar", "0001.mp3", 8, 400), indices=[0], height=8, width=8)
    with pytest.raises(ClipError, match="no such file"):
        read_clip(Member(tmp_path / "y.tar", "0001.mp4", 8, 400), indices=[0], height=8, width=8)
