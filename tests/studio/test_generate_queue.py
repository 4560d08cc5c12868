"""Orders are made by one worker, one after the other, as the command makes them; any of them can be cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from frameloom.cli.main import main
from frameloom.core.errors import DataError, RunError
from frameloom.studio.generate.controller import GenerateDesk
from frameloom.studio.generate.history import convert_clip, list_made, to_wish
from frameloom.studio.generate.queue import CANCELLED, DONE, FAILED, RUNNING, OrderQueue, Ticket
from frameloom.studio.generate.requests import OUT, Wish
from frameloom.studio.server.context import StudioContext
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
    queue = OrderQueue(root, root / "worker.log", max_waiting=4)
    try:
        long = queue.submit(Wish(RUN, PROMPT, steps=400, num_samples=16), 6400)
        plain = queue.submit(Wish(RUN, PROMPT, seed=3), 3)
        odd = queue.submit(Wish(RUN, _ODD, seed=3, num_samples=2, steps=2, guidance=1.5, negative="b"), 4)
        waiting = queue.submit(Wish(RUN, PROMPT, seed=9), 3)
        with pytest.raises(RunError, match="4 orders are in the queue"):
            queue.submit(Wish(RUN, PROMPT), 3)
        assert queue.cancel(waiting.id) == "taken out of the queue"
        wait_until(lambda: get(queue, long).done_steps > 2 or not get(queue, long).is_open)
        assert get(queue, long).state == RUNNING
        assert queue.cancel(long.id) == "stops after this step"
        assert queue.wait(long.id, _PATIENCE_S).state == CANCELLED and get(queue, long).done_steps < 6400
        broken = queue.submit(Wish(RUN, PROMPT, frames=8), 3)
        for ticket in (plain, odd, broken):
            queue.wait(ticket.id, _PATIENCE_S)
        assert get(queue, plain).state == DONE and get(queue, odd).state == DONE, get(queue, odd).message
        assert get(queue, broken).state == FAILED and "frames is 8" in get(queue, broken).message
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
    desk = GenerateDesk(StudioContext(root, root / "scratch"))
    page = desk.draw_history()
    made = list_made(root / OUT)
    assert [one.about["seed"] for one in made][-1] == "3" and len(made) == 3
    assert "<script" not in page and "${" not in page and "{{" not in page and page.count("<video") == 3
    wish = to_wish(next(one for one in made if one.prompt != PROMPT))
    assert (wish.prompt, wish.steps, wish.guidance, wish.negative, wish.model) == (_ODD, 2, 1.5, "b", RUN)
    (root / OUT / "stranger.mp4").write_bytes(b"not a clip")
    assert len(list_made(root / OUT)) == 3
    for form in ("gif", "webm", "mp4"):
        path = convert_clip(made[0], form, root / "studio" / "downloads")
        assert path.suffix == f".{form}" and path.stat().st_size > 100
    assert convert_clip(made[0], "mp4", root) == made[0].path
    with pytest.raises(DataError, match="no such file"):
        desk.find_made("../../recipe.yaml")
    assert "no such file" in desk.convert("gif:../x.mp4")


def get(queue: OrderQueue, ticket: Ticket) -> Ticket:
    found = queue.get(ticket.id)
    assert found is not None
    return found


def test_a_worker_that_cannot_start_is_told_and_the_next_order_tries_again(root, monkeypatch, tmp_path):
    queue = OrderQueue(root, root / "worker.log")
    monkeypatch.setattr("sys.executable", "/bin/false")
    try:
        for _ in range(2):
            ticket = queue.submit(Wish(RUN, PROMPT), 3)
            ended = queue.wait(ticket.id, _PATIENCE_S)
            assert ended.state == FAILED and "exit code 1" in ended.message
    finally:
        queue.close()


def test_a_queue_forgets_old_orders_and_says_when_one_is_over(root, monkeypatch):
    queue = OrderQueue(root, root / "worker.log")
    monkeypatch.setattr("sys.executable", "/bin/false")
    numbers = []
    try:
        for _ in range(30):
            numbers.append(queue.submit(Wish(RUN, PROMPT), 3).id)
            queue.wait(numbers[-1], _PATIENCE_S)
    finally:
        queue.close()
    assert len(queue.tickets()) <= 21 and queue.get(numbers[0]) is None
    assert "over already" in queue.cancel(numbers[-1]) and "over already" in queue.cancel(10**6)
