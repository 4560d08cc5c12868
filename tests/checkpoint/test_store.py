import os
import signal
import time

import pytest
import torch

from frameloom.checkpoint.store import (
    Checkpoint,
    apply_retention,
    clear_leftovers,
    list_steps,
    load_checkpoint,
    load_latest,
    save_checkpoint,
    step_folder,
)
from frameloom.core.errors import CheckpointError
from frameloom.core.random import numpy_stream, stream


def make(step: int, size: int = 256) -> Checkpoint:
    draw = stream(0, "weights", step)
    tensors = {
        group: {"a": torch.randn(size, generator=draw), "b": torch.randn(3, 3, generator=draw)}
        for group in ("model", "ema")
    }
    return Checkpoint(step, tensors, {"epoch": 1, "position": step * 10})


def same(a: Checkpoint, b: Checkpoint) -> bool:
    return a.step == b.step and all(
        torch.equal(a.tensors[g][n], b.tensors[g][n]) for g in a.tensors for n in a.tensors[g]
    )


def test_what_is_saved_is_loaded(tmp_path):
    save_checkpoint(tmp_path, make(3))
    loaded = load_latest(tmp_path)
    assert loaded is not None and same(loaded, make(3)) and not same(loaded, make(4))
    assert loaded.state["position"] == 30


def test_every_flipped_byte_is_noticed(tmp_path):
    """Fault 6: over every kind of file, before any weight is used."""
    folder = save_checkpoint(tmp_path, make(1))
    draw = numpy_stream(0, "flips")
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for position in draw.integers(0, len(content), size=70):
            damaged = bytearray(content)
            damaged[position] ^= 1 << int(draw.integers(8))
            path.write_bytes(bytes(damaged))
            with pytest.raises(CheckpointError, match=path.name):
                load_checkpoint(folder)
        path.write_bytes(content)
    assert same(load_checkpoint(folder), make(1))


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
@pytest.mark.parametrize("share", [None, 0.0, 0.3, 0.99])
def test_a_cut_or_missing_file_falls_back_to_the_step_before(tmp_path, name, share):
    """Fault 7."""
    save_checkpoint(tmp_path, make(1))
    path = save_checkpoint(tmp_path, make(2)) / name
    content = path.read_bytes()
    path.unlink() if share is None else path.write_bytes(content[: int(len(content) * share)])
    loaded = load_latest(tmp_path, set_aside=True)
    assert loaded is not None and same(loaded, make(1))
    save_checkpoint(tmp_path, make(2))
    assert same(load_checkpoint(step_folder(tmp_path, 2)), make(2))


def test_only_damaged_checkpoints_are_an_error_never_a_fresh_start(tmp_path):
    assert load_latest(tmp_path) is None
    (save_checkpoint(tmp_path, make(1)) / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        load_latest(tmp_path)


def test_retention_keeps_the_newest(tmp_path):
    for step in range(5):
        save_checkpoint(tmp_path, make(step))
        apply_retention(tmp_path, keep=2)
    assert list_steps(tmp_path) == [3, 4]


def kill_while(action, seconds: float) -> bool:
    """Run `action` in a child and kill it after `seconds`; True if it was still at work."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.stress)])
def test_a_save_killed_at_any_moment_is_complete_or_absent(tmp_path, count):
    """Faults 1 and 4: kills during save and retention; never fewer complete ones than `keep`."""
    size, draw, killed = 200_000, numpy_stream(0, "kills"), 0
    for step in (0, 1):
        save_checkpoint(tmp_path, make(step, size))
    started = time.perf_counter()
    save_checkpoint(tmp_path / "timing", make(0, size))
    duration = time.perf_counter() - started
    for step in range(2, 2 + count):

        def save(step: int = step) -> None:
            save_checkpoint(tmp_path, make(step, size))
            apply_retention(tmp_path, keep=2)

        killed += kill_while(save, float(draw.uniform(0, 2.0 * duration)))
        steps = list_steps(tmp_path)
        assert len(steps) >= 2
        for kept in steps[-2:]:
            assert same(load_checkpoint(step_folder(tmp_path, kept)), make(kept, size))
        clear_leftovers(tmp_path)
    assert killed >= count // 4, "the kills came too late to prove anything"


def test_a_full_disk_leaves_the_earlier_checkpoint_and_says_so(tmp_path):
    """Fault 5, with a limit on the size of files instead of a small disk."""
    import resource

    save_checkpoint(tmp_path, make(1))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        try:
            save_checkpoint(tmp_path, make(2, size=5000))
        except CheckpointError as error:
            os._exit(7 if "could not be saved" in str(error) and "free" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert same(load_checkpoint(step_folder(tmp_path, 1)), make(1))
