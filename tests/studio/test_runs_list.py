"""Runs are found by their files, nothing outside the folder is, and each state is told from what is on disk."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from pathlib import Path

import pytest

from frameloom.core.errors import FrameloomError
from frameloom.core.files import write_text
from frameloom.studio.runs.controller import RunsController
from frameloom.studio.runs.launches import Launches
from frameloom.studio.runs.run_list import FAILED, FINISHED, RUNNING, STOPPED, MetricsTail, Run, find_holder, find_runs
from frameloom.studio.runs.samples import list_steps, read_step
from frameloom.studio.server.context import StudioContext, show_problems
from frameloom.training.run.folder import RunFolder
from tests.studio.tiny_run import PROMPT, RUN, make_root


@pytest.fixture
def root(shared_world, tmp_path) -> Path:
    """A copy of the run's small files, so that a test may change them."""
    target = tmp_path / "root"
    # Other tests start runs beside it.
    shutil.copytree(make_root(shared_world) / RUN, target / RUN, ignore=shutil.ignore_patterns("*.safetensors"))
    return target.resolve()


def controller_of(root: Path, tmp_path: Path) -> RunsController:
    return RunsController(StudioContext(root, tmp_path))


def test_a_finished_run_is_told_with_its_step_model_and_loss(root):
    view = Run(RUN, root / RUN).view()
    assert (view.name, view.state, view.step) == (RUN, FINISHED, 4)
    assert view.about.startswith("denoiser · ") and view.num_steps == 4
    last = json.loads((root / RUN / "metrics.jsonl").read_text().splitlines()[-2])
    assert view.loss == pytest.approx(last["train/loss"])


def test_links_and_hidden_folders_are_not_followed(root, tmp_path):
    outside = tmp_path / "outside"
    shutil.copytree(root / RUN, outside / "secret")
    (root / "link").symlink_to(outside)
    (root / "runs" / "other").symlink_to(outside / "secret")
    shutil.copytree(root / RUN, root / ".hidden" / "run")
    assert find_runs(root) == [RUN]
    shutil.copytree(root / RUN, root / "more" / "deep" / "run")
    assert find_runs(root) == ["more/deep/run", RUN]


def test_a_run_is_running_as_long_as_its_lock_is_held(root):
    folder = root / RUN
    assert find_holder(folder) is None  # words of a process that has ended, or holds nothing
    with RunFolder(folder).locked():
        holder = find_holder(folder)
        assert holder is not None and holder.pid == os.getpid() and holder.is_here
        assert Run(RUN, root / RUN).view().state == RUNNING
    assert Run(RUN, root / RUN).view().state == FINISHED


def test_a_living_process_that_does_not_hold_the_lock_counts_for_nothing(root):
    (root / RUN / "lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
    assert find_holder(root / RUN) is None


def test_a_run_on_another_machine_is_running_while_it_writes(root):
    (root / RUN / "lock").write_text("process 77 on far-away")
    os.utime(root / RUN / "metrics.jsonl")
    holder = find_holder(root / RUN)
    assert holder is not None and not holder.is_here
    os.utime(root / RUN / "metrics.jsonl", (1, 1))
    assert find_holder(root / RUN) is None


def test_a_run_that_lacks_steps_is_stopped_and_one_that_failed_says_why(root, tmp_path):
    recipe = root / RUN / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("  steps: 4 ", "  steps: 9 "))
    assert Run(RUN, root / RUN).view().state == STOPPED
    view = Run(RUN, root / RUN).view("no space left on device")
    assert (view.state, view.message) == (FAILED, "no space left on device")
    table = controller_of(root, tmp_path).draw_table()
    assert "Resume" in table and "stopped" in table


def test_samples_are_found_by_step_with_their_prompts(root, tmp_path):
    run = root / RUN
    assert list_steps(run) == [2, 4]
    assert [shot.caption for shot in read_step(run, 4)] == [f"{PROMPT} (seed 0)"]
    page = controller_of(root, tmp_path).draw_samples([RUN], 4)
    assert page.count("<video") == 1 and "step 4" in page and PROMPT in page


def test_two_runs_have_their_samples_side_by_side_and_their_curves_over_one_another(root, tmp_path):
    shutil.copytree(root / RUN, root / "runs" / "again")
    shutil.rmtree(root / "runs" / "again" / "samples" / "step-00000004")
    controller = controller_of(root, tmp_path)
    page = controller.draw_samples([RUN, "runs/again"], 4)
    assert page.count("<section>") == 2 and "runs/again · step 2" in page
    charts = controller.draw_charts([RUN, "runs/again"], strength=0.5, is_log=True)
    assert charts.count("rg-chart") >= 4 and charts.count("runs/again") >= 4
    assert "Learning rate" in charts and "Validation loss" in charts and "Tokens per second" in charts


