"""Paths, archives and prompts lead nowhere else."""

from __future__ import annotations

import io
import logging
import os
import socket
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import DataError, FrameloomError
from frameloom.core.logging import get_logger, set_up_logging
from frameloom.core.paths import clean_name
from frameloom.data.manifest.manifest import Manifest, write_manifest
from frameloom.data.manifest.sources.reading import read_source
from frameloom.data.media import decode
from frameloom.data.media.decode import read_clip
from frameloom.data.media.writing import read_metadata, write_video
from frameloom.sampling.load import load_model
from frameloom.sampling.outputs import free_path, write_samples
from frameloom.sampling.pipeline import generate
from frameloom.training.train import train

# Row 32: Nothing outside of a root is read or written, and no address is called: by paths, links, tars, zips,
# playlists.

WHITE = 250


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A root, and a clip outside of it that is white all over."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    write_video(outside / "secret.mp4", np.full((12, 48, 64, 3), WHITE, np.uint8), 24, preset="ultrafast")
    write_video(root / "good.mp4", np.full((12, 48, 64, 3), 40, np.uint8), 24, preset="ultrafast")
    return root, outside / "secret.mp4"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Listens; a connection would wait here to be accepted."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(0.05)
        yield listening


def was_called(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except TimeoutError:
        return False
    return True


def read_row(root: Path, path: str) -> np.ndarray:
    """The first frame of a manifest's only row, as a run reads it."""
    columns = {"path": [path], "caption": ["x"], "kind": ["video"], "height": [48], "width": [64], "frames": [12]}
    write_manifest(root / "manifest.parquet", pl.DataFrame({**columns, "fps": [24.0]}))
    manifest = Manifest.read(root / "manifest.parquet")
    return read_clip(manifest.file(0), indices=[0], height=48, width=64).numpy()


def test_32_paths_of_a_manifest_stay_inside_and_call_nobody(places, server, tally):
    root, secret = places
    (root / "link.mp4").symlink_to(secret)
    (root / "linked").symlink_to(secret.parent)
    address = f"http://127.0.0.1:{server.getsockname()[1]}/secret.mp4"
    wrong = ["../outside/secret.mp4", str(secret), "link.mp4", "linked/secret.mp4", "a/../../outside/secret.mp4"]
    wrong += [address, f"concat:{secret}", f"file:{secret}", "data:video/mp4;base64,AAAA", f"subfile,,:{secret}"]
    for path in wrong:
        tally.inject()
        with pytest.raises(FrameloomError):
            read_row(root, path)
    assert not was_called(server)
    assert read_row(root, "good.mp4").mean() < 100


def scripts(secret: Path, server: socket.socket) -> dict[str, str]:
    """Texts that FFmpeg follows to other files or addresses, if it may."""
    address = f"http://127.0.0.1:{server.getsockname()[1]}/secret.mp4"
    return {
        "concat": f"ffconcat version 1.0\nfile '{secret.name}'\n",
        "playlist": f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1,\n{secret.name}\n#EXT-X-ENDLIST\n",
        "playlist of an address": f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1,\n{address}\n#EXT-X-ENDLIST\n",
        "concat of an address": f"ffconcat version 1.0\nfile '{address}'\n",
    }


def test_32_scripts_named_like_clips_are_not_followed(places, server, tally):
    _, secret = places
    for what, text in scripts(secret, server).items():
        for ending in (".mp4", ".mkv", ".avi"):
            path = secret.with_name(f"script{ending}")
            path.write_text(text)
            tally.inject()
            with pytest.raises(DataError, match="cannot be read"):
                read_clip(path, indices=[0], height=48, width=64)
        assert not was_called(server), what


def test_32_without_the_allow_list_a_script_would_be_followed(places, server, monkeypatch):
    """The control: the white picture of another file comes out."""
    _, secret = places
    path = secret.with_name("script.mp4")
    path.write_text(scripts(secret, server)["concat"])
    with av.open(str(path)) as container:
        assert next(container.decode(video=0)).to_ndarray(format="rgb24").mean() > 200
    everything = "mov,mp4,m4a,3gp,3g2,mj2,concat,hls"
    monkeypatch.setitem(decode.VIDEO_FORMATS, ".mp4", everything)
    assert read_clip(path, indices=[0], height=48, width=64).float().mean() > 200


def evil_members(secret: Path) -> dict[str, Callable[[tarfile.TarFile], None]]:
    def plain(name: str) -> Callable[[tarfile.TarFile], None]:
        def add(archive: tarfile.TarFile) -> None:
            info = tarfile.TarInfo(name)
            info.size = 4
            archive.addfile(info, io.BytesIO(b"evil"))

        return add

    def special(kind: bytes, target: str = "") -> Callable[[tarfile.TarFile], None]:
        def add(archive: tarfile.TarFile) -> None:
            info = tarfile.TarInfo("1.mp4")
            info.type, info.linkname = kind, target
            archive.addfile(info)

        return add

    return {
        "upwards": plain("../outside/evil.mp4"),
        "absolute": plain(str(secret.with_name("evil.mp4"))),
        "symbolic link": special(tarfile.SYMTYPE, str(secret)),
        "hard link": special(tarfile.LNKTYPE, str(secret)),
        "device": special(tarfile.CHRTYPE),
    }


def test_32_tars_are_read_in_place_and_their_links_not_followed(places, tally):
    root, secret = places
    before = sorted(path.name for path in secret.parent.iterdir())
    for number, (what, add) in enumerate(evil_members(secret).items()):
        folder = root / str(number)
        folder.mkdir()
        with tarfile.open(folder / "set.tar", "w") as archive:
            add(archive)
            archive.add(root / "good.mp4", "good.mp4")
        tally.inject()
        table = read_source(folder / "set.tar").table
        members = table["member"].to_list()
        assert "good.mp4" in members and "1.mp4" not in members, what
        # What has a wicked name is still only a piece of the tar.
        assert all(table["path"] == "set.tar") and all(table["offset"] > 0)
    assert sorted(path.name for path in secret.parent.iterdir()) == before


def test_32_other_archives_and_bombs_are_refused_unopened(places, tally, tmp_path):
    root, _ = places
    bomb = root / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../evil.mp4", bytes(20_000_000))
    packed = root / "packed.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(root / "good.mp4", "../evil.mp4")
    for path in (bomb, packed):
        tally.inject()
        with pytest.raises(FrameloomError, match=path.name):
            read_source(path)
    assert not list(tmp_path.rglob("evil.mp4"))


def test_32_unpacked_as_others_do_the_tar_would_leave_its_folder(places):
    """The control."""
    root, secret = places
    with tarfile.open(root / "set.tar", "w") as archive:
        evil_members(secret)["upwards"](archive)
    inside = root / "unpacked"
    inside.mkdir()
    with tarfile.open(root / "set.tar") as archive:
        archive.extractall(root, filter="fully_trusted")
    assert secret.with_name("evil.mp4").exists()


# Row 33: Any prompt becomes one file inside the output folder, with a short plain name, and replaces none; logs stay
# clean.

PROMPTS = [
    *(
        "../../x",
        "a\0b",
        "",
        "\n",
        "a" * 400,
        "🎈" * 60,
        "-rf",
        "CON",
        "nul.txt",
        "$(id)",
        "`id`",
        "<script>",
        "a/b\\c",
    ),
    *("\x1b[31mred\x07", "..", ".", "~", "C:\\x", "%2e%2e/x", "a b", "é" * 200, "\u202egnp.exe", ".hidden", "*?"),
]


def check(folder: Path, prompt: str) -> None:
    """Three files for the same prompt: all different, all inside, none of them hidden or long."""
    seen = set()
    for _ in range(3):
        path = free_path(folder, SampleRequest(prompt=prompt, seed=3))
        assert path.parent == folder and path.resolve().parent == folder.resolve()
        name = path.name
        assert len(name.encode()) <= 120 and name.isascii() and name.isprintable() and os.sep not in name
        assert not name.startswith((".", "-")) and name.partition("-seed")[0].lower() not in ("con", "nul", "aux")
        assert not path.exists()
        path.write_bytes(b"x")
        seen.add(path)
    assert len(seen) == 3
    for path in seen:
        path.unlink()


@pytest.mark.parametrize("prompt", PROMPTS, ids=ascii)
def test_33_a_wicked_prompt_becomes_a_plain_name(tmp_path, tally, prompt):
    tally.inject()
    check(tmp_path, prompt)


@settings(
    max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(prompt=st.text(max_size=300))
def test_33_generated_prompts_become_plain_names(tmp_path, tally, prompt):
    tally.inject()
    check(tmp_path, prompt)


def test_33_a_prompt_taken_as_a_name_would_leave_the_folder(tmp_path):
    """The control."""
    escaped = (tmp_path / "out" / "../../x").resolve()
    assert not escaped.is_relative_to(tmp_path / "out")
    assert clean_name("../../x") == "x"


def test_33_samples_of_wicked_prompts_are_written_and_carry_the_prompt(world, tally):
    run = train(world.recipe("--train.steps", "1"))
    sampler = load_model(run, ["--sample.steps", "1"])
    prompts = ["../../x", "\x1b[31mred", "x" * 400, ""]
    out = world.folder / "deep" / "out"
    tally.inject(len(prompts))
    results = generate(sampler, [sampler.request(prompt, 3) for prompt in prompts])
    for _ in range(2):
        write_samples(results, out)
    files = [path for path in world.folder.rglob("*seed3*") if path.is_file()]
    assert len(files) == 2 * len(prompts) and {path.parent for path in files} == {out}
    assert {read_metadata(path)["prompt"] for path in files} >= {"../../x", "x" * 400}


def test_33_control_characters_do_not_reach_a_log(capsys, tally):
    tally.inject()
    set_up_logging()
    get_logger("frameloom.faults").warning("prompt %s", "\x1b[31mred\x07\x9b2J")
    text = capsys.readouterr().err
    assert (
        "red" in text and not any(ord(letter) < 32 and letter not in "\n\t" for letter in text) and "\x9b" not in text
    )
    assert logging.getLogger("frameloom").handlers
