"""`frameloom export` and `frameloom replay` as a person calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frameloom.cli.main import main
from frameloom.training.train import train


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    return int(exit_.value.code or 0)


def test_a_run_is_exported_and_replayed(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = {"frames": 9, "height": 64, "width": 64, "steps": 1}
    run = train(world.recipe("--train.steps", "1", sample=sample))
    monkeypatch.chdir(tmp_path)
    prompt = ["--prompt", "a red circle moves left slowly over a gray background"]
    assert call("export", run, "out", "--to", "single-file", "--dtype", "bf16", *prompt) == 0
    assert (tmp_path / "out" / "run.safetensors").is_file() and "done: out" in capsys.readouterr().out
    assert (tmp_path / "out" / "samples" / "contact-sheet.png").is_file()
    assert "contact-sheet.png" in (tmp_path / "out" / "README.md").read_text()
    assert call("replay", "out", "--name", "again", "--train.steps", "1", "--start") == 0
    assert "recipe: again.yaml" in capsys.readouterr().out and (run.with_name("again") / "export").is_dir()
    assert call("replay", "out") == 0
    assert "start it: frameloom train run-replay.yaml" in capsys.readouterr().out


def test_mistakes_end_with_exit_code_2(world: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("export", tmp_path) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert call("replay", tmp_path) == 2
    assert call("export", tmp_path, "--shard-size", "many") == 2
