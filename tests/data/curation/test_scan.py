"""Scans that are interrupted, sharded, repeated, and that meet files which hang or kill their reader."""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import polars as pl
import pytest

from frameloom.core.errors import ConfigError, DataError
from frameloom.data.curation.check import CheckOptions, check_files
from frameloom.data.curation.inspection import FileWork, Job, Record, WorkOptions, run_jobs
from frameloom.data.curation.scan import (
    RecordStore,
    ScanOptions,
    describe_scan,
    errors_path,
    finish_scan,
    open_scan_store,
    parse_shard,
    scan_files,
)
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.manifest.sources.reading import read_source
from frameloom.data.media.decode import read_clip
from tests.data.bad_files import _write_clip

HERE = ScanOptions(workers=0)


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    root = tmp_path / "clips"
    root.mkdir()
    for number in range(8):
        _write_clip(root / f"{number}.mp4", frames=3 + number)
    return root


def list_clips(root: Path, *more: str) -> pl.DataFrame:
    paths = [path.name for path in sorted(root.glob("*.*")) if path.suffix in (".mp4", ".png")]
    return pl.DataFrame({"path": [*paths, *more], "caption": "a clip", "score": 1.5})


def test_manifest_equals_what_was_written(clip_set: Path, tmp_path: Path) -> None:
    written = Manifest.read(clip_set)
    names = [written.clip(row).path for row in range(len(written))]
    table = pl.DataFrame({"path": names, "caption": [written.caption(row) for row in range(len(written))]})
    out = tmp_path / "manifest.parquet"
    scan_files(table, clip_set.parent, out, HERE)
    finish_scan(table, clip_set.parent, out)
    assert Manifest.read(out, root=clip_set.parent).fingerprint == written.fingerprint
    scan_files(table.head(3), clip_set.parent, tmp_path / "b.parquet", HERE)
    finish_scan(table.head(3), clip_set.parent, tmp_path / "b.parquet")
    assert Manifest.read(tmp_path / "b.parquet", root=clip_set.parent).fingerprint != written.fingerprint


def test_bad_files_are_listed_with_their_rows_and_left_out(clips: Path, tmp_path: Path) -> None:
    (clips / "3.mp4").write_bytes(b"")
    table = list_clips(clips, "none.mp4", "../secret.mp4")
    out = tmp_path / "m.parquet"
    scan_files(table, clips, out, HERE)
    result = finish_scan(table, clips, out)
    errors = pl.read_parquet(errors_path(out))
    assert errors.select("row", "path", "reason").rows() == [
        (3, "3.mp4", "empty file"),
        (8, "none.mp4", "missing"),
        (9, "../secret.mp4", "outside the root"),
    ]
    good = pl.read_parquet(out)
    assert good["path"].to_list() == [f"{number}.mp4" for number in (0, 1, 2, 4, 5, 6, 7)]
    assert good["score"].to_list() == [1.5] * 7
    lines = "\n".join(describe_scan(result))
    assert "7 of 10 files" in lines and "broken: 3" in lines
    assert f"its paths start from {clips}" in lines


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    looked: list[str] = []
    probe = FileWork.__call__.__globals__["probe_header"]

    def note(path: Path, **kwargs: object) -> object:
        looked.append(path.name)
        return probe(path, **kwargs)

    monkeypatch.setitem(FileWork.__call__.__globals__, "probe_header", note)
    return looked


