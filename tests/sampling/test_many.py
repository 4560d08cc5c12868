"""Many prompts: rows with settings, files that say how they were made and can be repeated, and processes that share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.data.media.clip_view import CONTACT_SHEET, list_clips
from frameloom.data.media.decode import probe_clip
from frameloom.distributed.ranks import Ranks
from frameloom.evaluate.sample_sets import find_prompts
from frameloom.sampling.batch import LEDGER, RankGroup, sample_many
from frameloom.sampling.jobs import Order, fill_order, fit_ratio, repeat_file
from frameloom.sampling.load import Source
from frameloom.sampling.outputs import read_about, read_frames
from frameloom.sampling.request import ROW_SETTINGS, Request, Row, expand_rows, read_rows
from tests.faults.warm import run_frameloom
from tests.sampling.conftest import Files, Load

ALONE = RankGroup(Ranks())
SETTINGS_CSV = """prompt,neg,seed,frames,guidance,name
"a red circle, small",,7,5,3.5,first
a blue square,blurry,,,,
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def test_rows_have_settings_of_their_own(tmp_path: Path, load: Load) -> None:
    (tmp_path / "rows.csv").write_text(SETTINGS_CSV)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a star", "height": 64, "image": "a.png"}\n\n{"text": "a dot"}\n')
    rows = [*read_rows(["on the line"], tmp_path / "rows.csv"), *read_rows([], tmp_path / "rows.jsonl")]
    requests = expand_rows(rows, load("opensora2").settings, first_seed=10, num_samples=2)
    assert [request.seed for request in requests] == [10, 11, 7, 8, 14, 15, 16, 17, 18, 19]
    assert requests[2].prompt == "a red circle, small" and requests[2].name == "first"
    settings = [request.settings for request in requests]
    assert settings[2] is not None and (settings[2].frames, settings[2].guidance) == (5, 3.5)
    assert settings[4] is not None and settings[4].negative_prompt == "blurry" and settings[4].frames == 9
    assert settings[6] is not None and settings[6].height == 64 and requests[6].head == Path("a.png")
    assert requests[8].prompt == "a dot" and "precision" not in ROW_SETTINGS


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "prompt,framse\nx,9\n", r"a.csv:2: has the column 'framse'.*'frames'"),
        ("a.csv", "seed\n1\n", r"a.csv:2: has no prompt"),
        ("a.csv", "prompt\na,b\n", "more values than columns"),
        ("a.jsonl", '{"prompt": "x", "seed": "one"}', "seed is 'one'"),
        ("a.jsonl", "[1]", "is a list, expected a JSON object"),
        ("a.jsonl", "{", "not JSON"),
        ("a.txt", "\n\n", "no prompt given"),
    ],
)
def test_a_wrong_prompt_file_is_told_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_rows([], tmp_path / name)


def test_a_setting_that_cannot_be_is_told_with_its_line(load: Load) -> None:
    with pytest.raises(DataError, match=r"rows:3: steps is 0"):
        expand_rows([Row("x", settings={"steps": 0}, where="rows:3")], load("latte").settings, first_seed=0)
    sampler = load("latte")
    wrong = expand_rows([Row("x", settings={"height": 40})], sampler.settings, first_seed=0)
    with pytest.raises(ConfigError, match="multiples of 16 pixels"):
        sample_many(sampler, wrong, Path("nowhere"), ALONE)
    wrong = expand_rows([Row("x", settings={"frames": 8})], sampler.settings, first_seed=0)
    with pytest.raises(ConfigError, match="takes 5 or 9 frames, not 8"):
        sample_many(sampler, wrong, Path("nowhere"), ALONE)


@pytest.mark.parametrize(
    ("flags", "row", "message"),
    [
        (["--image", "gone.png"], {}, "--image gone.png: no such file"),
        (["--last-image", "."], {}, "--last-image .: a folder"),
        (["--video", "gone.mp4", "--mask", __file__], {"seed": 1}, "--video gone.mp4: no such file"),
        ([], {"image": "gone.png"}, "rows.jsonl:2: image gone.png: no such file"),
        (["--image", __file__], {"last_image": "."}, "rows.jsonl:2: last_image .: a folder"),
        ([], {"control": "gone.mp4"}, "rows.jsonl:2: control gone.mp4: no such file"),
    ],
)
def test_a_given_file_that_is_none_is_told_before_a_model_is_looked_for(
    tmp_path: Path, flags: list[str], row: dict[str, Any], message: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "b", **row}) + "\n")
    done = run_frameloom("sample", tmp_path / "no-model", "--prompts", rows, *flags, "--out", tmp_path / "out")
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["mp4", "webm", "gif", "png"])
def test_each_format_holds_all_frames_and_says_how_it_was_made(load: Load, tmp_path: Path, format: str) -> None:
    sampler = load("latte", format=format, frames=5, steps=2)
    (path,) = sample_many(sampler, [Request('say "hi"; ünïcode ' + "long " * 90, 5)], tmp_path, ALONE)
    frames, about = read_frames(path), read_about(path)
    assert frames.shape == (5, 32, 48, 3) and (path.is_dir() if format == "png" else path.suffix == f".{format}")
    assert about["prompt"].startswith('say "hi"; ünïcode') and about["seed"] == "5"
    assert about["sample.steps"] == "2" and len(about["weights"]) == len(about["recipe"]) == 64
    if format in ("mp4", "webm"):
        assert probe_clip(path).fps == 8
    exact = read_frames(
        sample_many(load("latte", format="png", frames=5, steps=2), [Request("x", 5)], tmp_path, ALONE)[0]
    )
    assert exact.shape == frames.shape


