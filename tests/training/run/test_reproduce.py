"""A run started again from what its export carries: the same recipe, the same numbers, and a word on what changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frameloom.cli.main import main
from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.interop.export.export import Export, export_run
from frameloom.training.run.reproduce import find_differences, read_recorded_run, write_recipe
from frameloom.training.train import train


@pytest.fixture
def run(world: Any) -> Path:
    return train(world.recipe("--train.steps", "2"))


def test_the_replayed_run_gives_the_same_weights(run: Path, tmp_path: Path) -> None:
    export = export_run(Export(run, "original", tmp_path / "export")).out
    found = read_recorded_run(export)
    assert found.recipe.name == "run-replay" and found.step == 2 and not find_differences(found)
    write_recipe(found, tmp_path / "again.yaml")
    again = train(load_recipe(tmp_path / "again.yaml"))
    assert again == run.with_name("run-replay")
    first, second = (load_file(path / "export" / "model.safetensors") for path in (run, again))
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    other = train(read_recorded_run(export, ["--seed", "7"], name="other").recipe)
    assert any(not torch.equal(load_file(other / "export" / "model.safetensors")[name], first[name]) for name in first)


def test_a_single_file_and_a_run_folder_carry_the_recipe_too(run: Path, tmp_path: Path) -> None:
    export = export_run(Export(run, "single-file", tmp_path / "export")).out
    moved = shutil.move(export / "run.safetensors", tmp_path / "elsewhere.safetensors")
    found = [read_recorded_run(path, name="again").recipe for path in (Path(moved), export, run)]
    assert found[0] == found[1] == found[2]
    assert found[0].model_copy(update={"name": "run"}) == load_recipe(run / "recipe.yaml")


def test_changes_since_then_are_listed(run: Path, tmp_path: Path, world: Any) -> None:
    export = export_run(Export(run, "original", tmp_path / "export")).out
    card = json.loads((export / "frameloom.json").read_text())
    card["trained_with"]["torch"] = "1.0"
    card["recipe"]["data"]["where"] = {}
    (export / "frameloom.json").write_text(json.dumps(card))
    data, torch_version = find_differences(read_recorded_run(export))
    assert "the data has changed" in data and torch_version.endswith("it was 1.0")
    card["recipe"]["data"]["manifest"] = str(tmp_path / "gone.parquet")
    (export / "frameloom.json").write_text(json.dumps(card))
    assert "gone.parquet" in find_differences(read_recorded_run(export))[0]


def test_a_name_that_no_run_can_have_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*.yaml"))
    for name in ("a/b", "..", ""):
        with pytest.raises(SystemExit) as exit_:
            main(["replay", str(run), "--name", name])
        assert exit_.value.code == 2 and f"--name: name is '{name}'" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*.yaml")) == before


def test_what_carries_nothing_is_refused(run: Path, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(CheckpointError, match="carries no card"):
        read_recorded_run(tmp_path / "plain.safetensors")
    with pytest.raises(CheckpointError, match=r"neither frameloom\.json nor recipe\.yaml"):
        read_recorded_run(tmp_path / "absent")
    (tmp_path / "frameloom.json").write_text('{"format": 9, "recipe": {}}')
    with pytest.raises(CheckpointError, match="format 9"):
        read_recorded_run(tmp_path)
    (tmp_path / "there.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_recipe(read_recorded_run(run), tmp_path / "there.yaml")
