"""A full disk leaves the earlier checkpoint, no leftovers and a message with the numbers.

A folder that cannot be written is refused before the first step.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import signal
import struct
from pathlib import Path

import pytest

from frameloom.checkpoint import writer as store
from frameloom.checkpoint.reader import list_steps, load_checkpoint, step_folder
from frameloom.core.errors import CheckpointError
from tests.checkpoint.saving import save_checkpoint
from tests.faults.kills import is_same, make, plain_folder

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


def test_a_full_disk_leaves_the_earlier_one_and_no_leftovers(warm, tally, tmp_path):
    for number, limit in enumerate(limits(tmp_path / "probe")):
        root = tmp_path / str(number)
        save_checkpoint(root, make(1, size=SIZE))
        tally.inject()
        child = warm.start("tests.faults.test_05_disk_full:save_with_little_room", str(root), limit)
        assert warm.wait(child) == 7, child.output
        assert [path.name for path in root.iterdir()] == ["step-00000001"]
        assert is_same(load_checkpoint(step_folder(root, 1)), make(1, size=SIZE))


def test_the_message_has_the_path_and_both_numbers(tmp_path, monkeypatch):
    def fill(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_digested", lambda path, tensors: fill(path))
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, make(2, size=SIZE))
    found = re.search(r"step-00000002.*No space left.*needs ([\d,]+) bytes and ([\d,]+) are free", str(caught.value))
    assert found is not None
    assert int(found.group(1).replace(",", "")) == 2 * 4 * (SIZE + 9)
    assert int(found.group(2).replace(",", "")) == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)


def test_written_in_place_a_part_would_stay(warm, tmp_path):
    """The control."""
    save_checkpoint(tmp_path, make(1, size=SIZE))
    limit = limits(tmp_path / "probe")[10]
    child = warm.start("tests.faults.test_05_disk_full:save_with_little_room", str(tmp_path), limit, True)
    assert warm.wait(child) == 7
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
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(warm, tally, world, place):
    path = str(world.write_recipe())
    run = world.folder / "runs" / "run"
    if place != "above the run":
        done = warm.command("train", path, "--run.folder", str(run.parent), "--train.steps", "2")
        assert warm.wait(done) == 0, done.output
    folder = {"above the run": run.parent, "the run": run, "its checkpoints": run / "checkpoints"}[place]
    folder.mkdir(exist_ok=True)
    if place == "the run":
        (run / "lock").unlink(missing_ok=True)
    folder.chmod(0o555)
    tally.inject()
    child = warm.start("tests.faults.test_05_disk_full:train_without_power", [path, "--run.folder", str(run.parent)])
    code = warm.wait(child)
    folder.chmod(0o755)
    assert code == 2, child.output
    assert str(folder) in child.output and "Permission denied" in child.output and "run.folder" in child.output
    assert "Traceback" not in child.output
