"""`frameloom compare` and `frameloom eval` without references, as a person meets them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from frameloom.cli.main import main
from frameloom.data.media.writing import write_video
from tests.evaluate.networks import make_clip, make_vit

BOOTSTRAP = ("--intervals", "bootstrap")


@dataclass(frozen=True)
class Command:
    """The real command in this process, which has torch loaded already."""

    captured: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, error = self.captured.readouterr()
        assert "Traceback" not in error
        return int(ended.value.code or 0), out, error


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


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


def test_a_page_and_a_table_are_made_from_two_folders(run: Command, folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    code, text, error = run("compare", *folders, "--out", out)
    assert code == 0, error
    assert "3 prompts and seeds in all 2 folders" in text and "motion_px  quick: 5" in text
    assert out.read_text().count("<video") == 6
    code, _, error = run("compare", *folders, "--out", out)
    assert code == 2 and "--force" in error
    code, text, error = run("compare", *folders, "--out", out, "--force", "--json", "--metrics", "motion")
    assert code == 0 and json.loads(text)["summary"]["motion_px"]["slow"]["mean"] == pytest.approx(2, abs=0.05)


def test_clips_are_measured_alone_with_networks_and_bootstrap(
    run: Command, folders: list[Path], tmp_path: Path
) -> None:
    clip, network = make_clip(tmp_path / "clip"), make_vit(tmp_path / "vit")
    code, text, error = run("eval", folders[0], "--clip", clip, "--network", network, *BOOTSTRAP, "--json")
    assert code == 0, error
    found = json.loads(text)
    assert set(found["summary"]) == {"motion_px", "flicker", "consistency", "clip_similarity"}
    assert found["intervals"] == "bootstrap" and found["summary"]["motion_px"]["mean"] == pytest.approx(2, abs=0.05)
    assert "fid" not in found["sets"]
    code, text, error = run("eval", *folders, "--network", network, "--metrics", "psnr,motion", "--json")
    assert code == 0, error
    both = json.loads(text)
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
def test_mistakes_get_one_message_and_exit_code_2(
    run: Command, folders: list[Path], arguments: list[str], words: str
) -> None:
    code, _, error = run("eval", folders[0], *arguments)
    assert code == 2 and words in error