def test_a_page_cannot_name_a_run_that_was_not_found(root, tmp_path):
    controller = controller_of(root, tmp_path)
    for name in ("../outside", "/etc", "", "runs/tiny/../../x", RUN + "/checkpoints"):
        assert controller.pick([name]) == [] and "no such run" in controller.act("stop", name)
    assert len(controller.pick([RUN])) == 1


def test_a_recipe_that_is_wrong_is_refused_with_every_problem(shared_world, tmp_path):
    controller = RunsController(StudioContext(make_root(shared_world).resolve(), tmp_path))
    before = controller.launches.recent()  # of other tests
    answer = show_problems(controller.start)("bad.yaml", "--optim.momentum 3")
    assert "bad.yaml:4: optim has no key" in answer and "--optim.momentum" in answer and 'role="alert"' in answer
    assert str(controller.context.root) not in answer
    check = show_problems(controller.check)
    assert "learning_rate" not in check("long.yaml", "--run.folder /elsewhere")
    assert "outside" in check("long.yaml", "--run.folder /elsewhere")
    assert "quot" in check("long.yaml", "--name 'half").lower()
    assert "no key in front" in check("long.yaml", "<b>x</b>") and "<b>" not in check("long.yaml", "<b>x</b>")
    for recipe, message in (
        (None, "choose"),
        ("../../etc/passwd.yaml", "no such recipe|leaves"),
        ("../x.yaml", "leaves"),
    ):
        with pytest.raises(FrameloomError, match=message):
            controller.start(recipe, "")
    assert controller.launches.recent() == before


def test_a_record_of_an_earlier_studio_is_lost_unless_its_process_holds_the_run(root):
    folder = root / "studio" / "launches"
    folder.mkdir(parents=True)
    values = {"id": "tiny-1", "recipe": "a.yaml", "overrides": [], "run": RUN, "pid": os.getpid(), "started": 1.0}
    (folder / "tiny-1.json").write_text(json.dumps(values))
    (folder / "broken.json").write_text("{")
    launches = Launches(root, folder)
    (launch,) = launches.recent()
    assert launch.is_lost and "not running" in launches.stop(RUN)


def record(step: int, **values: object) -> str:
    return json.dumps({"step": step, **{f"train/{name}": value for name, value in values.items()}}) + "\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_look_reads_only_what_was_added(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, "".join(record(step, loss=step / 2) for step in range(1, 501)))
    tail = MetricsTail(path)
    assert tail.read() and not tail.read()
    before = tail.num_read_bytes
    assert before == path.stat().st_size
    append(path, record(501, loss=7.0))
    assert tail.read()
    assert tail.num_read_bytes - before == len(record(501, loss=7.0))
    assert tail.points("train/loss")[-1] == (501, 7.0)
    assert len(tail.points("train/loss")) == 501 and tail.last_step == 501


def test_half_a_line_counts_once_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = record(3, loss=1.5)
    append(path, record(2, loss=2.0) + line[:9])
    tail = MetricsTail(path)
    tail.read()
    assert tail.last_step == 2
    append(path, line[9:])
    tail.read()
    assert tail.points("train/loss") == [(2, 2.0), (3, 1.5)]


def test_a_resumed_run_that_writes_its_file_anew_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, "".join(record(step, loss=1.0) for step in range(1, 9)))
    tail = MetricsTail(path)
    tail.read()
    write_text(path, record(1, loss=1.0) + record(2, loss=5.0))
    assert tail.read()
    assert tail.points("train/loss") == [(1, 1.0), (2, 5.0)]
    path.unlink()
    assert tail.read() and tail.names() == []


def test_lines_that_are_no_records_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    odd = ["[]", "{", '"x"', '{"step": "1", "a": 1}', '{"step": -1, "a": 1}', '{"step": true, "a": 1}', "\x00\x01"]
    append(path, "\n".join(odd) + "\n" + "x" * (3 << 20) + "\n" + record(4, loss=None, name="text", rate=2))
    tail = MetricsTail(path)
    tail.read()
    assert tail.names() == ["train/loss", "train/rate"] and tail.last_step == 4
    assert math.isnan(tail.points("train/loss")[-1][1]) and tail.points("train/rate") == [(4, 2.0)]


def test_a_file_that_is_not_there_yet_is_no_error(tmp_path):
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    assert not tail.read() and tail.points("train/loss") == []
