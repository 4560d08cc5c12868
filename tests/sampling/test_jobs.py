"""Whole jobs: refused before a model is loaded, repeated to the bit, shared by processes."""

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

from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.sampling.batch import LOG, run_job
from frameloom.sampling.load import load_model
from frameloom.sampling.outputs import read_frames
from frameloom.sampling.reproduce import reproduce
from tests.faults.warm import run_frameloom
from tests.sampling.conftest import Files, Load


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


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
