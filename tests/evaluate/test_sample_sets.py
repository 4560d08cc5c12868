"""Folders of samples: what they hold, what is matched, paired differences, and a page that holds everything itself."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from frameloom.core.errors import DataError
from frameloom.data.loading.clip_view import list_clips
from frameloom.data.media.writing import write_image, write_video
from frameloom.evaluate.clip_metrics import build_clip_measures
from frameloom.evaluate.sample_sets import (
    ComparedSets,
    Key,
    SampleSet,
    compare_samples,
    find_prompts,
    find_samples,
    format_sets,
    match_samples,
    name_folders,
    write_comparison,
)
from frameloom.sampling.outputs import read_frames

HOSTILE = '<script>alert("x")</script> & "quotes"'


def moving(step: int, side: int = 64, frames: int = 4) -> np.ndarray:
    """A bright square that goes `step` pixels a frame."""
    video = np.full((frames, side, side, 3), 40, dtype=np.uint8)
    for frame in range(frames):
        video[frame, 16:40, 8 + step * frame : 32 + step * frame] = 220
    return video


def write_sets(folder: Path, steps: dict[str, list[int]]) -> list[SampleSet]:
    sets = []
    for name, speeds in steps.items():
        files = {}
        for number, step in enumerate(speeds):
            files[Key(f"prompt {number} {HOSTILE}", number)] = path = folder / name / f"{number}.mp4"
            write_video(path, moving(step), 8)
        sets.append(SampleSet(name, files))
    return sets


def test_motion_of_each_set_and_paired_differences_are_known(tmp_path: Path) -> None:
    sets = write_sets(tmp_path, {"slow": [1, 2, 3], "quick": [3, 4, 5]})
    compared = compare_samples(sets, build_clip_measures(["motion"]), read_frames)
    slow, quick = compared.summaries()["motion_px"]
    assert slow.mean == pytest.approx(2.0, abs=0.05) and quick.mean == pytest.approx(4.0, abs=0.05)
    assert slow.low is not None and slow.low < 2 < (slow.high or 0)
    # Every prompt is 2 pixels a frame quicker, so the difference is certain although the means spread.
    mean, low, high = compared.differences("motion_px")[0]
    assert mean == pytest.approx(2.0, abs=0.05) and high - low < 0.1
    assert any("quick" in line and "+2" in line for line in format_sets(compared))


def test_only_what_all_sets_have_is_compared(tmp_path: Path) -> None:
    first, second = write_sets(tmp_path, {"a": [1, 1, 1], "b": [1, 1]})
    compared = compare_samples([first, second], build_clip_measures(["flicker"]), read_frames)
    assert len(compared.keys) == 2 and compared.num_left_out == 1
    assert any("1 samples are left out" in line for line in format_sets(compared))
    other = SampleSet("c", {Key("something else", 7): tmp_path / "none.mp4"})
    with pytest.raises(DataError, match="something else"):
        match_samples([first, other])
    with pytest.raises(DataError, match="two or more"):
        match_samples([first])


def test_numbers_that_one_set_lacks_are_in_no_mean() -> None:
    keys = [Key("a", 0), Key("b", 0)]
    numbers = [{keys[0]: {"m": 1.0}, keys[1]: {"m": 5.0}}, {keys[0]: {"m": 0.0}, keys[1]: {"m": None}}]
    sets = [SampleSet(name, {key: Path("x") for key in keys}) for name in ("one", "two")]
    compared = ComparedSets(sets, keys, ["m", "empty"], numbers)
    assert compared.values("m") == [[1.0], [0.0]] and list(compared.summaries()) == ["m"]


def test_the_page_holds_all_videos_and_no_foreign_markup(tmp_path: Path) -> None:
    sets = write_sets(tmp_path, {"<b>one</b>": [1, 2], "two": [2, 2]})
    compared = compare_samples(sets, build_clip_measures(None), read_frames)
    write_comparison(compared, tmp_path / "page.html", read_frames)
    text = (tmp_path / "page.html").read_text()
    assert text.count("<video") == 4 and "<script" not in text and "<b>one" not in text
    assert "&lt;script&gt;" in text and "motion_px" in text and "flicker" in text
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    write_comparison(compared, tmp_path / "short.html", read_frames, max_shown=1)
    short = (tmp_path / "short.html").read_text()
    assert short.count("<video") == 2 and "1 more prompts are measured" in short


def test_folders_of_frames_and_pictures_are_shown_too(tmp_path: Path) -> None:
    sets = []
    for name in ("one", "two"):
        clip, picture = tmp_path / name / "clip", tmp_path / name / "picture.png"
        for number, frame in enumerate(moving(1)):
            write_image(clip / f"{number:05d}.png", frame)
        write_image(picture, moving(1)[0])
        sets.append(SampleSet(name, {Key("clip", 0): clip, Key("picture", 0): picture}))
    compared = compare_samples(sets, build_clip_measures(["motion"]), read_frames)
    write_comparison(compared, tmp_path / "page.html", read_frames)
    text = (tmp_path / "page.html").read_text()
    assert text.count("<video") == 2 and text.count("<img") == 2
    assert compared.numbers[0][Key("picture", 0)]["motion_px"] is None


PICTURE = np.zeros((8, 8, 3), dtype=np.uint8)


def write_sample(path: Path, prompt: str, seed: int) -> Path:
    write_image(path, PICTURE, metadata={"prompt": prompt, "seed": str(seed)})
    return path


def test_samples_carry_prompt_seed_and_their_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [write_sample(tmp_path / f"{name}.png", "a cat", seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    write_image(tmp_path / "contact-sheet.png", PICTURE)
    frames = write_sample(tmp_path / "frames" / "00000.png", "a dog", 3).parent
    write_image(tmp_path / "stray.png", PICTURE)
    assert find_samples(tmp_path) == {
        **{Key("a cat", seed, number): path for path, seed, number in zip(paths, (1, 1, 2), (0, 1, 0), strict=True)},
        Key("a dog", 3): frames,
    }
    assert "stray.png" in caplog.text and "contact-sheet" not in caplog.text


def test_a_run_gives_what_was_sampled_from_it_else_its_last_step(tmp_path: Path) -> None:
    write_sample(tmp_path / "samples" / "step-00000010" / "x.png", "early", 0)
    late = write_sample(tmp_path / "samples" / "step-00000200" / "x.png", "late", 0)
    assert list(find_samples(tmp_path).values()) == [late]
    own = write_sample(tmp_path / "samples" / "y.png", "own", 0)
    assert list(find_samples(tmp_path).values()) == [own]


def test_folders_without_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file there says"):
        find_samples(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        find_samples(tmp_path / "nothing")


def test_prompts_come_from_the_files_or_from_a_list(tmp_path: Path) -> None:
    write_sample(tmp_path / "in" / "a.png", "a cat", 0)
    write_image(tmp_path / "in" / "b.png", PICTURE)
    clips, lines = list_clips(tmp_path / "in"), tmp_path / "prompts.txt"
    assert find_prompts(clips, None) == {"a.png": "a cat"}
    lines.write_text("one\ntwo\n")
    assert find_prompts(clips, lines) == {"a.png": "one", "b.png": "two"}
    lines.write_text("one\n")
    with pytest.raises(DataError, match="1 prompts for 2 clips"):
        find_prompts(clips, lines)


def test_folders_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    assert name_folders([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert name_folders([tmp_path / "a" / "samples", tmp_path / "b" / "samples"]) == ["a/samples", "b/samples"]
    with pytest.raises(DataError, match="twice"):
        name_folders([tmp_path, tmp_path])
