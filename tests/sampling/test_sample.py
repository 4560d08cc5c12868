"""From a run to files: the same request gives the same video, and no prompt leaves the output folder."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from frameloom.checkpoint.reader import list_steps
from frameloom.core.errors import CheckpointError, DataError, RunError
from frameloom.data.media.writing import read_metadata
from frameloom.interop.export.export import Export, export_run
from frameloom.sampling.load import Source, load_sampler, open_sampler
from frameloom.sampling.pipeline import Sampler, generate, write_results
from frameloom.sampling.request import Request, read_prompts
from frameloom.training.train import train
from tests.faults.warm import run_frameloom

FEW = ["--sample.steps", "3"]
PROMPTS = ["a red circle", "a blue square moves left"]


@pytest.fixture
def run(world) -> Path:
    # The last layer starts from zeros; a few steps at a high rate make a model whose prompts matter.
    return train(world.recipe("--train.steps", "8", "--optim.lr", "1e-2"))


@pytest.fixture
def sampler(run: Path) -> Sampler:
    return load_sampler(run, FEW)


def frames(sampler: Sampler, *requests: Request) -> list[np.ndarray]:
    return [result.frames_FHWC for result in generate(sampler, requests)]


def test_a_request_gives_the_same_video_alone_or_among_others(sampler):
    first, second = Request(PROMPTS[0], 1), Request(PROMPTS[1], 2)
    alone = frames(sampler, first)[0]
    assert alone.shape == (9, 64, 64, 3) and alone.dtype == np.uint8
    among = frames(sampler, second, first)[1]
    assert np.abs(alone.astype(int) - among).max() <= 1
    assert np.abs(alone.astype(int) - frames(sampler, Request(PROMPTS[0], 9))[0]).max() > 10


def test_guidance_and_averaged_weights_matter(run):
    plain = frames(load_sampler(run, [*FEW, "--sample.guidance", "1"]), Request(PROMPTS[0], 1))[0]
    guided = frames(load_sampler(run, [*FEW, "--sample.guidance", "8"]), Request(PROMPTS[0], 1))[0]
    raw = frames(
        load_sampler(run, [*FEW, "--sample.guidance", "1", "--sample.weights", "raw"]), Request(PROMPTS[0], 1)
    )[0]
    assert not np.array_equal(plain, guided) and not np.array_equal(plain, raw)


def test_a_file_says_how_it_was_made(sampler, tmp_path):
    path = write_results(sampler, generate(sampler, [Request(PROMPTS[0], 5)]), tmp_path)[0]
    about = read_metadata(path)
    assert about["seed"] == "5" and about["sample.steps"] == "3" and about["run"] == "run" and about["step"] == "8"


def test_one_frame_is_a_picture(run, tmp_path):
    sampler = load_sampler(run, [*FEW, "--sample.frames", "1"])
    assert write_results(sampler, generate(sampler, [Request(PROMPTS[0], 5)]), tmp_path)[0].suffix == ".png"


def test_prompts_come_from_the_line_and_from_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n two \n")
    assert read_prompts(["zero"], file) == ["zero", "one", "two"]
    with pytest.raises(DataError, match="no prompt given"):
        read_prompts([], None)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"prompts.txt"):
        read_prompts([], file)


def test_a_folder_that_is_no_run_is_refused(tmp_path, run):
    with pytest.raises(RunError, match="not a run folder"):
        load_sampler(tmp_path / "nothing")
    for path in (run / "checkpoints").iterdir():
        (path / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError):
        load_sampler(run)


def test_a_step_that_is_not_there_is_told_alike_by_sample_and_export(run, tmp_path):
    message = re.escape(f"{run}: has no checkpoint of step 999; there are {list_steps(run / 'checkpoints')}")
    with pytest.raises(CheckpointError, match=message):
        load_sampler(run, step=999)
    with pytest.raises(CheckpointError, match=message):
        export_run(Export(run, "original", tmp_path / "out", step=999))


def test_flags_that_a_repeated_file_would_pass_over_are_refused(tmp_path):
    words = ["--steps", "3", "--last-image=a.png", "--sample.fps", "9", "--out", str(tmp_path), "--sequence", "1"]
    done = run_frameloom("sample", "--like", "a.mp4", *words)
    assert done.returncode == 2 and "leave --steps, --last-image, --sample.fps out" in done.stderr


def test_a_place_that_is_no_folder_is_told_before_a_model_is_looked_for(tmp_path):
    (tmp_path / "file").touch()
    for words in (["no-model", "--prompt", "a"], ["--like", "no-file.mp4"]):
        done = run_frameloom("sample", *words, "--out", tmp_path / "file")
        assert done.returncode == 2 and f"--out {tmp_path / 'file'}" in done.stderr


def test_the_export_of_a_run_samples_like_the_run(run, sampler):
    """Its recipe lies beside it; averaged weights are what is exported."""
    exported = open_sampler(Source(run / "export", tuple(FEW)))
    assert np.array_equal(frames(exported, Request(PROMPTS[0], 1))[0], frames(sampler, Request(PROMPTS[0], 1))[0])
    raw = load_sampler(run, [*FEW, "--sample.weights", "raw"])
    assert not np.array_equal(frames(exported, Request(PROMPTS[0], 1))[0], frames(raw, Request(PROMPTS[0], 1))[0])


@pytest.mark.slow
def test_the_command_writes_videos_and_a_contact_sheet(run, tmp_path):
    command = ["sample", str(run), "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]
    command += ["--steps", "2", "--guidance", "2", "--seed", "7", "--out", str(tmp_path / "out")]
    done = run_frameloom(*command)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    made = ["a-blue-square-moves-left-seed8.mp4", "a-red-circle-seed7.mp4"]
    assert names == [*made, "contact-sheet.png", "samples.jsonl"]
    # The same call once more finds its files; one of them can be made again from itself.
    before = [(tmp_path / "out" / name).stat().st_mtime_ns for name in made]
    assert run_frameloom(*command).returncode == 0
    assert [(tmp_path / "out" / name).stat().st_mtime_ns for name in made] == before
    like = ["--like", str(tmp_path / "out" / made[0]), "--out", str(tmp_path / "like")]
    done = run_frameloom(command[0], *like)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "like" / made[0]).read_bytes() == (tmp_path / "out" / made[0]).read_bytes()
    refused = run_frameloom(command[0], "--weights", "best")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
