"""From a run to files: the same request gives the same video, prompts get their notes, idle parts leave the device."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from frameloom.checkpoint.reader import list_steps
from frameloom.config.schema.models import CaptionNoteSection
from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import CheckpointError, ConfigError, DataError, RunError
from frameloom.data.media.decode import probe_clip
from frameloom.interop.export.export import Export, export_run
from frameloom.sampling.batch import measure_cache
from frameloom.sampling.block_cache import CacheCount, skipping_blocks
from frameloom.sampling.load import load_model
from frameloom.sampling.outputs import read_about, read_frames
from frameloom.sampling.pipeline import CaptionNote, Offload, Pipeline, add_note
from frameloom.training.train import train
from tests.faults.warm import run_frameloom
from tests.sampling.conftest import MODELS, PROMPT, Load, make_frames

FEW = ["--sample.steps", "3"]
PROMPTS = ["a red circle", "a blue square moves left"]


@pytest.fixture
def run(world) -> Path:
    # The last layer starts from zeros; a few steps at a high rate make a model whose prompts matter.
    return train(world.recipe("--train.steps", "8", "--optim.lr", "1e-2"))


@pytest.fixture
def sampler(run: Path) -> Pipeline:
    return load_model(run, FEW)


def frames(pipeline: Pipeline, prompt: str, seed: int, **fields: object) -> np.ndarray:
    return pipeline.sample(prompt, seed=seed, **fields).frames


def test_a_request_gives_the_same_video_alone_or_among_others(sampler):
    alone = frames(sampler, PROMPTS[0], 2)
    assert alone.shape == (9, 64, 64, 3) and alone.dtype == np.uint8
    among = sampler.sample(PROMPTS[::-1], seed=1, batch_size=2)[1]
    assert among.request.seed == 2 and np.abs(alone.astype(int) - among.frames).max() <= 1
    assert np.abs(alone.astype(int) - frames(sampler, PROMPTS[0], 9)).max() > 10


def test_guidance_and_averaged_weights_matter(run, sampler):
    plain, guided = (frames(sampler, PROMPTS[0], 1, guidance=scale) for scale in (1, 8))
    raw = frames(load_model(run, [*FEW, "--sample.weights", "raw"]), PROMPTS[0], 1, guidance=1)
    assert not np.array_equal(plain, guided) and not np.array_equal(plain, raw)


def test_a_sample_is_saved_by_suffix_and_shows_itself(sampler, tmp_path):
    prompt = 'say "hi"; ünïcode ' + "long " * 90
    sample = sampler.sample(prompt, seed=5, frames=5)
    for name in ("x.mp4", "x.gif", "x.webm", "deep/frames"):
        path = sample.save(tmp_path / name)
        about = read_about(path)
        assert about["seed"] == "5" and about["sample.steps"] == "3" and (about["run"], about["step"]) == ("run", "8")
        assert about["prompt"] == prompt
        assert len(about["weights"]) == len(about["recipe"]) == 64
        assert path.suffix not in (".mp4", ".webm") or probe_clip(path).fps == 8
        assert read_frames(path).shape == sample.frames.shape == (5, 64, 64, 3)
        assert about["sample.format"] == {"frames": "png"}.get(path.name, path.suffix[1:])
    assert "data:video/mp4;base64," in sample._repr_html_() and "say &quot;hi" in sample._repr_html_()
    picture = sampler.sample(PROMPTS[0], frames=1)
    assert read_about(picture.save(tmp_path / "x.png"))["prompt"] == PROMPTS[0] and "<img" in picture._repr_html_()
    with pytest.raises(DataError, match="5 frames are more than one picture"):
        sample.save(tmp_path / "y.png")
    with pytest.raises(DataError, match=r"names no format; choose .mp4"):
        sample.save(tmp_path / "x.avi")


def test_files_of_python_and_of_the_command_are_the_same(run, tmp_path):
    """Settings by flag, by override, by row and by argument are one thing."""
    same = load_model(run).sample(PROMPTS[0], seed=5, steps=2, frames=1).save(tmp_path / "python.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": PROMPTS[0], "seed": 5, "steps": 2, "frames": 1}))
    for words in (
        ["--prompt", PROMPTS[0], "--seed", "5", "--steps", "2", "--sample.frames", "1"],
        ["--prompts", tmp_path / "rows.jsonl"],
    ):
        done = run_frameloom("sample", run, *words, "--out", tmp_path / "command", "--again")
        assert done.returncode == 0 and Path(done.stdout.split()[0]).read_bytes() == same.read_bytes(), done.stderr


def test_wrong_arguments_are_refused_before_anything_is_made(sampler):
    for fields, message in (
        ({"stepz": 3}, "sample\\(\\): has the field 'stepz', which is not known; did you mean 'steps'"),
        ({"steps": 0}, "steps is 0, expected a whole number of at least 1"),
        ({"frames": 8}, "takes .* frames, not 8"),
        ({"weights": "raw"}, "has the field 'weights'"),
    ):
        with pytest.raises(ConfigError, match=message):
            sampler.sample(PROMPTS[0], **fields)
    with pytest.raises(DataError, match=r"sample\(\): image gone.png: no such file"):
        sampler.sample(PROMPTS[0], image="gone.png")
    with pytest.raises(ConfigError, match="dtype is int8; choose"):
        load_model(Path("x"), dtype="int8")


def test_a_folder_that_is_no_run_is_refused(tmp_path, run):
    with pytest.raises(RunError, match="no such run, model folder or recipe"):
        load_model(tmp_path / "nothing")
    with pytest.raises(RunError, match="neither a run folder"):
        load_model(tmp_path)
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
    exported = frames(load_model(run / "export", FEW), PROMPTS[0], 1)
    assert np.array_equal(exported, frames(sampler, PROMPTS[0], 1))
    assert not np.array_equal(exported, frames(load_model(run, [*FEW, "--sample.weights", "raw"]), PROMPTS[0], 1))


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
    noted = {name: given.pop(name) for name in ("fps", "motion") if name in given}
    section = CaptionNoteSection(in_sampling=style, motion_in_sampling=default, **noted)
    return add_note(CaptionNote(section, 24), SampleRequest(**{"prompt": prompt, "fps": 24, **given}))


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


def test_a_motion_score_alone_asks_for_the_published_note():
    assert add_note(None, SampleRequest(prompt="sea", fps=24)) == "sea"
    assert add_note(None, SampleRequest(prompt="sea", fps=24, motion_score=7)) == "sea. 24 FPS. 7 motion score."


def test_a_rate_is_written_as_clips_of_that_rate_were():
    request = SampleRequest(prompt="sea", fps=8)
    assert add_note(CaptionNote(CaptionNoteSection(motion=None), 24), request) == "sea 8.0 FPS."
    published = CaptionNoteSection(motion=None, in_sampling="sentences")
    assert add_note(CaptionNote(published, 24), request) == "sea. 8 FPS."


def test_tiles_and_idle_parts_do_not_change_what_is_made(load: Load, model_folders: dict[str, Path]) -> None:
    folder = model_folders["opensora2"]
    offloaded = load_model(folder, ("--sample.offload", "true"))
    offload = offloaded.offload
    assert offload is not None and offload.resident == set() and load("opensora2").offload is None
    assert np.array_equal(make_frames(offloaded), make_frames(load("opensora2")))
    # One part at a time: text, the autoencoder for what is given, the denoiser, the autoencoder again.
    order = [part for part, to in offload.moves if to == "device"]
    assert order == ["text", "vae", "denoiser", "vae"] and offload.resident == set()
    assert offload.moves[1::2] == [(part, "host") for part in order]
    tiled = load_model(folder, ("--sample.tile_px", "32"))
    near = np.abs(make_frames(tiled, width=64).astype(int) - make_frames(load("opensora2"), width=64)).mean()
    assert 0 < near < 16


class Recorder(torch.nn.Module):
    """A part that records where it was moved."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def to(self, device: torch.device) -> Recorder:  # type: ignore[override]
        self.devices.append(str(device))
        return self


