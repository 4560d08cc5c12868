"""Caching that is killed at any point loses at most one group, is never misread, and is finished by the next call."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from frameloom.config.schema.data import CacheSection
from frameloom.core.errors import CacheError
from frameloom.core.random import numpy_stream
from frameloom.data.cache.encoding import TextEncoder
from frameloom.data.cache.filling import write_text_cache
from frameloom.data.cache.store import TextStore
from tests.faults.kills import watch
from tests.faults.warm import Child

CAPTIONS = [f"caption {'x' * n}" for n in range(13)]
FINGERPRINT = {"kind": "text", "encoder": "lengths"}
WRITE, CHECK = "tests.faults.test_cache_kill:write", "tests.faults.test_cache_kill:check"


def log_of(folder: Path) -> Path:
    """A letter for every caption that was encoded for this cache."""
    return folder.with_name(f"log-{folder.name}")


def encode(log: Path, captions: list[str]) -> dict[str, Tensor]:
    with log.open("a") as file:
        file.write("x" * len(captions))
    lengths = torch.tensor([len(caption) for caption in captions])
    return {"tokens": lengths[:, None].repeat(1, 64).float(), "mask": torch.arange(30)[None] < lengths[:, None]}


def write(folder: str, number: int = 0) -> None:
    """Fill the cache; die before file operation `number`, or print how many there were."""
    path = Path(folder)
    seen = watch(path, number)
    encoder, section = TextEncoder(partial(encode, log_of(path)), torch.float32), CacheSection(group=4)
    write_text_cache(path, CAPTIONS, encoder=encoder, fingerprint=FINGERPRINT, section=section)
    print(len(seen))


def check(folder: str, whole: str) -> None:
    """What a killed writer left is refused or right; then the next call finishes it."""
    wanted = encode(Path(os.devnull), ["", *CAPTIONS])
    for is_finished in (False, True):
        if is_finished:
            write(folder)
        try:
            found = TextStore.open(Path(folder), FINGERPRINT, captions=CAPTIONS).get(["", *CAPTIONS])
        except CacheError:
            assert not is_finished
            continue
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    shards, wanted_shards = ({path.name for path in Path(root, "shards").iterdir()} for root in (folder, whole))
    assert shards == wanted_shards
    assert not list(Path(folder).rglob(".partial-*"))


@pytest.mark.parametrize(
    ("step", "num_random"),
    [
        pytest.param(5, 6, marks=pytest.mark.slow, id="some"),
        pytest.param(1, 60, marks=pytest.mark.stress, id="every"),
    ],
)
@pytest.mark.timeout(900)
def test_killed_at_any_file_operation_or_moment(warm, tmp_path: Path, step: int, num_random: int) -> None:
    whole = str(tmp_path / "whole")
    started = time.monotonic()
    num_events = int(warm.run(WRITE, whole).split()[-1])
    duration_s = time.monotonic() - started
    assert num_events > 40
    delays = (numpy_stream(0, "kill").random(num_random) * duration_s).tolist()
    kills = [(number, None) for number in range(1, num_events + 1, step)] + [(0, delay) for delay in delays]
    lost = []
    for number, delay_s in kills:
        folder = tmp_path / f"killed-{len(lost)}"
        child = warm.start(WRITE, str(folder), number)
        if delay_s is not None:
            time.sleep(delay_s)
            child.kill()
        assert warm.wait(child) == -signal.SIGKILL or not number, child.output
        warm.run(CHECK, str(folder), whole)
        lost.append(log_of(folder).stat().st_size - len(CAPTIONS) - 1)
    # Four captions are a group; some kills must lose part of one, or they came at harmless moments only.
    num_numbered = len(kills) - len(delays)
    assert num_numbered >= 8 and set(lost) <= set(range(5))
    assert max(lost[:num_numbered]) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_killed_command_goes_on_and_writes_what_an_undisturbed_one_writes(world, warm) -> None:
    def start(name: str) -> Child:
        folders = [
            word for part in ("latents", "text") for word in (f"--data.cache.{part}", str(world.folder / name / part))
        ]
        return warm.start_frameloom(
            ["data", "cache", world.folder / "recipe.yaml", *folders], env=os.environ | {"POLARS_MAX_THREADS": "1"}
        )

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
