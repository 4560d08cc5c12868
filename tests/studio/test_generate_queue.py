"""Jobs are run by one worker, one after the other, as the command makes them; any of them can be cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from frameloom.cli.main import main
from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import DataError, RunError
from frameloom.studio.generate.controller import GenerateController, convert_clip, list_samples
from frameloom.studio.generate.models import StudioModel
from frameloom.studio.generate.queue import CANCELLED, DONE, FAILED, RUNNING, Job, JobQueue
from frameloom.studio.generate.requests import OUT
from frameloom.studio.server.context import Listing, StudioContext
from tests.studio.tiny_run import PROMPT, RUN, make_root

_PATIENCE_S = 240.0
_ODD = "<script>alert(1)</script> ../../x ${1+1} {{value}} $(id) \u202e😀 " + "y" * 200


@pytest.fixture
def root(shared_world, tmp_path, monkeypatch) -> Path:
    """A folder of its own with the run in it; one thread everywhere, so that bits can be compared."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "runs").mkdir()
    (tmp_path / RUN).symlink_to(make_root(shared_world) / RUN)
    return tmp_path.resolve()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def run_command(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sample", *words])
    assert ended.value.code == 0


@pytest.mark.slow
def test_the_worker_makes_what_the_command_makes_and_hears_when_it_shall_stop(root, one_thread, monkeypatch):
    queue = JobQueue(root, root / "worker.log", max_waiting=4)
    try:
        long = submit(queue, 6400, PROMPT, steps=400, num=16)
        plain = submit(queue, 3, PROMPT, seed=3)
        odd = submit(queue, 4, _ODD, seed=3, num=2, steps=2, guidance=1.5, negative_prompt="b")
        waiting = submit(queue, 3, PROMPT, seed=9)
        with pytest.raises(RunError, match="4 jobs are in the queue"):
            submit(queue, 3, PROMPT)
        assert queue.cancel(waiting.id) == "taken out of the queue"
        wait_until(lambda: get(queue, long).done_steps > 2 or not get(queue, long).is_open)
        assert get(queue, long).state == RUNNING
        assert queue.cancel(long.id) == "stops after this step"
        assert wait(queue, long).state == CANCELLED and get(queue, long).done_steps < 6400
        broken = submit(queue, 3, PROMPT, frames=8)
        for job in (plain, odd, broken):
            wait(queue, job)
        assert get(queue, plain).state == DONE and get(queue, odd).state == DONE, get(queue, odd).message
        assert get(queue, broken).state == FAILED and "frames, not 8" in get(queue, broken).message
        assert get(queue, waiting).state == CANCELLED and get(queue, waiting).files == ()
        assert (root / "worker.log").read_text().count("Traceback") == 0
    finally:
        queue.close()
    monkeypatch.chdir(root)
    (first,) = get(queue, plain).files
    run_command(RUN, "--prompt", PROMPT, "--seed", "3", "--out", "again")
    same, other = (root / first).read_bytes(), "--seed 4"
    assert (root / "again" / Path(first).name).read_bytes() == same
    run_command(RUN, "--prompt", PROMPT, *other.split(), "--out", "again")
    assert (root / "again" / Path(first).name.replace("seed3", "seed4")).read_bytes() != same
    words = ["--num", "2", "--steps", "2", "--guidance", "1.5", "--negative", "b", "--seed", "3", "--out", "odd"]
    run_command(RUN, "--prompt", _ODD, *words)
    assert len(get(queue, odd).files) == 2
    for file in get(queue, odd).files:
        assert (root / "odd" / Path(file).name).read_bytes() == (root / file).read_bytes()
        assert len(Path(file).name.encode()) <= 120 and (root / file).resolve().is_relative_to(root / OUT)
    check_history(root)


def check_history(root: Path) -> None:
    """The folder alone tells what was made, newest first, and how."""
    context = StudioContext(root, root / "scratch")
    controller = GenerateController(context)
    page = controller.draw_history()
    samples = list_samples(root / OUT)
    assert [one.about["seed"] for one in samples][-1] == "3" and len(samples) == 3
    assert "<script" not in page and "${" not in page and "{{" not in page and page.count("<video") == 3
    odd = next(one for one in samples if one.about["prompt"] != PROMPT)
    assert controller.models.all() == {}, "a link to a run is not followed"
    controller.models = Listing(lambda: {RUN: StudioModel(RUN)})
    model, values = controller.read_settings(odd.path.name)
    assert (values["prompt"], values["steps"], values["guidance"], values["negative_prompt"]) == (_ODD, 2, 1.5, "b")
    assert model.name == RUN and values["image"] is None
    (root / OUT / "stranger.mp4").write_bytes(b"not a clip")
    assert len(list_samples(root / OUT)) == 3
    for form in ("gif", "webm", "mp4"):
        path = convert_clip(samples[0], form, root / "studio" / "downloads")
        assert path.suffix == f".{form}" and path.stat().st_size > 100
    assert convert_clip(samples[0], "mp4", root) == samples[0].path
    for call in (controller.find_sample, lambda name: controller.convert(f"gif:{name}")):
        with pytest.raises(DataError, match="no such file"):
            call("../../recipe.yaml")


def submit(queue: JobQueue, total_steps: int, prompt: str, *, num: int = 1, **fields: object) -> Job:
    return queue.submit(RUN, SampleRequest(prompt=prompt, **fields), num, total_steps)


def wait(queue: JobQueue, job: Job) -> Job:
    wait_until(lambda: not get(queue, job).is_open)
    return get(queue, job)


def get(queue: JobQueue, job: Job) -> Job:
    return next(one for one in queue.jobs() if one.id == job.id)


def test_a_worker_that_cannot_start_is_told_and_the_next_job_tries_again(root, monkeypatch, tmp_path):
    queue = JobQueue(root, root / "worker.log")
    monkeypatch.setattr("sys.executable", "/bin/false")
    try:
        for _ in range(2):
            job = submit(queue, 3, PROMPT)
            ended = wait(queue, job)
            assert ended.state == FAILED and "exit code 1" in ended.message
    finally:
        queue.close()


def test_a_queue_forgets_old_jobs_and_says_when_one_is_over(root, monkeypatch):
    queue = JobQueue(root, root / "worker.log")
    monkeypatch.setattr("sys.executable", "/bin/false")
    numbers = []
    try:
        for _ in range(30):
            numbers.append(wait(queue, submit(queue, 3, PROMPT)).id)
    finally:
        queue.close()
    assert len(queue.jobs()) <= 21 and numbers[0] not in [job.id for job in queue.jobs()]
    assert "already ended" in queue.cancel(numbers[-1]) and "already ended" in queue.cancel(10**6)