def test_only_changed_and_new_files_are_looked_at_again(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.parquet"
    scan_files(list_clips(clips), clips, out, HERE)
    looked = count_looks(monkeypatch)
    scan_files(list_clips(clips), clips, out, HERE)
    assert looked == []
    _write_clip(clips / "2.mp4", frames=20)
    os.utime(clips / "5.mp4", ns=(1, 1))
    _write_clip(clips / "new.mp4")
    scan_files(list_clips(clips), clips, out, HERE)
    assert sorted(looked) == ["2.mp4", "5.mp4", "new.mp4"]
    good = finish_scan(list_clips(clips), clips, out).good
    assert dict(good.select("path", "frames").iter_rows())["2.mp4"] == 20


def scan_until_killed(root: Path, out: Path) -> None:
    import frameloom.data.curation.scan as scan_store

    scan_store._PART_RECORDS = 2
    work = FileWork.__call__

    def slowly(self: FileWork, job: Job) -> Record:
        time.sleep(0.15)
        return work(self, job)

    FileWork.__call__ = slowly  # type: ignore[method-assign]
    scan_files(list_clips(root), root, out, HERE)


@pytest.mark.slow
def test_killed_scan_goes_on_where_it_stopped(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "m.parquet"
    process = multiprocessing.get_context("spawn").Process(target=scan_until_killed, args=(clips, out))
    process.start()
    store = out.with_suffix(".scan")
    while len(list(store.glob("part-*.parquet"))) < 2:
        assert process.is_alive()
        time.sleep(0.02)
    process.kill()
    process.join()
    with pytest.raises(DataError, match="have not been scanned yet"):
        finish_scan(list_clips(clips), clips, out)
    looked = count_looks(monkeypatch)
    scan_files(list_clips(clips), clips, out, HERE)
    assert 0 < len(looked) <= 4
    resumed = finish_scan(list_clips(clips), clips, out).good
    scan_files(list_clips(clips), clips, tmp_path / "whole.parquet", HERE)
    assert resumed.equals(finish_scan(list_clips(clips), clips, tmp_path / "whole.parquet").good)


def test_shards_cover_every_file_once_and_merge_to_the_same_manifest(clips: Path, tmp_path: Path) -> None:
    table, out = list_clips(clips), tmp_path / "m.parquet"
    seen: list[str] = []
    for index in range(3):
        if index == 2:
            with pytest.raises(DataError, match="run the scan, or all of its shards"):
                finish_scan(table, clips, out)
        seen += scan_files(table, clips, out, HERE, shard=(index, 3))["path"].to_list()
    assert sorted(seen) == sorted(table["path"])
    merged = finish_scan(table, clips, out).good
    scan_files(table, clips, tmp_path / "whole.parquet", HERE)
    assert merged.equals(finish_scan(table, clips, tmp_path / "whole.parquet").good)


def test_shard_is_read_from_text_and_mistakes_are_refused() -> None:
    assert parse_shard("2/4") == (2, 4)
    for text in ("4/4", "1", "a/b", "-1/4", "0/0"):
        with pytest.raises(ConfigError, match="write i/n"):
            parse_shard(text)


def test_audit_finds_what_headers_hide_and_its_sample_does_not_depend_on_order(clips: Path, tmp_path: Path) -> None:
    path = clips / "4.mp4"
    data = bytearray(path.read_bytes())
    start, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    data[start:end] = bytes(end - start)
    path.write_bytes(data)
    table = list_clips(clips)
    scan_files(table, clips, tmp_path / "plain.parquet", HERE)
    assert finish_scan(table, clips, tmp_path / "plain.parquet").errors.height == 0
    out = tmp_path / "audited.parquet"
    scan_files(table, clips, out, HERE)
    scan_files(table, clips, out, ScanOptions(workers=0, audit=1.0))  # asks again for files that were only probed
    result = finish_scan(table, clips, out)
    assert result.errors.select("path", "stage").rows() == [("4.mp4", "decode")]
    assert result.num_audited == 8

    def sample(rows: pl.DataFrame, name: str) -> set[str]:
        found = scan_files(rows, clips, tmp_path / name, ScanOptions(workers=0, audit=0.5))
        return set(found.filter(pl.col("audited"))["path"])

    chosen = sample(table, "a.parquet")
    assert chosen == sample(table.reverse(), "b.parquet")
    assert 0 < len(chosen) < 8


def test_windows_are_kept_within_their_file(clips: Path, tmp_path: Path) -> None:
    table = pl.DataFrame(
        {
            "path": ["7.mp4", "7.mp4", "7.mp4", "0.mp4"],
            "caption": "",
            "start_frame": [0, 6, 50, None],
            "end_frame": [4, 99, 60, None],
        }
    )
    scan_files(table, clips, tmp_path / "m.parquet", HERE)
    result = finish_scan(table, clips, tmp_path / "m.parquet")
    assert result.good.select("frames", "end_frame").rows() == [(4, 4), (4, 10), (3, None)]
    assert result.errors.select("row", "reason").rows() == [(2, "window outside the file")]


def scan(source: Path, out: Path, root: Path | None = None) -> pl.DataFrame:
    """What the command does, in this process."""
    listed = read_source(source, root=root)
    scan_files(listed.table, listed.root, out, HERE)
    return finish_scan(listed.table, listed.root, out).good


def test_the_same_scan_again_finds_new_clips_and_captions(clips: Path) -> None:
    (clips / "0.txt").write_text("old")
    assert scan(clips, clips / "manifest.parquet").height == 8
    listed = read_source(clips / "manifest.parquet")
    check_files(listed.table, listed.root, clips / "clean.parquet", CheckOptions(workers=0, needs_captions=False))
    _write_clip(clips / "new.mp4", frames=20)
    (clips / "0.txt").write_text("changed")
    good = scan(clips, clips / "manifest.parquet")
    assert good["path"].to_list() == [*(f"{number}.mp4" for number in range(8)), "new.mp4"]
    assert good["caption"][0] == "changed"


def test_a_manifest_among_its_tars_is_not_read_in_their_place(clips: Path, tmp_path: Path) -> None:
    pack_tars(clips, tmp_path / "tars")
    first = scan(tmp_path / "tars", tmp_path / "tars/manifest.parquet")
    (tmp_path / "tars/1.tar").unlink()
    again = scan(tmp_path / "tars", tmp_path / "tars/manifest.parquet")
    assert again.equals(first.filter(pl.col("path") == "0.tar"))


def test_columns_named_as_our_notes_are_kept(clips: Path, tmp_path: Path) -> None:
    own = {"row": 7, "size": "big", "stage": "train", "reason": "why", "error": "no", "audited": "x", "member": "m"}
    own |= {"mtime_ns": 3, "noted_ns": 4, "member_bytes": 5}
    table = tmp_path / "clips.csv"
    pl.DataFrame({"path": ["0.mp4", "none.mp4"], "text": "x", **own}).write_csv(table)
    assert scan(table, tmp_path / "m.parquet", clips).select(*own).rows() == [tuple(own.values())]
    listed = read_source(table, root=clips)
    checked = check_files(listed.table, listed.root, tmp_path / "c.parquet", CheckOptions(workers=0))
    assert checked.good.select(*own).rows() == [tuple(own.values())]
    assert pl.read_parquet(errors_path(tmp_path / "m.parquet"))["row", "reason"].rows() == [(1, "missing")]


def test_a_window_may_be_given_by_its_length(clips: Path, tmp_path: Path) -> None:
    table = tmp_path / "clips.csv"
    table.write_text("path,text,start_frame,frames\n7.mp4,x,2,5\n")
    assert scan(table, tmp_path / "m.parquet", clips).select("frames", "end_frame").rows() == [(5, 7)]


def test_names_that_cannot_be_kept_do_not_end_a_scan(clips: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (b"caf\xe9", b"intro: the cat", b"\\x"):
        shutil.copy(clips / "0.mp4", clips / os.fsdecode(name + b".mp4"))
        (clips / os.fsdecode(name + b".txt")).write_text("left out with its clip")
    assert scan(clips, clips / "m.parquet")["path"].to_list() == [f"{number}.mp4" for number in range(8)]
    assert r"3 of 11 files are left out, the first is '\\x.mp4'" in caplog.text
    assert caplog.text.count("rename them") == 1


def pack_tars(clips: Path, out: Path) -> None:
    """The clips in two tars, the second with a broken file and a copy of a clip."""
    out.mkdir()
    files = sorted(path for path in clips.iterdir() if path.suffix in (".mp4", ".png"))
    for number, part in enumerate((files[::2], files[1::2])):
        with tarfile.open(out / f"{number}.tar", "w") as tar:
            for path in part:
                tar.add(path, path.name)
            if number:
                tar.add(files[0], "copy" + files[0].suffix)
                broken = tarfile.TarInfo("broken.mp4")
                broken.size = 100
                tar.addfile(broken, io.BytesIO(b"x" * 100))


def test_files_inside_tars_are_scanned_as_those_outside(clips: Path, tmp_path: Path) -> None:
    pack_tars(clips, tmp_path / "tars")
    listed = read_source(tmp_path / "tars")
    out = tmp_path / "tars" / "manifest.parquet"
    scan_files(listed.table, listed.root, out, ScanOptions(workers=2, audit=1.0))
    result = finish_scan(listed.table, listed.root, out)
    scan_files(list_clips(clips), clips, tmp_path / "plain.parquet", HERE)
    plain = finish_scan(list_clips(clips), clips, tmp_path / "plain.parquet").good
    facts = ["kind", "height", "width", "frames", "fps", "codec", "bytes"]
    found = {row["member"]: [row[name] for name in facts] for row in result.good.iter_rows(named=True)}
    wanted = {row["path"]: [row[name] for name in facts] for row in plain.iter_rows(named=True)}
    assert {name: value for name, value in found.items() if not name.startswith("copy")} == wanted
    assert result.errors["path"].to_list() == ["1.tar!broken.mp4"]
    assert set(result.good["path"]) == {"0.tar", "1.tar"}
    again = scan_files(listed.table, listed.root, out, ScanOptions(workers=0))
    assert again["noted_ns"].to_list() == open_scan_store(out, listed.root).read()["noted_ns"].to_list()
    manifest = Manifest.read(out)
    clip = manifest.member(0)
    assert clip is not None
    assert read_clip(clip, indices=[0], height=16, width=16).shape == (3, 1, 16, 16)


def test_a_copy_inside_a_tar_is_found_by_its_content(clips: Path, tmp_path: Path) -> None:
    pack_tars(clips, tmp_path / "tars")
    listed = read_source(tmp_path / "tars")
    options = CheckOptions(workers=0, duplicates="exact", needs_captions=False)
    result = check_files(listed.table, listed.root, tmp_path / "tars" / "clean.parquet", options)
    reasons = result.reasons.filter(pl.col("reason") == "duplicate content")
    assert reasons.height == 1
    assert "copy" in reasons["path"][0] + reasons["detail"][0]
    assert result.good.height == listed.table.height - 2


def test_progress_of_another_root_is_refused(clips: Path, tmp_path: Path) -> None:
    scan_files(list_clips(clips), clips, tmp_path / "m.parquet", HERE)
    with pytest.raises(DataError, match="progress of other work"):
        scan_files(list_clips(clips), tmp_path, tmp_path / "m.parquet", HERE)


def test_store_keeps_the_newest_record_and_joins_its_parts(tmp_path: Path) -> None:
    schema = {"path": pl.String(), "size": pl.Int64()}
    store = RecordStore(tmp_path / "s", what={"work": "test"}, schema=schema)
    for size in (1, 2):
        store.add({"path": "a", "size": size})
        store.add({"path": f"only {size}", "size": 0})
        store.flush()
    before = store.read()
    assert dict(before.select("path", "size").iter_rows()) == {"a": 2, "only 1": 0, "only 2": 0}
    store.join()
    assert len(list((tmp_path / "s").glob("part-*.parquet"))) == 1
    assert store.read().equals(before)


class Hostile:
    """Stands for a decoder that hangs, crashes or fails on some files."""

    def __call__(self, job: Job) -> Record:
        if "hang" in job.path:
            time.sleep(600)
        if "crash" in job.path:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "fail" in job.path:
            raise KeyError("odd")
        return {"path": job.path, "reason": None}


@pytest.mark.slow
def test_hanging_and_crashing_files_are_blamed_and_all_others_are_done() -> None:
    names = [
        f"{number}{kind}" for number, kind in enumerate(["", "hang", "", "crash", "fail", "", "crash"] + [""] * 40)
    ]
    jobs = [Job(name) for name in names]
    found = {record["path"]: record for record in run_jobs(Hostile(), jobs, WorkOptions(2, 4.0))}
    assert sorted(found) == sorted(names)
    errors = {path: record["error"] for path, record in found.items() if record["reason"]}
    assert sorted(errors) == ["1hang", "3crash", "4fail", "6crash"]
    assert "gave no answer for 4 s" in errors["1hang"]
    assert "SIGSEGV" in errors["3crash"]
    assert "KeyError" in errors["4fail"]


def test_what_workers_preload_starts_no_threads_of_polars() -> None:
    """A fork loses threads; polars starts its own when it is imported."""
    program = "import sys, {}; print('polars' in sys.modules)"
    loaded = [
        subprocess.run([sys.executable, "-c", program.format(name)], capture_output=True, text=True, check=True).stdout
        for name in ("frameloom.data.curation.inspection", "frameloom.data.curation.scan")
    ]
    assert loaded == ["False\n", "True\n"]
