"""Which samples a folder or a run holds, and the prompts of clips."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from frameloom.core.errors import DataError
from frameloom.data.loading.clip_view import list_clips
from frameloom.data.media.writing import write_image
from frameloom.evaluate.sample_sets import Sample, find_prompts, find_samples, name_folders

PICTURE = np.zeros((8, 8, 3), dtype=np.uint8)


def write_sample(path: Path, prompt: str, seed: int) -> Path:
    write_image(path, PICTURE, metadata={"prompt": prompt, "seed": str(seed)})
    return path


def test_samples_carry_prompt_seed_and_their_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [write_sample(tmp_path / f"{name}.png", "a cat", seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    write_image(tmp_path / "contact-sheet.png", PICTURE)
    frames = write_sample(tmp_path / "frames" / "00000.png", "a dog", 3).parent
    write_image(tmp_path / "stray.png", PICTURE)
    assert find_samples(tmp_path) == [
        *(Sample(path, "a cat", seed, number) for path, seed, number in zip(paths, (1, 1, 2), (0, 1, 0), strict=True)),
        Sample(frames, "a dog", 3),
    ]
    assert "stray.png" in caplog.text and "contact-sheet" not in caplog.text


def test_a_run_gives_what_was_sampled_from_it_else_its_last_step(tmp_path: Path) -> None:
    write_sample(tmp_path / "samples" / "step-00000010" / "x.png", "early", 0)
    late = write_sample(tmp_path / "samples" / "step-00000200" / "x.png", "late", 0)
    assert [sample.path for sample in find_samples(tmp_path)] == [late]
    own = write_sample(tmp_path / "samples" / "y.png", "own", 0)
    assert [sample.path for sample in find_samples(tmp_path)] == [own]


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
