"""A full disk, flipped bytes, missing files, formats of other versions: checkpoints are whole, or refused by name."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from frameloom.checkpoint import reader
from frameloom.checkpoint import writer as store
from frameloom.checkpoint.reader import find_latest, list_steps, load_checkpoint, load_latest, read_state, step_folder
from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import CheckpointError
from frameloom.core.files import digest_value
from frameloom.core.random import numpy_stream
from frameloom.training.train import train
from tests.checkpoint.saving import save_checkpoint
from tests.faults.kills import is_same, make, plain_folder

# Row 5: A full disk leaves the earlier checkpoint, no leftovers and a message with the numbers.
# A folder that cannot be written is refused before the first step.

SIZE = 2_000


def save_with_little_room(root: str, limit: int, in_place: bool = False) -> None:
    """Save step 2 with files of at most `limit` bytes; exit code 7 when that is told."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if in_place:
        store.atomic_folder = plain_folder  # type: ignore[assignment]
    made = make(2, size=SIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        save_checkpoint(Path(root), made)
    except CheckpointError as error:
        is_told = all(words in str(error) for words in (root, "could not be saved", "bytes and", "are free"))
        os._exit(7 if is_told else 8)  # a log of what was told would be a file too


def limits(root: Path) -> list[int]:
    """Twenty sizes, from nothing to just less than the largest file."""
    largest = max(path.stat().st_size for path in save_checkpoint(root, make(2, size=SIZE)).iterdir())
    return [largest * part // 20 for part in range(20)]


def test_05_a_full_disk_leaves_the_earlier_one_and_no_leftovers(warm, tally, tmp_path):
    for number, limit in enumerate(limits(tmp_path / "probe")):
        root = tmp_path / str(number)
        save_checkpoint(root, make(1, size=SIZE))
        tally.inject()
        warm.expect(warm.start("tests.faults.test_damage:save_with_little_room", str(root), limit), 7)
        assert [path.name for path in root.iterdir()] == ["step-00000001"]
        assert is_same(load_checkpoint(step_folder(root, 1)), make(1, size=SIZE))


def test_05_the_message_has_the_path_and_both_numbers(tmp_path, monkeypatch):
    def fill(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_digested", lambda path, tensors: fill(path))
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, make(2, size=SIZE))
    found = re.search(r"step-00000002.*No space left.*needs ([\d,]+) bytes and ([\d,]+) are free", str(caught.value))
    assert found is not None
    assert int(found.group(1).replace(",", "")) == 2 * 4 * (SIZE + 9)
    assert int(found.group(2).replace(",", "")) == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)


def test_05_written_in_place_a_part_would_stay(warm, tmp_path):
    """The control."""
    save_checkpoint(tmp_path, make(1, size=SIZE))
    limit = limits(tmp_path / "probe")[10]
    warm.expect(warm.start("tests.faults.test_damage:save_with_little_room", str(tmp_path), limit, True), 7)
    assert list_steps(tmp_path) == [1, 2]


def drop_power_over_files() -> None:
    """Let permissions count for this process although it is root's: drop what passes them over."""
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    assert libc.capget(header, data) == 0
    words = list(struct.unpack("=6I", data.raw))
    for place in range(3):
        words[place] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", *words), 24)) == 0


def train_without_power(words: list[str]) -> None:
    from tests.faults.warm import run_command

    drop_power_over_files()
    run_command(["train", *words])


@pytest.mark.parametrize("place", ["above the run", "the run", "its checkpoints"])
def test_05_a_folder_that_cannot_be_written_is_refused_before_the_first_step(warm, tally, world, place):
    path = str(world.write_recipe())
    run = world.folder / "runs" / "run"
    if place != "above the run":
        warm.expect(warm.command("train", path, "--run.folder", str(run.parent), "--train.steps", "2"))
    folder = {"above the run": run.parent, "the run": run, "its checkpoints": run / "checkpoints"}[place]
    folder.mkdir(exist_ok=True)
    if place == "the run":
        (run / "lock").unlink(missing_ok=True)
    folder.chmod(0o555)
    tally.inject()
    child = warm.start("tests.faults.test_damage:train_without_power", [path, "--run.folder", str(run.parent)])
    code = warm.wait(child)
    folder.chmod(0o755)
    assert code == 2, child.output
    assert str(folder) in child.output and "Permission denied" in child.output and "run.folder" in child.output
    assert "Traceback" not in child.output


# Row 6: Every flipped byte of a checkpoint is noticed before a weight is used, and the step before is offered.

COUNT = 200


def flips(content: bytes, name: str, count: int) -> list[bytes]:
    draw = numpy_stream(0, f"flips of {name}")
    damaged = []
    for position in draw.integers(0, len(content), size=count):
        changed = bytearray(content)
        changed[position] ^= 1 << int(draw.integers(8))
        damaged.append(bytes(changed))
    return damaged


def test_06_every_flip_is_noticed_and_the_step_before_is_offered(tmp_path, tally):
    save_checkpoint(tmp_path, make(1, size=256))
    folder = save_checkpoint(tmp_path, make(2, size=256))
    files = sorted(folder.iterdir())
    assert len(files) >= 3
    for path in files:
        content = path.read_bytes()
        for number, damaged in enumerate(flips(content, path.name, COUNT // len(files) + 1)):
            path.write_bytes(damaged)
            tally.inject()
            with pytest.raises(CheckpointError, match=path.name):
                load_checkpoint(folder)
            if number % 20 == 0:
                before = load_latest(tmp_path)
                assert before is not None and is_same(before, make(1, size=256))
        path.write_bytes(content)
    assert is_same(load_checkpoint(folder), make(2, size=256))


def test_06_without_the_digests_flips_would_be_loaded_as_weights(tmp_path, monkeypatch):
    """The control: safetensors itself has no checksum, so nearly every flip in the numbers loads in silence."""
    folder, right = save_checkpoint(tmp_path, make(1, size=256)), make(1, size=256).tensors["model"]
    monkeypatch.setattr(reader, "is_undamaged", lambda path, digest: True)
    path, num_silent = folder / "model.safetensors", 0
    for damaged in flips(path.read_bytes(), path.name, 40):
        path.write_bytes(damaged)
        try:
            loaded = load_checkpoint(folder).tensors["model"]
        except SafetensorError:
            continue  # the header was hit
        num_silent += any(not torch.equal(loaded[name], right[name]) for name in right if name in loaded)
    assert num_silent > 20


# Row 7: A checkpoint with a missing, cut or empty file is called so by name; the one before is used, or none at all.


def test_07_a_cut_or_missing_file_falls_back_to_the_step_before(tmp_path, tally):
    save_checkpoint(tmp_path, make(1, size=64))
    whole = save_checkpoint(tmp_path / "whole", make(2, size=64))
    for name in sorted(path.name for path in whole.iterdir()):
        content = (whole / name).read_bytes()
        for cut in (None, 0, *(len(content) * part // 20 for part in range(1, 20)), len(content) - 1):
            path = shutil.copytree(whole, step_folder(tmp_path, 2)) / name
            path.unlink() if cut is None else path.write_bytes(content[:cut])
            tally.inject()
            with pytest.raises(CheckpointError, match=name):
                load_checkpoint(path.parent)
            found = find_latest(tmp_path, set_aside=True)
            assert found is not None and is_same(found.load(), make(1, size=64))
            assert not path.parent.exists(), "its step could not be saved again"


def test_07_a_folder_of_damaged_ones_is_an_error_never_a_fresh_start(tmp_path, tally):
    assert load_latest(tmp_path) is None
    (save_checkpoint(tmp_path, make(1, size=64)) / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        load_latest(tmp_path)
    tally.inject()


def test_07_a_used_run_without_a_checkpoint_is_never_started_afresh(world, warm, tally):
    run = train(world.recipe())
    losses = (run / "metrics.jsonl").read_bytes()
    for damage in ("emptied", "deleted"):
        if damage == "deleted":
            shutil.rmtree(run / "checkpoints")
        for folder in (run / "checkpoints").glob("step-*"):
            (folder / "model.safetensors").write_bytes(b"")
        child = warm.expect(warm.command("train", str(world.folder / "recipe.yaml")), 2)
        assert "checkpoint" in child and "move the" in child
        assert (run / "metrics.jsonl").read_bytes() == losses
        tally.inject()


def test_07_without_the_look_at_each_file_a_gap_would_be_met_in_the_middle(tmp_path, monkeypatch):
    """The control: with the state alone believed, the step with a gap is chosen instead of the whole one before it."""
    save_checkpoint(tmp_path, make(1, size=64))
    (save_checkpoint(tmp_path, make(2, size=64)) / "ema.safetensors").unlink()
    monkeypatch.setattr(reader, "verify_checkpoint", lambda folder, collective=None: reader.read_state(folder))
    with pytest.raises(Exception, match="ema"):
        load_latest(tmp_path)


# Row 11: Checkpoints and recipes of every released format load with the values they had, or say what this version
# reads.
# `museum/` holds one of each, as it was written then. Nothing there is ever written again; a new format adds a
# folder.

MUSEUM = Path(__file__).with_name("museum")
CHECKPOINTS = sorted(path.parent for path in MUSEUM.glob("checkpoint-*/state.json"))
RECIPES = sorted(MUSEUM.glob("recipe-*.yaml"))


def expected() -> dict[str, dict[str, torch.Tensor]]:
    """What every checkpoint of the museum holds."""
    weights = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 8
    return {
        "model": {"blocks.0.weight": weights, "bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)},
        "optimizer": {"blocks.0.weight.exp_avg": weights * 0.5, "blocks.0.weight.step": torch.tensor(7.0)},
    }


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
def test_11_a_checkpoint_of_an_earlier_version_loads_equal(folder, tally):
    tally.inject()
    loaded = load_checkpoint(folder)
    assert loaded.step == 7 and (loaded.state["epoch"], loaded.state["position"]) == (1, 28)
    found = {
        group: {name: (value.dtype, value.tolist()) for name, value in named.items()}
        for group, named in loaded.tensors.items()
    }
    assert found == {
        group: {name: (value.dtype, value.tolist()) for name, value in named.items()}
        for group, named in expected().items()
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_11_a_recipe_of_an_earlier_version_is_read(path, tally):
    tally.inject()
    recipe = load_recipe(path, [])
    assert recipe.optim.lr == 3e-4 and recipe.train.steps == 123 and recipe.seed == 42


def test_11_the_museum_has_every_format():
    assert {read_state(folder)["format"] for folder in CHECKPOINTS} == {1, 2, 3}
    assert RECIPES


def test_11_a_format_of_the_future_is_refused_by_number(tmp_path, tally):
    """The control: a number that is not looked at would be read by the rules of another one."""
    folder = shutil.copytree(CHECKPOINTS[0], tmp_path / "step-00000007")
    state = json.loads((folder / "state.json").read_text())
    content = {**{key: value for key, value in state.items() if key != "seal"}, "format": 99}
    sealed = {**content, "seal": digest_value(content)}
    (folder / "state.json").write_text(json.dumps(sealed, indent=1, sort_keys=True) + "\n")
    tally.inject()
    with pytest.raises(CheckpointError, match=r"format 99, this version reads formats 1 to 3"):
        load_checkpoint(folder)
