"""Runs, caches, exports and recipes that an earlier version wrote are read as that version read them.

They were made once (`make.py`), by a version that had separate forms of GELU, of the norm of heads and of single blocks
for the CPU; today there is one form for all devices, and objectives compute in another order, so last bits differ. A
run that is resumed comes within `TOLERANCE` of the numbers of the uninterrupted run of then, where torch, the processor
and the threads are the same, and within `TOLERANCE_ELSEWHERE` on other machines. It equals to the bit one that is
stopped once more here. What no arithmetic touches (caches, rows, recipes) is compared for equality.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from PIL import Image

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.loading.schema_tree import RENAMED
from tests.stored.machine import describe_machine, run_frameloom
from tests.stored.make import FIRST_SAVE, LAST, SAMPLE, SECOND_SAVE, STOPPED
from tests.stored.tensors import digest_tensors, read_tensors

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
REFERENCE, RECIPES = HERE / "reference", HERE / "recipes"
SHIPPED = sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*.yaml"))
CLOCK = {"train/steps_per_s", "train/tokens_per_s"}
# Losses are relative to this, and weights off by it at most.
TOLERANCE, TOLERANCE_ELSEWHERE = 1e-6, 1e-4
# The gradient of an absolute difference jumps where the difference is about 0: the norm of the autoencoder's gradient
# moves by a hundred times more than its losses and weights do.
JUMPS, MORE_BY_JUMPS = "grad_norm", 100


@functools.cache
def is_same_machine() -> bool:
    return describe_machine() == json.loads((REFERENCE / "machine.json").read_text())


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return shutil.copytree(HERE / "world", tmp_path / "world")


def run(*words: object, cwd: Path) -> str:
    done = run_frameloom(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Every step without the clock."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in CLOCK} for record in records]


def find_tolerance() -> float:
    return TOLERANCE if is_same_machine() else TOLERANCE_ELSEWHERE


def assert_close(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert [record.keys() for record in found] == [record.keys() for record in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            tolerance = find_tolerance() * (MORE_BY_JUMPS if name.endswith(JUMPS) else 1)
            assert ours[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def assert_same_frames(found: Path, wanted: Path) -> None:
    for ours, theirs in zip(read_frames(found), read_frames(wanted), strict=True):
        # A value may fall on the other side of a half.
        assert np.abs(ours - theirs).max() <= 1


def read_frames(folder: Path) -> list[np.ndarray]:
    paths = sorted(folder.glob("*/*.png"))
    assert paths
    return [np.asarray(Image.open(path)).astype(np.int16) for path in paths]


def read_files(folder: Path) -> dict[str, str]:
    """Digests of the files below a folder; locks and lists that are only rewritten do not count."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }


@pytest.mark.parametrize("name", STOPPED)
def test_a_stored_run_is_resumed_to_the_result_of_then(world: Path, name: str):
    before = read_files(world / "stopped" / name)
    run("train", f"{name}.yaml", cwd=world)
    resumed, reference = world / "stopped" / name, REFERENCE / name
    # It went on from the stored step: that one is as it was, and no earlier one was made.
    assert before.items() <= read_files(resumed).items()
    assert sorted(path.name for path in (resumed / "checkpoints").iterdir()) == [FIRST_SAVE, SECOND_SAVE, LAST]
    digests = digest_tensors(resumed / "checkpoints" / LAST)
    assert digests.keys() == json.loads((reference / "tensors.json").read_text()).keys()
    assert_close(read_metrics(resumed), read_metrics(reference))
    assert digests == stop_and_resume(world, name)
    assert_final_weights(resumed, world, name)


def stop_and_resume(world: Path, name: str) -> dict[str, str]:
    """The end of a run that is taken up from the second save, which the run from the first one made."""
    resumed = world / "stopped" / name
    other = world / "again" / name
    shutil.copytree(resumed, other)
    shutil.rmtree(other / "export")
    shutil.rmtree(other / "checkpoints" / LAST)
    run("train", f"{name}.yaml", "--run.folder", "again", cwd=world)
    assert read_metrics(other) == read_metrics(resumed)
    return digest_tensors(other / "checkpoints" / LAST)


def assert_final_weights(run_folder: Path, world: Path, name: str) -> None:
    """The export of a finished run, beside the one that is stored."""
    stored = REFERENCE / "lora-export" if name == "lora" else world / "models" / name
    found, wanted = read_tensors(run_folder / "export"), read_tensors(stored)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (found[key] - tensor).abs().max() <= find_tolerance(), key


