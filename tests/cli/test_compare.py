"""`frameloom compare` and `frameloom eval` without references, as a person meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from frameloom.data.media import write_video
from tests.evaluate.networks import make_clip, make_vit


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "frameloom", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def write_samples(folder: Path, step: int) -> Path:
    for seed in range(3):
        video = np.full((4, 64, 64, 3), 40, dtype=np.uint8)
        for frame in range(4):
            video[frame, 16:40, 8 + step * frame : 32 + step * frame] = 220
        about = {"prompt": "a white square moves right over a black background", "seed": str(seed)}
        write_video(folder / f"{seed}.mp4", video, 8, metadata=about)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_samples(tmp_path / "slow", 2), write_samples(tmp_path / "quick", 5)]


def test_a_page_and_a_table_are_made_from_two_folders(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = run("compare", *folders, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "3 prompts and seeds in all 2 folders" in done.stdout and "motion_px  quick: 5" in done.stdout
    assert out.read_text().count("<video") == 6
    again = run("compare", *folders, "--out", out)
    assert again.returncode == 2 and "--force" in again.stderr and "Traceback" not in again.stderr
    replaced = run("compare", *folders, "--out", out, "--force", "--json", "--metrics", "motion")
    assert json.loads(replaced.stdout)["summary"]["motion_px"]["slow"]["mean"] == pytest.approx(2, abs=0.05)


def test_clips_are_measured_alone_with_networks_and_bootstrap(folders: list[Path], tmp_path: Path) -> None:
    clip, network = make_clip(tmp_path / "clip"), make_vit(tmp_path / "vit")
    done = run("eval", folders[0], "--clip", clip, "--network", network, "--intervals", "bootstrap", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["summary"]) == {"motion_px", "flicker", "consistency", "clip_similarity"}
    assert found["intervals"] == "bootstrap" and found["summary"]["motion_px"]["mean"] == pytest.approx(2, abs=0.05)
    assert "fid" not in found["sets"]
    paired = run("eval", *folders, "--network", network, "--metrics", "psnr,motion", "--json")
    assert paired.returncode == 0, paired.stderr
    both = json.loads(paired.stdout)
    assert set(both["summary"]) == {"psnr_db", "motion_px"} and both["sets"]["fid_frames"] == 12
    assert both["sets"]["fid"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metrics", "psnr"], "give REFERENCE"),
        (["--metrics", "fliker"], "flicker"),
        (["--metrics", "consistency"], "--network FOLDER"),
        (["--frame-features", "x.npy"], "give it twice"),
    ],
)
def test_mistakes_get_one_message_and_exit_code_2(folders: list[Path], arguments: list[str], words: str) -> None:
    done = run("eval", folders[0], *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