def test_a_part_leaves_the_device_when_its_work_fails() -> None:
    parts = {"a": Recorder(), "b": Recorder()}
    offload = Offload(dict(parts), torch.device("meta"))
    with pytest.raises(RuntimeError, match="out of memory"), offload.using("a"):
        assert offload.resident == {"a"}
        raise RuntimeError("out of memory")
    assert parts["a"].devices == ["cpu", "meta", "cpu"] and offload.resident == set()


@pytest.mark.parametrize("name", MODELS)
def test_skipping_blocks_is_measured_and_leaves_no_trace(load: Load, name: str) -> None:
    sampler = load(name, steps=8, cache_threshold=0.12)
    report = measure_cache(sampler, sampler.request(PROMPT, 1))
    skipped, error = re.search(r"(\d+)% of all blocks skipped.*latents off by ([\d.]+)%", report).groups()
    assert 0 < int(skipped) < 100 and 0 < float(error) < 50
    assert not np.array_equal(make_frames(sampler), make_frames(sampler, cache_threshold=0.0))
    none = measure_cache(sampler, sampler.request(PROMPT, 1, cache_threshold=1e-9))
    assert ": 0% of all blocks skipped" in none and "latents off by 0.00%, frames inf dB" in none
    blocks = sampler.denoiser.model.blocks()
    assert all("forward" not in vars(block) for block in blocks)


def test_a_skipped_block_adds_what_it_added_before() -> None:
    layer = torch.nn.Linear(4, 4)
    given, count = torch.ones(2, 4), CacheCount()

    class Block(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x + layer(x), 2 * y

    real = Block()
    with torch.no_grad(), skipping_blocks([real], 0.1, count):
        first = real(given, given)
        near = real(1.05 * given, given)
        far = real(2 * given, given)
    assert count.calls == 3 and count.skipped == 1
    torch.testing.assert_close(near[0], 1.05 * given + (first[0] - given))
    assert torch.equal(far[0], real(2 * given, given)[0])
