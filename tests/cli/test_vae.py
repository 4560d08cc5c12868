"""`frameloom vae` and `frameloom eval` as a person meets them: output, files, exit codes, several processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import World
from tests.faults.warm import run_frameloom


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_frameloom(*arguments, timeout=200)


def test_a_folder_is_reconstructed_and_then_compared(world: World) -> None:
    (world.folder / "in").mkdir()
    clips = sorted((world.shared / "data").rglob("*.mp4"))[:2]
    for clip in clips:
        (world.folder / "in" / clip.name).write_bytes(clip.read_bytes())
    (world.folder / "in" / "broken.mp4").write_bytes(b"no video")
    out = world.folder / "out"
    done = run("vae", "reconstruct", world.folder / "in", out, "--vae", world.shared / "vae", "--frames", 5)
    assert done.returncode == 0, done.stderr
    assert "psnr_db" in done.stdout and "1 of 3 could not be used" in done.stdout
    assert "reconstructing: 3/3" in done.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["clips"] == 2 and metrics["bad"][0]["name"] == "broken.mp4"
    assert (out / "metrics.parquet").is_file() and (out / clips[0].name).is_file()
    (world.folder / "in" / "broken.mp4").unlink()
    compared = run("eval", out, world.folder / "in", "--frames", 5, "--height", 32, "--width", 32, "--json")
    assert compared.returncode == 0, compared.stderr
    assert json.loads(compared.stdout)["summary"]["psnr_db"]["count"] == 2


def test_statistics_are_printed_with_the_scale(world: World) -> None:
    data = world.shared / "data" / "manifest.parquet"
    done = run("vae", "stats", world.shared / "vae", data, "--frames", 5, "--limit", 3, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["clips"] == 3 and len(report["mean"]) == 4 and report["scale"] > 0


def test_a_run_without_an_export_is_told_from_published_weights(world: World) -> None:
    (world.folder / "run" / "checkpoints").mkdir(parents=True)
    done = run("vae", "stats", world.folder / "run", world.shared / "data" / "manifest.parquet")
    assert done.returncode == 2 and f"{world.folder / 'run'}: a run that has not finished" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "wfvea"], "wfvae"),
        (["--name", "wfvae", "--frames", "16"], "13 or 17"),
        (["--name", "wfvae", "--height", "64"], "go together"),
        (["--name", "wfvae", "--set", "tile"], "KEY=VALUE"),
        ([], "which autoencoder"),
    ],
)
def test_mistakes_get_one_message_and_exit_code_2(world: World, arguments: list[str], words: str) -> None:
    done = run("vae", "reconstruct", world.shared / "data" / "manifest.parquet", world.folder / "out", *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert not (world.folder / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vae", "stats", "no-vae", "clips", "--out", "."], "--out .: a folder"),
        (["vae", "reconstruct", "clips", __file__, "--vae", "no-vae"], f"OUT {__file__}"),
        (["eval", "clips", "--out", __file__], f"--out {__file__}"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_before_any_work(words: list[str], message: str) -> None:
    done = run(*words)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.slow
def test_two_processes_share_the_clips_and_the_first_writes_the_table(world: World) -> None:
    data, out = world.shared / "data" / "manifest.parquet", world.folder / "out"
    words = ["frameloom", "vae", "reconstruct", data, out, "--vae", world.shared / "vae", "--frames", 1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run([*launcher, *map(str, words)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    both = json.loads((out / "metrics.json").read_text())
    assert [record["index"] for record in both["files"]] == list(range(40))
    alone = run("vae", "reconstruct", data, world.folder / "alone", *words[5:])
    assert alone.returncode == 0, alone.stderr
    assert json.loads((world.folder / "alone" / "metrics.json").read_text())["files"] == both["files"]
