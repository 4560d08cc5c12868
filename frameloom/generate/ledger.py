"""Which requests of a folder are done: `samples.jsonl`, one line per file, so that a long list can be gone on with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from frameloom.core.files import digest_file, digest_value, write_text

LEDGER = "samples.jsonl"
_OF_RANK = "samples-rank*.jsonl"


@dataclass(frozen=True)
class Entry:
    """A finished file: `key` is the digest of all that it was made from, `sha256` that of its content."""

    file: str
    prompt: str
    seed: int
    key: str
    sha256: str


class Ledger:
    """Entries by key. Each process appends to a file of its own; `settle` joins them when all are done."""

    def __init__(self, out: Path, *, rank: int = 0) -> None:
        self.out = out
        self._own = out / (LEDGER if rank == 0 else f"samples-rank{rank}.jsonl")
        self.entries: dict[str, Entry] = {}
        for file in (out / LEDGER, *sorted(out.glob(_OF_RANK))):
            self.entries |= {entry.key: entry for entry in _read(file)}

    def find_done(self, key: str) -> Entry | None:
        """The entry of a request whose file is there and unchanged."""
        entry = self.entries.get(key)
        if entry is None or not (self.out / entry.file).exists():
            return None
        return entry if digest_clip(self.out / entry.file) == entry.sha256 else None

    def add(self, entry: Entry) -> None:
        self.entries[entry.key] = entry
        self.out.mkdir(parents=True, exist_ok=True)
        with self._own.open("a", encoding="utf-8") as file:
            file.write(_write([entry]))
            file.flush()
            os.fsync(file.fileno())

    def settle(self, order: Iterable[str]) -> None:
        """One file for all processes: earlier entries, then those of this call in its order."""
        for file in sorted(self.out.glob(_OF_RANK)):
            self.entries |= {entry.key: entry for entry in _read(file)}
        last = list(dict.fromkeys(key for key in order if key in self.entries))
        kept = [key for key in self.entries if key not in set(last)]
        write_text(self.out / LEDGER, _write(self.entries[key] for key in (*kept, *last)))
        for file in self.out.glob(_OF_RANK):
            file.unlink()


def digest_clip(path: Path) -> str:
    """Of a file, or of a folder of frames."""
    if path.is_file():
        return digest_file(path)
    return digest_value({file.name: digest_file(file) for file in path.iterdir()})


def _write(entries: Iterable[Entry]) -> str:
    return "".join(json.dumps(asdict(entry)) + "\n" for entry in entries)


def _read(file: Path) -> Iterable[Entry]:
    """All whole lines; one that a killed process left half-written counts as not there."""
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield Entry(**json.loads(line))
        except (ValueError, TypeError):
            continue
