from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path

import av
import numpy as np
import polars as pl
import pytest

import frameloom.data.manifest.sources.text_tables as text_tables
from frameloom.core.errors import DataError
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.manifest.sources.reading import Source, read_source
from frameloom.data.media.tar_members import Member, MemberFile
from frameloom.data.media.writing import write_image, write_video

OPEN_SORA = """path,text,num_frames,height,width,aspect_ratio,resolution,fps,score_vmafmotion
a/1.mp4,"a dog, running",120,720,1280,0.5625,921600,29.97,3.5
a/2.mp4,a cat,64,480,640,0.75,307200,24.0,
b/3.jpg,a bird,1,512,512,1.0,262144,NaN,
"""
ANNOTATION = [
    {
        "path": "v/1.mp4",
        "cap": ["a dog", "one dog"],
        "resolution": {"height": 720, "width": 1280},
        "num_frames": 93,
        "fps": 24.0,
        "cut": [10, 110],
        "crop": [0, 1280, 0, 720],
        "aesthetic": 5.1,
    },
    {"path": "v/2.mp4", "cap": "a cat", "resolution": {"height": 480, "width": 640}, "num_frames": 40, "fps": 30},
    {"path": "i/3.jpg", "cap": "a bird", "resolution": {"height": 512, "width": 512}},
]