def test_done_requests_are_kept_and_damaged_ones_made_again(load: Load, tmp_path: Path) -> None:
    sampler = load("latte", steps=1, frames=1)
    requests = [Request(f"prompt {number}", number) for number in range(3)]
    paths = sample_many(sampler, requests[:2], tmp_path, ALONE)
    before = {path: path.stat().st_mtime_ns for path in paths}
    paths[0].write_bytes(b"damaged")
    # A process that was killed while it wrote a line.
    with (tmp_path / LEDGER).open("a") as file:
        file.write('{"file": "x')
    again = sample_many(sampler, requests, tmp_path, ALONE)
    assert again[1] == paths[1] and again[1].stat().st_mtime_ns == before[paths[1]]
    assert again[0] != paths[0] and read_frames(again[0]).shape == (1, 32, 48, 3)
    lines = [json.loads(line) for line in (tmp_path / LEDGER).read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["prompt 0", "prompt 1", "prompt 2"]
    other = sample_many(load("latte", steps=2, frames=1), requests[1:2], tmp_path, ALONE)
    assert other != again[1:2]
    assert sample_many(sampler, [requests[1], requests[1]], tmp_path, ALONE) == [paths[1]] * 2
    assert sample_many(sampler, requests[1:2], tmp_path, ALONE, again=True) != [paths[1]]


def test_rows_that_differ_in_their_name_alone_are_files_of_their_own(load: Load, tmp_path: Path) -> None:
    sampler = load("latte", steps=1, frames=1)
    paths = sample_many(sampler, [Request("a boat", 1, name=name) for name in ("x", "y")], tmp_path, ALONE)
    assert [path.name for path in paths] == ["x-seed1.png", "y-seed1.png"]
    assert np.array_equal(*(read_frames(path) for path in paths))
    before = paths[1].stat().st_mtime_ns
    renamed = sample_many(sampler, [Request("a boat", 1, name=name) for name in ("z", "y")], tmp_path, ALONE)
    assert [path.name for path in renamed] == ["z-seed1.png", "y-seed1.png"]
    assert paths[1].stat().st_mtime_ns == before


def test_the_contact_sheet_is_no_clip_of_a_folder_of_samples(load: Load, tmp_path: Path) -> None:
    requests = [Request("a boat", 1), Request("a car", 2)]
    paths = sample_many(load("latte", steps=1, frames=1), requests, tmp_path / "out", ALONE)
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    clips = list_clips(tmp_path / "out")
    assert [clip.name for clip in clips] == [path.name for path in paths]
    assert list(find_prompts(clips, tmp_path / "prompts.txt").values()) == ["one", "two"]
    assert [clip.name for clip in list_clips(tmp_path / "out" / CONTACT_SHEET)] == [CONTACT_SHEET]


def order(folder: Path, out: Path, *rows: Row, **changes: Any) -> Sequence[Path]:
    source = Source(folder, ("--sample.steps", "2", "--sample.frames", "5"))
    return fill_order(Order(**{"source": source, "rows": rows, "out": out, **changes}), tell=lambda text: None)


def test_a_file_is_repeated_to_the_bit(model_folders: dict[str, Path], files: Files, tmp_path: Path) -> None:
    settings = {"guidance": 3.0, "sampler": "heun"}
    row = Row("a boat", seed=3, name="trip", media={"head": files.picture}, settings=settings)
    (path,) = order(model_folders["opensora2"], tmp_path / "first", row)
    (again,) = repeat_file(path, tmp_path / "again")
    assert again.read_bytes() == path.read_bytes() and again.name == path.name == "trip-seed3.mp4"
    (other,) = order(model_folders["opensora2"], tmp_path / "other", Row("a boat", 4, media={"head": files.picture}))
    assert not np.array_equal(read_frames(other), read_frames(path))


def test_a_file_of_another_model_or_with_changed_inputs_is_not_repeated(
    model_folders: dict[str, Path], files: Files, tmp_path: Path
) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(files.picture.read_bytes())
    (path,) = order(model_folders["opensora2"], tmp_path / "first", Row("a boat", 3, media={"head": picture}))
    with pytest.raises(CheckpointError, match="was made with another model: recipe and weights"):
        repeat_file(path, tmp_path / "again", model=model_folders["latte"])
    picture.write_bytes(files.other.read_bytes())
    with pytest.raises(DataError, match="as its head, which is not there or has changed"):
        repeat_file(path, tmp_path / "again")
    with pytest.raises(DataError, match="does not say how it was made"):
        repeat_file(files.picture, tmp_path / "again")


def test_a_ratio_keeps_the_number_of_pixels(load: Load) -> None:
    sampler = load("latte", height=64, width=64)
    wide = fit_ratio(sampler, "16:9")
    assert (wide.height, wide.width) == (48, 80)
    with pytest.raises(ConfigError, match="not a ratio"):
        fit_ratio(sampler, "wide")


@pytest.mark.slow
def test_two_processes_write_the_files_of_one(model_folders: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.csv"
    rows = [f"prompt number {number},{number},{5 if number % 2 else 1}" for number in range(5)]
    prompts.write_text("\n".join(["prompt,seed,frames", *rows]) + "\n")
    words = [str(model_folders["latte"]), "--prompts", str(prompts), "--steps", "2", "--batch", "2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two = [*launcher, "-m", "frameloom", "sample", *words, "--out", str(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = []
    for name, done in (
        ("one", run_frameloom("sample", *words, "--out", tmp_path / "one", timeout=250)),
        ("two", subprocess.run(two, capture_output=True, text=True, env=environment, timeout=250)),
    ):
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout.replace(f"/{name}/", "/x/"))
    first, second = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert first == second and printed[0] == printed[1]
    assert len(first) == 5 + 2 and {"contact-sheet.png", LEDGER} <= first.keys()
    frames = {Path(name).suffix for name in first}
    assert frames == {".png", ".mp4", ".jsonl"}
