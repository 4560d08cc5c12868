"""Many requests in one folder: refused before a model is loaded, none made twice, shared by processes, made again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.data.loading.clip_view import list_clips
from frameloom.data.media.writing import CONTACT_SHEET
from frameloom.evaluate.sample_sets import find_prompts
from frameloom.sampling.batch import LOG, run_job, sample_many
from frameloom.sampling.load import load_model
from frameloom.sampling.outputs import read_frames
from frameloom.sampling.reproduce import reproduce
from frameloom.sampling.request import read_requests
from tests.faults.warm import run_frameloom
from tests.sampling.conftest import ALONE, Files, Load


def test_done_requests_are_kept_and_damaged_ones_made_again(load: Load, tmp_path: Path) -> None:
    sampler = load("latte", steps=1, frames=1)
    requests = [sampler.request(f"prompt {number}", number) for number in range(3)]
    paths = sample_many(sampler, requests[:2], tmp_path, ALONE)
    before = {path: path.stat().st_mtime_ns for path in paths}
    paths[0].write_bytes(b"damaged")
    # A process that was killed while it wrote a line.
    with (tmp_path / LOG).open("a") as file:
        file.write('{"file": "x')
    again = sample_many(sampler, requests, tmp_path, ALONE)
    assert again[1] == paths[1] and again[1].stat().st_mtime_ns == before[paths[1]]
    assert again[0] != paths[0] and read_frames(again[0]).shape == (1, 32, 48, 3)
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["prompt 0", "prompt 1", "prompt 2"]
    other = sample_many(sampler, [sampler.request("prompt 1", 1, steps=2)], tmp_path, ALONE)
    assert other != again[1:2]
    assert sample_many(sampler, [requests[1], requests[1]], tmp_path, ALONE) == [paths[1]] * 2
    assert sample_many(sampler, requests[1:2], tmp_path, ALONE, again=True) != [paths[1]]


def test_rows_that_differ_in_their_name_alone_are_files_of_their_own(load: Load, tmp_path: Path) -> None:
    sampler = load("latte", steps=1, frames=1)
    paths = sample_many(sampler, [sampler.request("a boat", 1, name=name) for name in ("x", "y")], tmp_path, ALONE)
    assert [path.name for path in paths] == ["x-seed1.png", "y-seed1.png"]
    assert np.array_equal(*(read_frames(path) for path in paths))
    before = paths[1].stat().st_mtime_ns
    renamed = sample_many(sampler, [sampler.request("a boat", 1, name=name) for name in ("z", "y")], tmp_path, ALONE)
    assert [path.name for path in renamed] == ["z-seed1.png", "y-seed1.png"]
    assert paths[1].stat().st_mtime_ns == before


def test_the_contact_sheet_is_no_clip_of_a_folder_of_samples(load: Load, tmp_path: Path) -> None:
    pipeline = load("latte", steps=1, frames=1)
    requests = [pipeline.request("a boat", 1), pipeline.request("a car", 2)]
    paths = sample_many(pipeline, requests, tmp_path / "out", ALONE)
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    clips = list_clips(tmp_path / "out")
    assert [clip.name for clip in clips] == [path.name for path in paths]
    assert list(find_prompts(clips, tmp_path / "prompts.txt").values()) == ["one", "two"]
    assert [clip.name for clip in list_clips(tmp_path / "out" / CONTACT_SHEET)] == [CONTACT_SHEET]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.mark.parametrize(
    ("common", "row", "message"),
    [
        ({"last_image": Path(".")}, {}, "--last-image .: a folder"),
        ({"video": Path("gone.mp4"), "mask": Path(__file__)}, {"seed": 1}, "--video gone.mp4: no such file"),
        ({}, {"image": "gone.png"}, "rows.jsonl:2: image gone.png: no such file"),
        ({"image": Path(__file__)}, {"last_image": "."}, "rows.jsonl:2: last_image .: a folder"),
        ({}, {"control": "gone.mp4"}, "rows.jsonl:2: control gone.mp4: no such file"),
    ],
)
def test_a_given_file_that_does_not_exist_is_refused(
    tmp_path: Path, common: dict[str, Path], row: dict[str, Any], message: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "b", **row}) + "\n")
    with pytest.raises(DataError, match=re.escape(message)):
        read_requests([], rows, common)


def test_it_is_refused_before_a_model_is_looked_for(tmp_path: Path) -> None:
    words = ["--prompt", "a", "--image", "gone.png", "--out", tmp_path / "out"]
    done = run_frameloom("sample", tmp_path / "no-model", *words)
    assert done.returncode == 2 and "--image gone.png: no such file" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def order(folder: Path, out: Path, **fields: Any) -> Sequence[Path]:
    overrides = ("--sample.steps", "2", "--sample.frames", "5")
    return run_job(lambda: load_model(folder, overrides), [SampleRequest(prompt="a boat", **fields)], out)


def test_a_file_is_repeated_to_the_bit(model_folders: dict[str, Path], files: Files, tmp_path: Path) -> None:
    fields = {"seed": 3, "name": "trip", "image": files.picture, "guidance": 3.0, "sampler": "heun"}
    (path,) = order(model_folders["opensora2"], tmp_path / "first", **fields)
    (again,) = reproduce(path, tmp_path / "again")
    assert again.read_bytes() == path.read_bytes() and again.name == path.name == "trip-seed3.mp4"
    (other,) = order(model_folders["opensora2"], tmp_path / "other", seed=4, image=files.picture)
    assert not np.array_equal(read_frames(other), read_frames(path))


def test_a_file_of_another_model_or_with_changed_inputs_is_not_repeated(
    model_folders: dict[str, Path], files: Files, tmp_path: Path
) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(files.picture.read_bytes())
    (path,) = order(model_folders["opensora2"], tmp_path / "first", seed=3, image=picture)
    with pytest.raises(CheckpointError, match="was made with another model: recipe and weights"):
        reproduce(path, tmp_path / "again", model=model_folders["latte"])
    picture.write_bytes(files.other.read_bytes())
    with pytest.raises(DataError, match="as its image, which is not there or has changed"):
        reproduce(path, tmp_path / "again")
    with pytest.raises(DataError, match="does not say how it was made"):
        reproduce(files.picture, tmp_path / "again")


def test_a_ratio_keeps_the_number_of_pixels(load: Load) -> None:
    sampler = load("latte", height=64, width=64)
    wide = sampler.request("a boat", ratio="16:9")
    assert (wide.height, wide.width) == (48, 80)
    with pytest.raises(ConfigError, match="not a ratio"):
        sampler.request("a boat", ratio="wide")


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
    assert len(first) == 5 + 2 and {"contact-sheet.png", LOG} <= first.keys()
    frames = {Path(name).suffix for name in first}
    assert frames == {".png", ".mp4", ".jsonl"}