def write(path: Path, content: str | bytes | object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def rows(source: Source, *names: str) -> list[tuple[object, ...]]:
    return source.table.select(names or ("path", "caption", "kind", "height", "width", "frames", "fps")).rows()


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


# tables


@pytest.mark.parametrize("name", ["clips.csv", "clips.parquet", "clips.txt"])
def test_open_sora_csv_is_read_whatever_its_ending(tmp_path: Path, name: str) -> None:
    source = read_source(write(tmp_path / name, "\ufeff" + OPEN_SORA))
    assert source.format == "csv" and source.root == tmp_path
    assert rows(source) == [
        ("a/1.mp4", "a dog, running", "video", 720, 1280, 120, 29.97),
        ("a/2.mp4", "a cat", "video", 480, 640, 64, 24.0),
        ("b/3.jpg", "a bird", "image", 512, 512, 1, None),
    ]
    assert source.table["score_vmafmotion"].to_list() == [3.5, None, None]
    assert source.table["resolution"].to_list()[0] == 921600
    assert Manifest.read(tmp_path / name).frames.tolist() == [120, 64, 1]


def test_open_sora_parquet_with_nan_for_images_equals_the_csv(tmp_path: Path) -> None:
    csv = read_source(write(tmp_path / "clips.csv", OPEN_SORA))
    columns = {"caption": "text", "frames": "num_frames"}
    as_pandas = (
        csv.table.rename(columns)
        .drop("kind")
        .with_columns(pl.col("fps").fill_null(float("nan")), pl.col("num_frames").cast(pl.Float64))
    )
    as_pandas.write_parquet(tmp_path / "clips.data")
    parquet = read_source(tmp_path / "clips.data")
    assert parquet.format == "parquet"
    assert rows(parquet) == rows(csv)


def test_semicolons_tabs_and_missing_captions_in_csv(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = read_source(write(tmp_path / "c.csv", "file_path;text;type\na.mp4;x, y;video\nb.png;;image\n"))
    assert rows(source, "path", "caption", "kind", "frames") == [
        ("a.mp4", "x, y", "video", None),
        ("b.png", "", "image", 1),
    ]
    assert "1 of 2 rows have no caption" in caplog.text
    assert rows(read_source(write(tmp_path / "c.tsv", "path\tcaption\na.mp4\tx\n")), "caption") == [("x",)]


def test_captions_that_look_like_numbers_or_nothing_stay_text(tmp_path: Path) -> None:
    source = read_source(write(tmp_path / "c.csv", "path,text\na.mp4,007\nb.mp4,nan\nc.mp4,None\n"))
    assert source.table["caption"].to_list() == ["007", "nan", "None"]


@pytest.mark.parametrize("header", ["path\n", "video\n", ""])
def test_a_column_of_video_paths_is_enough(tmp_path: Path, header: str) -> None:
    source = read_source(write(tmp_path / "videos.csv", header + "a.mp4\nsub/b.mp4\n"))
    assert rows(source, "path", "caption", "kind", "height") == [
        ("a.mp4", "", "video", None),
        ("sub/b.mp4", "", "video", None),
    ]


def test_a_folder_of_sdxl_csv_is_one_table(tmp_path: Path) -> None:
    write(tmp_path / "set/b.csv", "dir,text\nx/2.png,two\n")
    write(tmp_path / "set/a.csv", 'dir,text\n1.jpg,"one, first"\n')
    write(tmp_path / "set/1.jpg", b"x")
    source = read_source(tmp_path / "set")
    assert source.format == "csv folder" and source.root == tmp_path / "set"
    assert rows(source, "path", "caption", "kind") == [("1.jpg", "one, first", "image"), ("x/2.png", "two", "image")]
    write(tmp_path / "set/c.csv", "name,score\nx,2\n")
    with pytest.raises(DataError, match=r"c\.csv: its first line names no column of files"):
        read_source(tmp_path / "set")


# JSON


@pytest.mark.parametrize("name", ["meta.json", "meta.jsonl"])
def test_jsonl_is_read_whatever_its_ending(tmp_path: Path, name: str) -> None:
    text = lines({"file_name": "a.mp4", "text": "x", "fps": 24}, {"file_name": "b.mp4", "text": "y", "fps": 12.5})
    source = read_source(write(tmp_path / name, text + "\n"))
    assert source.format == "jsonl"
    assert rows(source, "path", "caption", "fps") == [("a.mp4", "x", 24.0), ("b.mp4", "y", 12.5)]


def test_jsonl_with_one_or_several_captions_keeps_all_of_them(tmp_path: Path) -> None:
    text = lines({"path": "a.mp4", "caption": "x"}, {"path": "b.mp4", "caption": ["y", "z"]})
    source = read_source(write(tmp_path / "m.jsonl", text))
    assert rows(source, "caption", "captions") == [("x", ["x"]), ("y", ["y", "z"])]


def test_cogvideox_fun_metadata(tmp_path: Path) -> None:
    entries = [
        {"file_path": "train/1.mp4", "text": "a dog", "type": "video", "width": 1280, "height": 720},
        {"file_path": "train/2.jpg", "text": "a cat", "type": "image"},
        {"file_path": "train/3.mp4", "text": "a bird", "control_file_path": "c/3.mp4"},
    ]
    source = read_source(write(tmp_path / "metadata.json", entries))
    assert source.format == "cogvideox-fun json"
    assert rows(source) == [
        ("train/1.mp4", "a dog", "video", 720, 1280, None, None),
        ("train/2.jpg", "a cat", "image", None, None, 1, None),
        ("train/3.mp4", "a bird", "video", None, None, None, None),  # without a type, its ending decides
    ]
    assert source.table["control"].to_list() == [None, None, "c/3.mp4"]


def test_open_sora_plan_annotation_1_3(tmp_path: Path) -> None:
    source = read_source(write(tmp_path / "a.json", ANNOTATION))
    assert source.format == "open-sora-plan json"
    assert rows(source) == [
        ("v/1.mp4", "a dog", "video", 720, 1280, 93, 24.0),
        ("v/2.mp4", "a cat", "video", 480, 640, 40, 30.0),
        ("i/3.jpg", "a bird", "image", 512, 512, 1, None),
    ]
    assert rows(source, "start_frame", "end_frame", "captions")[:2] == [
        (10, 103, ["a dog", "one dog"]),  # num_frames decides, not the end of the cut
        (None, None, ["a cat"]),
    ]
    assert source.table["crop"].to_list()[0] == [0, 1280, 0, 720]


def test_open_sora_plan_annotation_1_1(tmp_path: Path) -> None:
    entries = [{"path": "x/1", "cap": "a dog", "frame_idx": "5:70"}, {"path": "2.mp4", "cap": "b"}]
    source = read_source(write(tmp_path / "a.json", entries))
    assert rows(source, "path", "frames", "start_frame", "end_frame") == [
        ("x/1.mp4", 65, 5, 70),
        ("2.mp4", None, None, None),
    ]
    write(tmp_path / "a.json", [*entries, {"path": "3.mp4", "cap": "c", "frame_idx": "9:9"}])
    with pytest.raises(DataError, match=r"row 2, column 'frame_idx': '9:9' is no window"):
        read_source(tmp_path / "a.json")


def test_long_json_is_read_in_portions_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        {"path": f"{i}.mp4", "cap": ["a", "b"] if i == 7 else "c", "aes": i / 2 if i > 4 else i} for i in range(9)
    ]
    write(tmp_path / "a.json", entries)
    whole = read_source(tmp_path / "a.json").table
    monkeypatch.setattr(text_tables, "_PORTION", 2)
    assert read_source(tmp_path / "a.json").table.equals(whole)
    assert whole["captions"].to_list()[6:8] == [["c"], ["a", "b"]]


# lists of sets


def make_sets(root: Path) -> None:
    for name in ("videos/a", "images", "emb/a", "emb2"):
        (root / name).mkdir(parents=True)
    write(root / "anno/a.json", ANNOTATION[:2])
    write(root / "anno/i.json", ANNOTATION[2:])


def test_merge_data_with_two_and_three_items(tmp_path: Path) -> None:
    make_sets(tmp_path)
    listed = f"videos/a, emb/a ,anno/a.json\n\n{tmp_path}/images,{tmp_path}/anno/i.json\n"
    source = read_source(write(tmp_path / "merge_data.txt", listed))
    assert source.format == "list" and source.root == tmp_path
    assert rows(source, "path", "caption", "frames", "embedding") == [
        ("videos/a/v/1.mp4", "a dog", 93, "emb/a/v/1.npz"),
        ("videos/a/v/2.mp4", "a cat", 40, "emb/a/v/2.npz"),
        ("images/i/3.jpg", "a bird", 1, None),
    ]
    assert source.locate(2) == f"{tmp_path}/anno/i.json row 0"
    assert Manifest.read(tmp_path / "merge_data.txt").file(2) == tmp_path / "images/i/3.jpg"


def test_merge_data_with_two_encoders_and_a_root(tmp_path: Path) -> None:
    make_sets(tmp_path)
    write(tmp_path / "video_data.txt", "videos/a,emb/a,emb2,anno/a.json\n")
    source = read_source(tmp_path / "video_data.txt", root=tmp_path)
    assert rows(source, "embedding", "embedding_2")[0] == ("emb/a/v/1.npz", "emb2/v/1.npz")
    with pytest.raises(DataError, match=r"line 1: .*emb/a is outside the root"):
        read_source(tmp_path / "video_data.txt", root=tmp_path / "videos")


def test_lists_are_found_from_the_current_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_sets(tmp_path)
    write(tmp_path / "lists/image_data.txt", "images,anno/i.json\n")
    with pytest.raises(DataError, match="line 1: no folder 'images'"):
        read_source(tmp_path / "lists/image_data.txt")
    monkeypatch.chdir(tmp_path)
    assert rows(read_source(tmp_path / "lists/image_data.txt"), "path") == [("i/3.jpg",)]


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("videos/a,b,c,d,anno/a.json\n", "line 1 has 5 items"),
        ("videos/a,anno/a.json\nvideos/a\n", "line 2 has 1 items"),
        ("videos/a,anno/none.json\n", "line 1: no annotation file 'anno/none.json'"),
        ("videos/a,merge_data.txt.json\n", "no annotation file"),
        ("videos/a,anno/a.pkl\n", "a pickle can run code"),
        ("videos/a,bad.json\n", r"bad.json: row 0, column 'path'.*leaves the root"),
        ("/proc,/proc,/tmp,anno/a.json\n", "share no folder but /"),
    ],
)
def test_wrong_lists_are_refused_with_their_line(tmp_path: Path, listed: str, message: str) -> None:
    make_sets(tmp_path)
    write(tmp_path / "anno/a.pkl", pickle.dumps(ANNOTATION))
    write(tmp_path / "bad.json", [{"path": "../../secret.mp4", "cap": "x"}])
    with pytest.raises(DataError, match=message):
        read_source(write(tmp_path / "merge_data.txt", listed))


