"""Whole runs with several processes: resume at another number of them, signals, errors, disagreement, bad clips."""

from __future__ import annotations

import json

import pytest

from frameloom.checkpoint.reader import list_steps, load_latest, read_state, step_folder
from frameloom.sampling.outputs import read_frames
from tests.distributed.jobs import Found, Jobs, largest_difference

pytestmark = pytest.mark.timeout(1800)


def outcomes(done: Jobs, name: str, world: int) -> list[str]:
    return [(done.folder / name / f"outcome-{rank}").read_text() for rank in range(world)]


def losses(done: Jobs, run: str) -> dict[int, float]:
    lines = map(json.loads, (done.folder / "runs" / run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def test_a_run_goes_on_with_any_number_of_processes(done):
    """Two processes, then four, then one: losses, weights and all state are those of one process throughout."""
    for name, world in (("moved a", 2), ("moved b", 4), ("moved c", 1), ("alone", 1)):
        assert outcomes(done, name, world) == ["done"] * world
    assert losses(done, "moved").keys() == losses(done, "alone").keys() == set(range(1, 7))
    assert losses(done, "moved") == pytest.approx(losses(done, "alone"), rel=1e-6)
    ours, alone = (load_latest(done.folder / "runs" / run / "checkpoints") for run in ("moved", "alone"))
    assert ours is not None and alone is not None and ours.step == alone.step == 6
    assert (ours.state["epoch"], ours.state["position"]) == (alone.state["epoch"], alone.state["position"])
    for kind in ("model", "ema", "optimizer"):
        assert largest_difference(ours.tensors[kind], alone.tensors[kind]) < 1e-6
    first = load_latest(done.folder / "runs" / "stopped" / "checkpoints")
    assert first is not None and largest_difference(first.tensors["model"], alone.tensors["model"]) > 1e-4


def test_processes_that_share_a_clip_draw_samples_together(done):
    """Nobody waits for a process that draws none; what is drawn is what one process draws, but for last bits."""
    assert outcomes(done, "drawn", 2) == ["done"] * 2 and outcomes(done, "drawn alone", 1) == ["done"]
    clips = [sorted((done.folder / "runs" / run / "samples").rglob("*.mp4")) for run in ("drawn", "drawn-alone")]
    assert len(clips[0]) == len(clips[1]) >= 1
    ours, theirs = (read_frames(found[-1]).astype(int) for found in clips)
    assert abs(ours - theirs).mean() < 0.1 and theirs.std() > 1


def test_only_the_first_process_writes_metrics(done):
    lines = (done.folder / "runs" / "moved" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len({json.loads(line)["step"] for line in lines})


def test_a_signal_to_one_process_saves_and_stops_all(done):
    found = outcomes(done, "stopped", 2)
    assert found[0].startswith("Interrupted 143: SIGTERM: saved step 2") and found[1] == "silent 143"
    assert list_steps(done.folder / "runs" / "stopped" / "checkpoints")[-1] == 2


def test_what_each_process_wrote_is_its_part(done):
    """Optimizer state split over two, then everything over four; the last one was alone."""
    folder = done.folder / "runs" / "moved" / "checkpoints"
    counts = [
        len([name for name in read_state(step_folder(folder, step))["files"] if "optim" in name]) for step in (4, 6)
    ]
    assert list_steps(folder)[-2:] == [4, 6] and counts == [4, 1]


def test_a_disk_that_is_full_for_one_process_stops_all_and_leaves_the_checkpoint_before(done):
    found = outcomes(done, "unsaved", 2)
    assert found[0].startswith("CheckpointError 2: ") and found[1] == "silent 2"
    assert "step-00000002: could not be saved (rank 1: [Errno 28]" in found[0]
    assert [path.name for path in (done.folder / "runs" / "unsaved" / "checkpoints").iterdir()] == ["step-00000000"]
    assert max(losses(done, "unsaved")) < 20


def test_processes_that_disagree_stop_at_once_and_say_where(done):
    found = outcomes(done, "other", 2)
    assert found[0].startswith("RunError 2: step 1: the processes do not agree") and found[1] == "silent 2"
    assert "recipe: rank 0:" in found[0] and "recipe: rank 1:" in found[0] and "samples: rank 1:" in found[0]
    assert "  epoch:" not in found[0]
    assert list_steps(done.folder / "runs" / "other" / "checkpoints") == [0]


def test_a_loss_that_is_not_finite_stops_all_and_names_the_process_that_had_it(done):
    found = outcomes(done, "nan", 2)
    assert found[0].startswith("RunError 2: step 3: the loss (nan)") and found[1] == "silent 2"
    assert "is not finite, rank 1: bucket 64px" in found[0] and "rank 0" not in found[0]


def test_an_error_of_one_process_is_told_by_it_alone(done):
    told = "DataError 2: rank 1: clips/7.mp4: cannot be read on this machine"
    assert outcomes(done, "failing", 2) == ["silent 2", told]


def test_a_process_that_is_killed_ends_the_others_with_one_message(done):
    (found,) = outcomes(done, "killed", 1)
    assert found.startswith("RunError 2: rank 0: lost contact with another process")


def test_all_processes_know_of_a_clip_that_one_could_not_read(done):
    ours, alone = done.found("broken"), done.found("broken alone")
    assert ours.losses() == pytest.approx(alone.losses(), rel=1e-6) and ours.rows() == alone.rows()
    lists = [(found.folder / "bad_clips.jsonl").read_text().splitlines() for found in (ours, alone)]
    assert sorted(lists[0]) == sorted(lists[1]) and len(lists[0]) >= 1


def test_encoders_that_are_shared_give_the_states_of_ones_own(done):
    ranks = Found(done.folder / "encoders", 3).ranks
    for found in ranks:
        assert found["spread"] > 1e-3, "all captions look alike: the test proves nothing"
        for differences in found["differences"].values():
            assert len(differences) == 2 and max(differences) < 1e-5
    assert [found["has_weights"] for found in ranks] == [False, True, False]
    assert all(found["share"] < 0.5 for found in ranks) and sum(found["share"] for found in ranks) == pytest.approx(1)


@pytest.mark.parametrize("encoders", ["once", "shard"])
def test_a_run_with_shared_encoders_learns_the_same(done, encoders):
    ours, alone = done.found(f"plain {encoders}"), done.found("plain alone")
    assert ours.rows() == alone.rows() and ours.losses() == pytest.approx(alone.losses(), rel=1e-6)
