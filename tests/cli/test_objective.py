"""`frameloom objective`, run as a person would run it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import frameloom
from frameloom.cli.recipe import objective as command
from tests.faults.warm import run_frameloom

ROOT = Path(frameloom.__file__).parent.parent
RECIPE = """\
name: tiny
task: denoiser
vae: {weights: vae.safetensors}
data:
  manifest: clips.parquet
  buckets: {64px: {1: [1.0, 4], 9: [1.0, 4]}, 256px: {33: [1.0, 1]}}
train: {steps: 100}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my.yaml").write_text(RECIPE)
    return tmp_path


def run(folder: Path, *words: str) -> tuple[int, str, str]:
    done = run_frameloom("objective", *words, cwd=folder, env={**os.environ, "COLUMNS": "100"})
    return done.returncode, done.stdout, done.stderr


def middles(out: str) -> list[float]:
    return [float(found) for found in re.findall(r"half of the pull below noise level ([\d.]+)", out)]


def test_the_table_shows_where_a_shift_moves_the_training(folder: Path) -> None:
    code, out, err = run(folder, "my.yaml")
    assert (code, err) == (0, "")
    assert "Objective of tiny: flow" in out and middles(out) == [0.5]
    assert len([line for line in out.splitlines() if " to " in line]) == 10
    assert middles(run(folder, "my.yaml", "--objective.shift", "3")[1]) == [0.75]


def test_a_shift_by_size_is_shown_for_small_and_large_buckets(folder: Path) -> None:
    code, out, _ = run(folder, "my.yaml", "--objective.shift", "open_sora2")
    assert code == 0 and len(middles(out)) == 3 and middles(out) == sorted(middles(out))
    assert middles(out)[0] < 0.5 < middles(out)[-1]


def test_page_and_picture_are_written(folder: Path) -> None:
    code, out, _ = run(folder, "my.yaml", "--objective", "{kind: v, min_snr_gamma: 5}", "--out", "page.html")
    assert code == 0 and out.endswith("page.html\n")
    page = (folder / "page.html").read_text()
    assert page.count("<polyline") == 3 and "every size" in page and "http" not in page.replace("http://www.w3.org", "")
    assert run(folder, "my.yaml", "--out", "plot.svg")[0] == 0
    root = ElementTree.parse(folder / "plot.svg").getroot()
    assert root.tag.endswith("svg") and len(root.findall(".//{*}polyline")) == 3


def test_mistakes_are_told(folder: Path) -> None:
    code, out, err = run(folder, "my.yaml", "--out", "plot.gif")
    assert (code, out) == (2, "") and "ends in .html or .svg" in err
    code, _, err = run(folder, "my.yaml", "--task", "autoencoder")
    assert code == 2 and "only a denoiser has an objective" in err
    code, _, err = run(folder, "my.yaml", "--objective.kind", "vv")
    assert code == 2 and "objective.kind is 'vv'" in err


def test_the_help_has_an_example() -> None:
    assert "Example: frameloom objective" in (command.__doc__ or "")