# folders of media, tars


def test_a_media_folder_takes_captions_from_text_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("b.mp4", "sub/a.png", "sub/c.mp4", ".hidden/x.mp4", "sub/.h.mp4", "notes.md"):
        write(tmp_path / name, b"x")
    write(tmp_path / "b.txt", "  a dog\nruns \n")
    write(tmp_path / "sub/a.txt", "")
    source = read_source(tmp_path)
    assert source.format == "media folder"
    assert rows(source, "path", "caption", "kind") == [
        ("b.mp4", "a dog runs", "video"),
        ("sub/a.png", "", "image"),
        ("sub/c.mp4", "", "video"),
    ]
    assert "1 of 3 files have no caption" in caplog.text


def test_a_caption_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "set/a.mp4", b"x")
    (tmp_path / "set/a.txt").symlink_to(write(tmp_path / "secret.txt", "secret"))
    with pytest.raises(DataError, match="leaves"):
        read_source(tmp_path / "set")


def test_a_media_folder_may_lie_below_another_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "set/a.mp4", b"x")
    monkeypatch.chdir(tmp_path)
    for folder, root in ((Path("set"), tmp_path), (tmp_path / "set", Path()), (Path("set/../set"), Path())):
        assert rows(read_source(folder, root=root), "path") == [("set/a.mp4",)]


