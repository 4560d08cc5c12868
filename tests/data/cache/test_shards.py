"""Shards give back what was packed, to the bit, from memory that all processes of a machine share."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from frameloom.core.errors import CacheError
from frameloom.core.random import stream
from frameloom.data.cache.folder import CacheFolder
from frameloom.data.cache.shards import Group, ShardReader, trim

COLUMNS = {"name": pl.String}


def draw(*shape: int, key: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(0, "shard", key))


def add(folder: CacheFolder, tensors: dict[str, Tensor], *, ragged: bool = False) -> pl.DataFrame:
    group = Group("made", ragged=ragged)
    for name, tensor in tensors.items():
        group.add({"name": name}, "stack", {"x": tensor})
    return folder.add_group(group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("ragged", [False, True])
def test_samples_come_back_to_the_bit(tmp_path: Path, dtype: torch.dtype, ragged: bool) -> None:
    folder = CacheFolder.create(tmp_path / "c", "text" if ragged else "latents", COLUMNS)
    given = {str(n): (10 * draw(5, 3, key=n)).clamp(min=0).to(dtype) for n in range(4)}
    given["1"][3:] = 0
    given["2"][:] = 0
    entries = add(folder, given, ragged=ragged)
    for entry in entries.iter_rows(named=True):
        found = folder.shards.sample(entry["shard"], "stack", entry["slot"], entry["crc"])["x"].restore()
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), given[entry["name"]].view(torch.uint8))
    assert not torch.equal(given["0"], given["3"])


def test_only_zeros_that_come_back_exactly_are_cut() -> None:
    tensor = torch.tensor([[1.0, 0.0], [0.0, -0.0], [0.0, 0.0]])
    cut = trim(tensor)
    assert len(cut.tensor) == 2
    assert torch.equal(torch.signbit(cut.restore()), torch.signbit(tensor))
    assert len(trim(torch.zeros(3, 2)).tensor) == 0
    assert trim(torch.zeros(3, 2)).restore().shape == (3, 2)


def test_equal_work_gives_equal_files_and_other_work_others(tmp_path: Path) -> None:
    names = []
    for place, key in (("a", 1), ("b", 1), ("c", 2)):
        folder = CacheFolder.create(tmp_path / place, "latents", COLUMNS)
        add(folder, {"x": draw(4, key=key)})
        names.append({path.name for part in ("shards", "groups") for path in (folder.path / part).iterdir()})
    assert names[0] == names[1]
    assert not names[0] & names[2]


def test_a_group_without_its_record_does_not_exist_and_is_cleared(tmp_path: Path) -> None:
    folder = CacheFolder.create(tmp_path / "c", "latents", COLUMNS)
    add(folder, {"x": draw(4)})
    (folder.path / "shards" / "half.safetensors").write_bytes(b"x")
    (folder.path / "shards" / ".partial-1234-y").write_bytes(b"x")
    assert folder.read_index().height == 1
    # While somebody uses the folder, nothing is cleared: it may be theirs.
    CacheFolder.create(tmp_path / "c", "latents", COLUMNS)
    assert len(list((folder.path / "shards").iterdir())) == 3
    del folder
    again = CacheFolder.create(tmp_path / "c", "latents", COLUMNS)
    assert len(list((again.path / "shards").iterdir())) == 1
    assert again.read_index().height == 1


def test_entries_are_the_same_with_and_without_a_merged_index(tmp_path: Path) -> None:
    folder = CacheFolder.create(tmp_path / "c", "latents", COLUMNS)
    for number in range(3):
        add(folder, {f"{number}": draw(4, key=number)})
    before = folder.read_index().sort("name")
    folder.merge_index()
    add(folder, {"3": draw(4, key=3)})
    after = CacheFolder.open(tmp_path / "c", "latents", COLUMNS).read_index().sort("name")
    assert after.head(3).equals(before)
    assert after["name"].to_list() == ["0", "1", "2", "3"]


def test_a_slot_or_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    save_file({"stack/x": draw(2, 3)}, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"no shard")
    reader = ShardReader(tmp_path)
    reader.sample("a.safetensors", "stack", 1, None)
    for shard, stack, slot in (("a", "stack", 2), ("a", "other", 0), ("b", "stack", 0), ("c", "stack", 0)):
        with pytest.raises(CacheError, match=rf"{shard}\.safetensors"):
            reader.sample(f"{shard}.safetensors", stack, slot, None)


def _private_bytes() -> int:
    """Memory that belongs to this process alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Dirty", "Private_Clean")))


def _read_all(reader: ShardReader, entries: list[tuple[str, int, int]], pipe: Any) -> None:
    before = _private_bytes()
    total = 0.0
    for shard, slot, crc in entries:
        total += float(reader.sample(shard, "stack", slot, crc)["x"].tensor.sum())
    pipe.send("read")
    pipe.recv()
    pipe.send(_private_bytes() - before)


@pytest.mark.slow
def test_workers_share_the_memory_of_what_they_read(tmp_path: Path) -> None:
    folder = CacheFolder.create(tmp_path / "c", "latents", COLUMNS)
    entries = add(folder, {str(n): draw(2**20, key=n) for n in range(16)})
    size = sum(path.stat().st_size for path in (folder.path / "shards").iterdir())
    places = entries.select("shard", "slot", "crc").rows()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    workers = [
        context.Process(target=_read_all, args=(ShardReader(folder.path / "shards"), places, theirs))
        for _, theirs in pipes
    ]
    for worker in workers:
        worker.start()
    # All must have read before anyone counts: a page is private as long as one process alone has it.
    for ours, _ in pipes:
        assert ours.recv() == "read"
    for ours, _ in pipes:
        ours.send("count")
    grown = [ours.recv() for ours, _ in pipes]
    for worker in workers:
        worker.join()
    assert size > 60 * 2**20
    assert max(grown) < size / 4, (grown, size)
