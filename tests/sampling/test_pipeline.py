"""From a run to files: the same request gives the same video, prompts get their notes, idle parts leave the device."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from frameloom.checkpoint.reader import list_steps
from frameloom.config.schema.models import CaptionNoteSection
from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import CheckpointError, RunError
from frameloom.data.media.writing import read_metadata
from frameloom.interop.export.export import Export, export_run
from frameloom.sampling.load import load_model
from frameloom.sampling.pipeline import Placement, PromptNote, Sampler, build_note, generate, write_results
from frameloom.training.train import train
from tests.faults.warm import run_frameloom
from tests.sampling.conftest import Load, make_frames

FEW = ["--sample.steps", "3"]
PROMPTS = ["a red circle", "a blue square moves left"]


@pytest.fixture
def run(world) -> Path:
    # The last layer starts from zeros; a few steps at a high rate make a model whose prompts matter.
    return train(world.recipe("--train.steps", "8", "--optim.lr", "1e-2"))


@pytest.fixture
def sampler(run: Path) -> Sampler:
    return load_model(run, FEW)


def frames(sampler: Sampler, *requests: Request) -> list[np.ndarray]:
    return [result.frames for result in generate(sampler, requests)]


def test_a_request_gives_the_same_video_alone_or_among_others(sampler):
    first, second = sampler.request(PROMPTS[0], 1), sampler.request(PROMPTS[1], 2)
    alone = frames(sampler, first)[0]
    assert alone.shape == (9, 64, 64, 3) and alone.dtype == np.uint8
    among = frames(sampler, second, first)[1]
    assert np.abs(alone.astype(int) - among).max() <= 1
    assert np.abs(alone.astype(int) - frames(sampler, sampler.request(PROMPTS[0], 9))[0]).max() > 10


def test_guidance_and_averaged_weights_matter(run):
    plain = frames(load_model(run, [*FEW, "--sample.guidance", "1"]), sampler.request(PROMPTS[0], 1))[0]
    guided = frames(load_model(run, [*FEW, "--sample.guidance", "8"]), sampler.request(PROMPTS[0], 1))[0]
    raw = frames(
        load_model(run, [*FEW, "--sample.guidance", "1", "--sample.weights", "raw"]), sampler.request(PROMPTS[0], 1)
    )[0]
    assert not np.array_equal(plain, guided) and not np.array_equal(plain, raw)


def test_a_file_says_how_it_was_made(sampler, tmp_path):
    path = write_results(sampler, generate(sampler, [sampler.request(PROMPTS[0], 5)]), tmp_path)[0]
    about = read_metadata(path)
    assert about["seed"] == "5" and about["sample.steps"] == "3" and about["run"] == "run" and about["step"] == "8"


def test_one_frame_is_a_picture(run, tmp_path):
    sampler = load_model(run, [*FEW, "--sample.frames", "1"])
    assert write_results(sampler, generate(sampler, [sampler.request(PROMPTS[0], 5)]), tmp_path)[0].suffix == ".png"


def test_a_folder_that_is_no_run_is_refused(tmp_path, run):
    with pytest.raises(RunError, match="not a run folder"):
        load_model(tmp_path / "nothing")
    for path in (run / "checkpoints").iterdir():
        (path / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError):
        load_model(run)


def test_a_step_that_is_not_there_is_told_alike_by_sample_and_export(run, tmp_path):
    message = re.escape(f"{run}: has no checkpoint of step 999; there are {list_steps(run / 'checkpoints')}")
    with pytest.raises(CheckpointError, match=message):
        load_model(run, step=999)
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
    exported = load_model(run / "export", tuple(FEW))
    assert np.array_equal(
        frames(exported, sampler.request(PROMPTS[0], 1))[0], frames(sampler, sampler.request(PROMPTS[0], 1))[0]
    )
    raw = load_model(run, [*FEW, "--sample.weights", "raw"])
    assert not np.array_equal(
        frames(exported, sampler.request(PROMPTS[0], 1))[0], frames(raw, sampler.request(PROMPTS[0], 1))[0]
    )


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


def add(prompt: str, *, style: str = "as_trained", default: int | None = 4, **given: object) -> str:
    said = {name: given.pop(name) for name in ("fps", "motion") if name in given}
    section = CaptionNoteSection(in_sampling=style, motion_in_sampling=default, **said)
    return PromptNote(section, 24).add(prompt, SampleSection(**{"fps": 24, **given}))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (add("raining, sea"), "raining, sea 24 FPS, 4 motion score."),
        (add("raining, sea", style="sentences"), "raining, sea. 24 FPS. 4 motion score."),
        (add(" raining, sea. ", style="sentences"), "raining, sea. 24 FPS. 4 motion score."),
        (add("sea", motion_score=9, fps=False), "sea 9 motion score."),
        (add("sea", default=None), "sea 24 FPS."),
        (add("sea", default=None, motion_score=2), "sea 24 FPS, 2 motion score."),
        (add("sea", motion=None), "sea 24 FPS."),
        (add("sea", frames=1), "sea 4 motion score."),
        (add("sea 16 FPS."), "sea 16 FPS. 4 motion score."),
        (add("sea, 2 motion score."), "sea, 2 motion score. 24 FPS."),
        (add(""), ""),
        (add("", style="sentences"), ""),
    ],
)
def test_a_prompt_gets_what_it_does_not_say_itself(found, wanted):
    assert found == wanted


def test_a_motion_score_alone_asks_for_the_published_note(world):
    assert build_note(world.recipe()) is None
    note = build_note(world.recipe("--sample.motion_score", "7"))
    assert note is not None and note.section.in_sampling == "sentences"
    assert note.add("sea", SampleSection(fps=24, motion_score=7)) == "sea. 24 FPS. 7 motion score."


def test_a_rate_is_spelled_as_clips_of_that_rate_were():
    section = SampleSection(fps=8)
    assert PromptNote(CaptionNoteSection(motion=None), 24).add("sea", section) == "sea 8.0 FPS."
    published = CaptionNoteSection(motion=None, in_sampling="sentences")
    assert PromptNote(published, 24).add("sea", section) == "sea. 8 FPS."


def test_tiles_and_idle_parts_do_not_change_what_is_made(load: Load, model_folders: dict[str, Path]) -> None:
    folder = model_folders["opensora2"]
    parked = load_model(folder, ("--sample.offload", "true"))
    placement = parked.placement
    assert placement is not None and placement.resident == set()
    assert np.array_equal(make_frames(parked), make_frames(load("opensora2")))
    # One part at a time: text, the autoencoder for what is given, the denoiser, the autoencoder again.
    order = [part for part, place in placement.moves if place == "device"]
    assert order == ["text", "vae", "denoiser", "vae"] and placement.resident == set()
    assert placement.moves[1::2] == [(part, "host") for part in order]
    tiled = load_model(folder, ("--sample.tile_px", "32"))
    near = np.abs(make_frames(tiled, width=64).astype(int) - make_frames(load("opensora2"), width=64)).mean()
    assert 0 < near < 16 and load("opensora2").placement.resident == {"text", "vae", "denoiser"}


class Recorder(torch.nn.Module):
    """A part that knows where it was moved."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def to(self, device: torch.device) -> Recorder:  # type: ignore[override]
        self.places.append(str(device))
        return self


def test_a_part_is_parked_when_its_work_fails() -> None:
    parts = {"a": Recorder(), "b": Recorder()}
    placement = Placement(dict(parts), torch.device("meta"), offload=True)
    with pytest.raises(RuntimeError, match="out of memory"), placement.using("a"):
        assert placement.resident == {"a"}
        raise RuntimeError("out of memory")
    assert parts["a"].places == ["cpu", "meta", "cpu"] and placement.resident == set()
