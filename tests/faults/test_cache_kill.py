"""Caching that is killed at any point loses at most one group, is never misread, and is finished by the next call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.warm import Child

ROOT = Path(__file__).parents[2]

# Forks its writers: they start warm, so many kills cost little. The driver itself does nothing with polars, whose
# threads a fork would lose.
DRIVER = '''
import json, os, signal, sys, time
from pathlib import Path
import torch
from frameloom.core.errors import CacheError
from frameloom.core.random import numpy_stream
from frameloom.config.schema.data import CacheSection
from frameloom.data.cache.encoding import TextEncoder
from frameloom.data.cache.filling import write_text_cache
from frameloom.data.cache.store import TextStore

CAPTIONS = [f"caption {'x' * n}" for n in range(13)]
FINGERPRINT = {"kind": "text", "encoder": "lengths"}
PORTION = 4
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")

def encode(captions):
    with open(LOG, "a") as log:
        log.write("x" * len(captions))
    lengths = torch.tensor([len(caption) for caption in captions])
    return {"tokens": lengths[:, None].repeat(1, 64).float(), "mask": torch.arange(30)[None] < lengths[:, None]}

def watch(folder, act):
    def hook(event, arguments):
        if event in EVENTS and str(folder) in str(arguments[0]):
            act()
    sys.addaudithook(hook)

def write(folder):
    encoder, section = TextEncoder(encode, torch.float32), CacheSection(group=PORTION)
    write_text_cache(folder, CAPTIONS, encoder=encoder, fingerprint=FINGERPRINT, section=section)

def fork(work, delay_s=None):
    """The exit status of a child that does `work`; with a delay it is killed from outside."""
    child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")
        try:
            work()
        except BaseException as error:
            (HERE / "error").write_text(repr(error))
            os._exit(1)
        os._exit(0)
    if delay_s is not None:
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]

def count_events():
    counts = []
    watch(HERE / "whole", lambda: counts.append(1))
    write(HERE / "whole")
    (HERE / "events").write_text(str(len(counts)))

def die_at(folder, number):
    counts = []
    def act():
        counts.append(1)
        if len(counts) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    watch(folder, act)
    write(folder)

def check(folder):
    """What a killed writer left is refused or right; then the next call finishes it."""
    for is_finished in (False, True):
        if is_finished:
            write(folder)
        try:
            found = TextStore.open(folder, FINGERPRINT, captions=CAPTIONS).get(["", *CAPTIONS])
        except CacheError:
            assert not is_finished
            continue
        wanted = encode(["", *CAPTIONS])
        LOG.write_text(LOG.read_text()[: -len(CAPTIONS) - 1])
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    shards = {path.name for path in (folder / "shards").iterdir()}
    assert shards == {path.name for path in (HERE / "whole" / "shards").iterdir()}, shards
    assert not list(folder.rglob(".partial-*"))

HERE, step, num_random = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
LOG = HERE / "log"
LOG.write_text("")
started = time.monotonic()
assert fork(count_events) == 0, (HERE / "error").read_text()
duration_s = time.monotonic() - started
num_events = int((HERE / "events").read_text())
delays = (numpy_stream(0, "kill").random(num_random) * duration_s).tolist()
results = []
for number, delay_s in [(n, None) for n in range(1, num_events + 1, step)] + [(-1, delay) for delay in delays]:
    folder = HERE / f"killed-{len(results)}"
    LOG.write_text("")
    status = fork(lambda: die_at(folder, number), delay_s)
    code = fork(lambda: check(folder))
    error = (HERE / "error").read_text() if code else ""
    num_lost = len(LOG.read_text()) - len(CAPTIONS) - 1
    results.append({"at": number, "signal": status & 127, "error": error, "num_lost": num_lost})
print(json.dumps({"num_events": num_events, "results": results}))
'''


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}


@pytest.mark.parametrize(
    ("step", "num_random"),
    [
        pytest.param(5, 6, marks=pytest.mark.slow, id="some"),
        pytest.param(1, 60, marks=pytest.mark.stress, id="every"),
    ],
)
@pytest.mark.timeout(900)
def test_killed_at_any_file_operation_or_moment(tmp_path: Path, step: int, num_random: int) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    words = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path), str(step), str(num_random)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["num_events"] > 40
    assert [result for result in found["results"] if result["error"]] == []
    killed = [result for result in found["results"] if result["at"] > 0]
    assert len(killed) >= 8
    assert {result["signal"] for result in killed} == {signal.SIGKILL}
    # Four captions are a group; some kills must lose part of one, or they came at harmless moments only.
    assert {result["num_lost"] for result in found["results"]} <= set(range(5))
    assert max(result["num_lost"] for result in killed) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_killed_command_goes_on_and_writes_what_an_undisturbed_one_writes(world, warm) -> None:
    def start(name: str) -> Child:
        folders = [
            word for part in ("latents", "text") for word in (f"--data.cache.{part}", str(world.folder / name / part))
        ]
        return warm.start_frameloom(["data", "cache", world.folder / "recipe.yaml", *folders], env=environment())

    world.write_recipe(data={"frame_start": "first", "cache": {"group": 3}})
    writer = start("killed")
    deadline_s = time.monotonic() + 300
    groups = world.folder / "killed" / "latents" / "groups"
    while len(list(groups.glob("*.parquet"))) < 2 and time.monotonic() < deadline_s:
        assert warm.poll(writer) is None, writer.errors.read_text()
        time.sleep(0.005)
    writer.kill()
    assert warm.wait(writer) == -signal.SIGKILL
    num_kept = 3 * len([path for path in groups.glob("*.parquet") if not path.name.startswith(".")])
    done = [warm.finish(start(name), 400) for name in ("killed", "whole")]
    assert [one.returncode for one in done] == [0, 0], done
    assert f"36 latents, {36 - num_kept} of them encoded now" in done[0].stdout
    for part in ("latents", "text"):
        killed, whole = (
            {path.name: path.read_bytes() for path in (world.folder / name / part / "shards").iterdir()}
            for name in ("killed", "whole")
        )
        assert killed == whole and killed
