"""Trackers: one interface, each installed one tried for real, and a resumed run goes on where it was."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError, FrameloomError, RunError
from frameloom.data.media.writing import write_image, write_video
from frameloom.training.logging.trackers import (
    JsonlTracker,
    Media,
    build_trackers,
    keep_id,
)
from frameloom.training.run.folder import RunFolder


def build(folder: Path, *names: str):
    return build_trackers(names, Recipe.model_construct(), RunFolder(folder), first_step=1)


def media(folder: Path) -> list[Media]:
    frames = np.zeros((3, 16, 32, 3), np.uint8)
    frames[1] = 255
    write_video(folder / "clip.mp4", frames, 4)
    write_image(folder / "picture.png", frames[1])
    return [Media("samples/picture", folder / "picture.png"), Media("samples/0", folder / "clip.mp4", frames, 4.0, "x")]


def test_files_of_a_run_get_scalars_and_media(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = build(tmp_path, "jsonl", "tensorboard", "jsonl")
    assert len(trackers) == 2
    for tracker in trackers:
        tracker.log(1, {"train/loss": 0.5, "train/odd": float("nan")})
        tracker.log_media(1, media(tmp_path))
        tracker.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "train/loss": 0.5, "train/odd": None}
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Scalars("train/loss")[0].value == 0.5
    picture, clip = events.Images("samples/picture")[0], events.Images("samples/0")[0]
    assert picture.encoded_image_string == (tmp_path / "picture.png").read_bytes()
    assert (clip.width, clip.height) == (32, 16) and clip.encoded_image_string.startswith(b"GIF89a")


def test_a_full_disk_costs_numbers_and_is_told_once(caplog):
    tracker = JsonlTracker(Path("/dev/full"))
    for step in (1, 2):
        tracker.log(step, {"train/loss": 0.5})
    tracker.close()
    assert len(caplog.records) == 1
    assert "step 1" in caplog.text and "No space left" in caplog.text and "training goes on" in caplog.text


def test_a_mistake_in_a_tracker_is_no_shortage(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.close()
    with pytest.raises(ValueError, match="closed"):
        tracker.log(1, {"train/loss": 0.5})


def test_a_line_is_written_as_a_whole_or_not_at_all(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    tracker, limits = JsonlTracker(path), resource.getrlimit(resource.RLIMIT_FSIZE)
    tracker.log(1, {"train/loss": 0.5})
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 7, limits[1]))
    try:
        tracker.log(2, {"train/loss": 0.25})
        assert "No space left" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    tracker.log(3, {"train/loss": 0.125})
    tracker.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_names_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FrameloomError, match=rf"run\.trackers: {name} is not installed.*frameloom\[{name}\]"):
        build(tmp_path, "jsonl", name)


def test_the_id_of_a_run_is_made_once_and_kept(tmp_path):
    first = keep_id(tmp_path, "wandb")
    assert keep_id(tmp_path, "wandb") == first != keep_id(tmp_path, "trackio")
    (tmp_path / "other").mkdir()
    assert keep_id(tmp_path / "other", "wandb") != first
    (tmp_path / "trackers.json").write_text("{")
    with pytest.raises(RunError, match=r"trackers\.json: is damaged"):
        keep_id(tmp_path, "wandb")


def test_the_recipe_refuses_what_is_no_project(world):
    with pytest.raises(ConfigError, match=r"run\.tracking\.project"):
        world.recipe("--run.tracking.project", "a/b")


def run_twice(world, tracker: str, **environment: str) -> Path:
    """Two starts of the real command, the second a resume, with a sample at each end."""
    section = {"prompts": ["a red circle"], "steps": 1, "guidance": 1.0}
    path = world.write_recipe(validation={"batches": 0, "samples": section})
    tracking = "{project: shapes, name: mine, tags: [one, two], offline: true}"
    for steps in ("1", "2"):
        command = [sys.executable, "-m", "frameloom", "train", str(path), "--train.steps", steps]
        command += ["--run.trackers", f"[jsonl, {tracker}]", "--run.tracking", tracking]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=280, cwd=world.folder
        )
        assert done.returncode == 0, done.stderr
    return Path(world.folder / "run")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_without_a_network_keeps_one_run(world):
    run = run_twice(world, "wandb")
    folders = sorted((run / "wandb").glob("offline-run-*"))
    (kept,) = {folder.name.rpartition("-")[2] for folder in folders}
    assert len(folders) == 2 and json.loads((run / "trackers.json").read_text()) == {"wandb": kept}
    # The file is a LevelDB log: a header of 7 bytes, then blocks of 32 KiB with pieces (checksum, length, kind).
    script = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record
found = {"history": []}

def read_records(content, place=7, record=b""):
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""

for path in sys.argv[1:]:
    for data in read_records(open(path, "rb").read()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found["history"].append(items)
        if record.WhichOneof("record_type") == "run":
            one = record.run
            found["run"] = [one.run_id, one.project, one.display_name, sorted(one.tags)]
print(json.dumps(found))
"""
    files = [str(path) for folder in folders for path in folder.glob("*.wandb")]
    done = subprocess.run([sys.executable, "-c", script, *files], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["run"] == [kept, "shapes", "mine", ["one", "two"]]
    losses = [(entry["step"], entry["train/loss"]) for entry in found["history"] if "train/loss" in entry]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses == [(line["step"], pytest.approx(line["train/loss"])) for line in lines]
    shown = [entry["samples/0/_type"] for entry in found["history"] if "samples/0/_type" in entry]
    assert shown == ["video-file"] * 2


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_keeps_one_run(world):
    store = world.folder / "store"
    run = run_twice(world, "trackio", TRACKIO_DIR=str(store))
    name = f"mine-{json.loads((run / 'trackers.json').read_text())['trackio']}"
    script = f"""
import json
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps([SQLiteStorage.get_runs("shapes"), SQLiteStorage.get_logs("shapes", {name!r})], default=str))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(store)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    runs, logs = json.loads(done.stdout)
    assert runs == [name]
    losses = [(entry["step"], entry["train/loss"]) for entry in logs if "train/loss" in entry]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses == [(line["step"], pytest.approx(line["train/loss"])) for line in lines]
    assert len(list(store.rglob("*.mp4"))) == 2
