"""A run that is started from the page trains in a process of its own, and stops after it has saved."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from frameloom.core.errors import ConfigError, RunError
from frameloom.studio.runs.controller import RunsController
from frameloom.studio.runs.launches import Launches, clean_text, split_words
from frameloom.studio.runs.run_list import RUNNING, STOPPED
from frameloom.studio.server.context import StudioContext
from tests.studio.tiny_run import make_root

_PATIENCE_S = 240.0


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_started_run_is_seen_growing_stops_with_a_checkpoint_and_is_remembered(shared_world, tmp_path):
    root = make_root(shared_world).resolve()
    controller = RunsController(StudioContext(root, tmp_path))
    assert "started runs/watched" in controller.start("long.yaml", "--name watched --train.save_every 100000")
    try:
        (launch,) = [one for one in controller.launches.recent() if one.run == "runs/watched"]
        assert os.getsid(launch.pid) == launch.pid != os.getsid(0)
        wait_until(lambda: "runs/watched" in controller.runs.all(fresh=True))
        run = controller.runs.all()["runs/watched"]
        wait_until(lambda: run.metrics.read() and len(run.metrics.points("train/loss")) > 2)
        view = next(one for one in controller.views() if one.name == "runs/watched")
        assert view.state == RUNNING and view.seconds_left is not None and view.step < 100_000
        with pytest.raises(RunError, match="is running already"):
            controller.start("long.yaml", "--name watched")
        assert "asked to stop" in controller.act("stop", "runs/watched")
        assert "End now" in controller.draw_table() or not launch.is_running
        wait_until(lambda: not controller.launches.recent()[0].is_running)
    finally:
        controller.launches.close(timeout_s=5)
    ended = controller.launches.recent()[0]
    assert ended.exit_code == 143 and "stopped after saving" in ended.describe_end()
    assert "SIGTERM: saved step" in controller.launches.read_log(ended)
    view = next(one for one in controller.views() if one.name == "runs/watched")
    assert view.state == STOPPED and (root / f"runs/watched/checkpoints/step-{view.step:08d}").is_dir()
    again = Launches(root, controller.launches.folder)
    assert again.find("runs/watched") == ended and again.find_failure("runs/watched") is None


@pytest.mark.slow
def test_a_run_that_fails_says_why_and_the_end_of_the_studio_ends_its_children(shared_world, tmp_path):
    root = make_root(shared_world).resolve()
    controller = RunsController(StudioContext(root, tmp_path))
    used = root / "runs" / "used"
    (used / "checkpoints").mkdir(parents=True)
    (used / "recipe.yaml").write_text((root / "runs" / "tiny" / "recipe.yaml").read_text())
    controller.start("long.yaml", "--name used --run.resume never")
    controller.start("long.yaml", "--name child")
    wait_until(lambda: not (controller.launches.find("runs/used") or controller.launches.recent()[0]).is_running)
    view = next(one for one in controller.views() if one.name == "runs/used")
    assert view.state == "failed" and "run.resume is never" in view.message
    child = controller.launches.find("runs/child")
    assert child is not None and child.is_running
    controller.launches.close(timeout_s=60)
    ended = controller.launches.find("runs/child")
    assert ended is not None and ended.exit_code is not None and not ended.is_running
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_logs_have_no_control_characters_and_a_bar_shows_its_last_state():
    text = "\x1b[31mred\x1b[0m\x07 \x00a\n10%\r50%\r100%\nlast\r\n"
    assert clean_text(text) == "red a\n100%\nlast\n"


def test_words_are_split_as_on_a_command_line():
    assert split_words("--optim.lr 1e-5\n--name 'two words'  # why") == ["--optim.lr", "1e-5", "--name", "two words"]
    for wrong in ("name x", "--name 'x", "--a " + "x" * 30_000):
        with pytest.raises(ConfigError):
            split_words(wrong)