def test_another_seed_gives_other_numbers(world: Path):
    """The control: what the comparison above would miss if it looked at nothing."""
    run("train", "denoiser.yaml", "--seed", 8, "--accept-recipe-change", cwd=world)
    resumed = world / "stopped" / "denoiser"
    found, wanted = read_metrics(resumed), read_metrics(REFERENCE / "denoiser")
    assert found[:3] == wanted[:3]
    with pytest.raises(AssertionError):
        assert_close(found[3:], wanted[3:])
    assert digest_tensors(resumed / "checkpoints" / LAST) != json.loads(
        (REFERENCE / "denoiser" / "tensors.json").read_text()
    )


def test_a_run_reads_the_stored_caches_and_encodes_nothing(world: Path):
    """The clips are gone, so a latent that were not found could not be made."""
    shutil.rmtree(world / "clips" / "clips")
    before = read_files(world / "cache")
    assert len(before) == 2
    run("train", "cached.yaml", cwd=world)
    assert read_files(world / "cache") == before
    assert_close(read_metrics(world / "made" / "cached"), read_metrics(REFERENCE / "cached"))


def test_the_stored_caches_need_nothing_more(world: Path):
    """With the clips, whose times are new: their digests are compared."""
    told = run("data", "cache", "cached.yaml", cwd=world)
    assert "14 latents, 0 of them encoded now" in told and "15 captions, 0 of them encoded now" in told


def test_the_stored_caches_do_not_fit_another_recipe(world: Path):
    """The control: caches that were taken whatever the recipe says."""
    shutil.rmtree(world / "clips" / "clips")
    done = run_frameloom("train", "cached.yaml", "--data.cache.precision", "fp16", cwd=world)
    assert done.returncode == 2 and "cache" in done.stderr, done.stderr


def test_a_stored_export_samples_what_it_did(world: Path):
    run("sample", "models/denoiser", *SAMPLE, "--out", "samples", cwd=world)
    assert_same_frames(world / "samples", REFERENCE / "samples")
    run("sample", "models/denoiser", *SAMPLE, "--seed", 4, "--out", "others", cwd=world)
    with pytest.raises(AssertionError):
        assert_same_frames(world / "others", REFERENCE / "samples")


def test_a_stored_lora_changes_the_sample_as_it_did(world: Path):
    lora = REFERENCE / "lora-export" / "pytorch_lora_weights.safetensors"
    run("sample", "models/denoiser", *SAMPLE, "--lora", lora, "--out", "samples", cwd=world)
    assert_same_frames(world / "samples", REFERENCE / "samples-lora")
    with pytest.raises(AssertionError):
        assert_same_frames(world / "samples", REFERENCE / "samples")


def test_the_stored_clips_are_described_as_those_of_today(world: Path):
    """The set follows from its seed; bytes of a video depend on the library that writes it and are not compared."""
    stored = read_rows(world / "clips")
    run("data", "shapes", "again", "--count", 16, "--seed", 5, "--workers", 1, cwd=world)
    assert read_rows(world / "again") == stored
    run("data", "shapes", "other", "--count", 16, "--seed", 6, "--workers", 1, cwd=world)
    assert read_rows(world / "other") != stored


def read_rows(clips: Path) -> list[dict[str, Any]]:
    return pl.read_parquet(clips / "manifest.parquet").drop("bytes", "sha256").to_dicts()


def test_every_shipped_recipe_is_stored():
    listed = [line.split()[0] for line in run("recipe", "list", cwd=HERE).splitlines()]
    assert set(SHIPPED) <= set(listed)
    assert len(SHIPPED) == 40


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_resolves_to_the_values_of_then(name: str):
    path = RECIPES / f"{name}.yaml"
    stored, shipped = load_recipe(path), load_recipe(name)
    assert stored == shipped
    # What was resolved then is in it, key by key; a key that is new since then has its default in both.
    values = flatten(stored.model_dump(mode="json"))
    for key, value in flatten(yaml.safe_load(path.read_text())).items():
        key = f".{RENAMED.get(key[1:], key[1:])}"
        if key.startswith(".objective.") and key not in values:
            continue  # it belongs to another kind of objective, and was at its default
        found = values[key]
        # Another reader of YAML takes 1e-5 for text.
        assert found == (float(value) if isinstance(found, float) else value), key
    assert load_recipe(path, ["--seed", "987"]) != shipped


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree by their dotted keys."""
    if isinstance(value, dict) and value:
        # The key `null` of a text encoder is no text to a plain reader of YAML.
        named = {"null" if name is None else name: part for name, part in value.items()}
        return {key: leaf for name, part in named.items() for key, leaf in flatten(part, f"{prefix}.{name}").items()}
    if isinstance(value, list) and value:
        parts = [flatten(part, f"{prefix}.{number}") for number, part in enumerate(value)]
        return {key: leaf for part in parts for key, leaf in part.items()}
    return {prefix: value}