def test_a_table_among_its_clips_is_read_unless_a_scan_has_written_it(tmp_path: Path) -> None:
    write(tmp_path / "a.mp4", b"x")
    table = pl.DataFrame({"path": ["b.mp4"], "caption": "x"})
    scanned = table.with_columns(codec=pl.lit("h264"), rotation=0, vfr=False, bytes=1)
    scanned.write_parquet(tmp_path / "kept.parquet")
    assert read_source(tmp_path).format == "media folder"
    table.write_parquet(tmp_path / "train.parquet")
    assert rows(read_source(tmp_path), "path") == [("b.mp4",)]
    (tmp_path / "a.mp4").unlink()
    (tmp_path / "train.parquet").unlink()
    assert rows(read_source(tmp_path), "path") == [("b.mp4",)]


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def make_tars(root: Path) -> np.ndarray:
    frames = np.zeros((12, 32, 48, 3), dtype=np.uint8)
    frames[:, :, :, 0] = np.arange(12)[:, None, None] * 20
    write_video(root / "clip.mp4", frames, 24)
    write_image(root / "still.png", frames[0])
    (root / "shards").mkdir()
    with tarfile.open(root / "shards/0.tar", "w") as archive:
        add(archive, "000.mp4", (root / "clip.mp4").read_bytes())
        add(archive, "000.json", json.dumps({"text_english": "a ramp", "fps": 24.0, "aes": 3}).encode())
        add(archive, "001.mask.png", b"no picture")
        add(archive, "001.png", (root / "still.png").read_bytes())
        add(archive, "001.txt", b"a still\n")
        add(archive, "002.txt", b"no media here")
    with tarfile.open(root / "shards/1.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, "../../x/000.png", (root / "still.png").read_bytes())
    (root / "clip.mp4").unlink()
    (root / "still.png").unlink()
    return frames


def test_tar_members_are_listed_and_read_in_place(tmp_path: Path) -> None:
    frames = make_tars(tmp_path)
    source = read_source(tmp_path / "shards")
    assert source.format == "tar"
    assert rows(source, "path", "member", "caption", "kind", "fps", "aes") == [
        ("0.tar", "000.mp4", "a ramp", "video", 24.0, 3),
        ("0.tar", "001.png", "a still", "image", None, None),
        ("1.tar", "../../x/000.png", "", "image", None, None),
    ]
    path, name, offset, num_bytes = rows(source, "path", "member", "offset", "bytes")[0]
    member = Member(source.root / str(path), str(name), int(str(offset)), int(str(num_bytes)))
    with MemberFile(member) as file, av.open(file) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(decoded) == 12
    assert np.abs(decoded[7].astype(int) - frames[7]).mean() < 20 < np.abs(decoded[0].astype(int) - frames[11]).mean()
    assert {item.name for item in tmp_path.rglob("*")} == {"shards", "0.tar", "1.tar"}  # nothing was unpacked
    assert read_source(tmp_path / "shards/1.tar").table["path"].to_list() == ["1.tar"]


def test_tars_may_lie_below_another_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tars(tmp_path)
    monkeypatch.chdir(tmp_path)
    for folder, root in ((Path("shards"), tmp_path), (tmp_path / "shards", Path()), (Path("shards/0.tar"), Path())):
        assert read_source(folder, root=root).table["path"][0] == "shards/0.tar"
    (tmp_path / "clips").mkdir()
    with pytest.raises(DataError, match=r"shards/0\.tar' is absolute and outside the root clips; .* give the folder"):
        read_source(Path("shards/0.tar"), root=Path("clips"))


def test_members_whose_names_are_no_utf8_are_listed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        add(archive, "caf\u00e8.mp4", b"x")
        add(archive, "caf\u00e9.mp4", b"y")
    assert read_source(tmp_path / "x.tar").table["member"].to_list() == [r"caf\xe8.mp4", r"caf\xe9.mp4"]


def test_a_member_file_seeks_and_ends_like_a_file(tmp_path: Path) -> None:
    write(tmp_path / "x.tar", b"0123456789")
    with MemberFile(Member(tmp_path / "x.tar", "m", 3, 4)) as file:
        assert file.read() == b"3456"
        assert file.read(1) == b""
        assert file.seek(-2, io.SEEK_END) == 2 and file.read(9) == b"56"
        assert file.seek(1) == 1 and file.read(2) == b"45" and file.tell() == 3
        assert file.seek(-1, io.SEEK_CUR) == 2
        with pytest.raises(OSError, match="before the start"):
            file.seek(-1)
    with pytest.raises(DataError, match="the tar was changed"):
        MemberFile(Member(tmp_path / "x.tar", "m", 8, 4))


def test_a_manifest_of_tar_members_knows_where_they_are(tmp_path: Path) -> None:
    make_tars(tmp_path)
    table = read_source(tmp_path / "shards").table.with_columns(
        height=32, width=48, frames=pl.col("frames").fill_null(12)
    )
    table.write_parquet(tmp_path / "m.parquet")
    manifest = Manifest.read(tmp_path / "m.parquet", root=tmp_path / "shards")
    member = manifest.member(1)
    assert member is not None and member.tar == tmp_path / "shards/0.tar"
    with MemberFile(member) as file:
        assert file.read(4) == b"\x89PNG"
    changed = table.with_columns(pl.col("offset") + 512)
    changed.write_parquet(tmp_path / "n.parquet")
    assert Manifest.read(tmp_path / "n.parquet").fingerprint != manifest.fingerprint


def test_a_cut_tar_is_refused_with_the_member(tmp_path: Path) -> None:
    make_tars(tmp_path)
    whole = (tmp_path / "shards/0.tar").read_bytes()
    (tmp_path / "shards/0.tar").write_bytes(whole[:700])
    with pytest.raises(DataError, match=r"0\.tar: (cut off in '000\.mp4'|not a readable tar)"):
        read_source(tmp_path / "shards")


# paths


def test_absolute_paths_below_the_root_become_relative(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    text = f"path,text\n{tmp_path}/link/a.mp4,x\n{tmp_path}/real/b.mp4,y\n./c.mp4,z\n"
    source = read_source(write(tmp_path / "m.csv", text), root=tmp_path / "link")
    assert source.table["path"].to_list() == ["a.mp4", "b.mp4", "c.mp4"]


def test_absolute_paths_outside_the_root_are_refused_with_the_folder_they_share(tmp_path: Path) -> None:
    write(tmp_path / "m.csv", "path,text\na.mp4,x\n/data/set/v/1.mp4,x\n/data/set/w/2.mp4,y\n")
    with pytest.raises(DataError, match=r"row 1, column 'path'.*outside the root .*lie below /data/set:"):
        read_source(tmp_path / "m.csv")


@pytest.mark.parametrize(
    "path", ["../a.mp4", "b/../../a.mp4", "http://host/a.mp4", "concat:a|b", "\\\\host\\a.mp4", ""]
)
@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_paths_that_leave_their_root_are_refused(tmp_path: Path, path: str, kind: str) -> None:
    table = pl.DataFrame({"path": ["ok.mp4", path], "caption": ["x", "y"]})
    file = tmp_path / "source"
    {"csv": table.write_csv, "json": table.write_json, "jsonl": table.write_ndjson, "parquet": table.write_parquet}[
        kind
    ](file)
    with pytest.raises(DataError, match=r"source: row 1, column 'path'"):
        read_source(file)


# refusals


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (b"\xef\xbb\xbf", "the file is empty"),
        (b"\xc2\xa0\n", "the file is empty"),
        (pickle.dumps([1]), "a pickle can run code.*with json.dump"),
        (b"\x1f\x8b\x08\x00abc", "gzip-compressed; unpack it first"),
        (b"PK\x03\x04abc", "a zip or spreadsheet"),
        (b"\x00\x00\x00\x20ftypisom", "this is a video; name the folder"),
        (b"\x89PNG\r\n\x1a\n", "this is an image; name the folder"),
        (b"\x00\x01\x02", "binary, but not parquet"),
        (b"PAR1 and no more", "not a readable parquet table"),
        ("path,text\nä.mp4,ö\n".encode("latin-1"), "no UTF-8 text .* at byte 10"),
        ("path\n".encode("utf-16"), "UTF-16"),
        (b"[]", "the list is empty"),
        (b"[1, 2]", "first item is no object"),
        (b'[{"path": "a.mp4"}, 3]', "entry 1 is a number"),
        (b'[{"path": "a.mp4"},\n {"path": }]', "entry 1, line 2: not JSON"),
        (b'[{"path": "a.mp4"}', "it is cut"),
        (b'[{"path": "a.mp4"}] x', "line 1: more text behind the list"),
        (b'{"path": "a.mp4"}\n{"path": \n', "line 2: not JSON"),
        (b'{"path": \n{"path": "a.mp4"}\n', "its first line is not a JSON object"),
        (b'{"path": "a.mp4"}\n[3]\n', "line 2: is a list"),
        (b'{\n  "videos": [],\n "x": 1\n}', "one JSON object with the keys videos, x; expected a list"),
        (b'{"__kind__": "wids-shard-index-v1", "shardlist": []}', "index of tar shards; name the folder"),
        (b'[{"path": "a.mp4", "height": 3}, {"path": "b.mp4", "height": "x"}]', "entry 1, 'height': 'x' is text"),
        (b"path,text,height\na.mp4,x,64\nb.mp4,y,tall\n", "row 1, column 'height': 'tall' is no number"),
        (b"path,text,height\na.mp4,x,64.5\n", "row 0, column 'height': 64.5 is no whole number"),
        (b"path,text\na.mp4,a dog, running\n", "line 2 has 3 cells, the header 2: put captions"),
        (b"name,score\na,3\n", r"names no column of files \(found: name, score\)"),
        (b"a.mp4,a dog\nb.mp4,a cat\n", "no header; put one above it, e.g. path,text"),
        (b"path, path,text\na.mp4,b.mp4,x\n", "two columns of its first line are named 'path'"),
        (b'[{"path": "a.mp4", "cap": "x"}, {"path": "b", "cap": "\\ud800"}]', "entry 1, 'cap': .* half of a letter"),
        (b'{"path": "a.mp4", "cap": "x"}\n{"path": "b", "cap": "y\\ud800 z"}\n', "line 2, 'cap': .* half of a letter"),
        (b'{"path": "a.mp4", "cap": [{"x": "y"}]}\n', r"column 'caption' has type List\(Struct"),
        (b"path,member,offset\na.mp4,x,3\n", "together say where a clip is in a tar; complete them, or rename"),
        (b"path,member,offset,bytes\na.mp4,,,9\na.mp4,x,,3\n", "row 1, column 'offset': None must not be null"),
        (b"path,start_frame\na.mp4,3\n", "row 0, column 'start_frame': 3 needs end_frame"),
        (b"path,end_frame\na.mp4,3\n", "row 0, column 'end_frame': 3 needs start_frame"),
        (b"path,start_frame,end_frame\na.mp4,,\nb.mp4,x,9\n", "row 1, column 'start_frame': 'x' is no number"),
        (b"path,start_frame,end_frame\na.mp4,-3,9\n", "row 0, column 'start_frame': -3 must be 0 or more"),
        (b"path,start_frame,end_frame\na.mp4,0,9\nb.mp4,5,5\n", "row 1, column 'end_frame': 5 must be above"),
        (b"hello world\n", "not a readable table"),
        (b"path,text\n", "no row in it"),
    ],
)
def test_what_is_no_source_is_refused_with_a_reason(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_source(write(tmp_path / "source", content))
    assert str(caught.value).startswith(str(tmp_path / "source"))


@pytest.mark.parametrize(
    ("first", "line"),
    [
        (b"", b"a/long/path/%d.mp4"),
        (b"path,text\n", b"a/long/path/%d.mp4,x"),
        (b"", b'{"path": "a/long/path/%d.mp4"}'),
        (b"", b"videos/%d,embeddings,annotation.json"),
    ],
    ids=["paths", "csv", "jsonl", "list"],
)
def test_a_wrong_byte_far_into_a_text_is_found(tmp_path: Path, first: bytes, line: bytes) -> None:
    good = first + b"".join(line % number + b"\n" for number in range(60_000))
    path = write(tmp_path / "source.txt", good + b"caf\xe9.mp4\n")
    message = rf"source\.txt: line {len(good.splitlines()) + 1} is no UTF-8 text .* at byte {len(good) + 3}\)"
    with pytest.raises(DataError, match=message):
        read_source(path)


def test_a_count_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    heights = pl.Series([64, 2**63 + 5], dtype=pl.UInt64)
    pl.DataFrame({"path": ["a.mp4", "b.mp4"], "height": heights}).write_parquet(tmp_path / "m.parquet")
    with pytest.raises(DataError, match=r"row 1, column 'height': 9223372036854775813 is no whole number below"):
        read_source(tmp_path / "m.parquet")


def test_folders_without_clips_and_missing_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "set/readme.md", "x")
    with pytest.raises(DataError, match=r"no table, tar or media in it \(it holds: readme.md\)"):
        read_source(tmp_path / "set")
    with pytest.raises(DataError, match="no such file"):
        read_source(tmp_path / "none.csv")


def test_rows_without_sizes_are_told_with_the_command_that_fills_them_in(tmp_path: Path) -> None:
    entries = [*ANNOTATION, {"path": "v/9.mp4", "cap": "x", "fps": 24.0}]
    path = write(tmp_path / "a.json", entries)
    message = (
        r"height is missing in 1 of 4 rows \(first: row 3\); width .*; frames .*frameloom data scan .*a\.json --out"
    )
    with pytest.raises(DataError, match=message):
        Manifest.read(path)
    assert len(Manifest.read(path, where="height is not null")) == 3


def test_an_unknown_ending_has_no_kind_and_is_no_manifest_row(tmp_path: Path) -> None:
    path = write(tmp_path / "c.csv", "path,text,num_frames,height,width,fps\na.xyz,x,9,64,64,24\n")
    assert rows(read_source(path), "kind") == [(None,)]
    with pytest.raises(DataError, match=r"row 0, column 'kind': None is unknown: the file's ending"):
        Manifest.read(path)
