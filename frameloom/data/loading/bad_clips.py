"""Unreadable clips: the list of them in a run, and the limit that ends it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

from frameloom.core.errors import DataError
from frameloom.core.logging import get_logger
from frameloom.data.loading.batch import BadClip, Batch

_log = get_logger(__name__)
_NUM_SHOWN = 10


class BadClipLog:
    """Counts bad clips, appends them to a JSON-lines file, and raises when more than `limit` of all clips are bad.

    The share is of different rows among `num_clips`, so it does not depend on where the bad ones happen to come. A
    resumed run goes on with the same file: a slot that is read again is not listed twice.
    """

    def __init__(self, path: Path, *, num_clips: int, limit: float, is_writer: bool = True) -> None:
        """Of several processes that note the same clips, one is the writer."""
        self.path = path
        self._is_writer = is_writer
        self.num_clips = num_clips
        self.limit = limit
        self.clips = read_bad_clips(path, repair=is_writer)
        self._seen = set(self.clips)
        self._rows = {clip.row for clip in self.clips}

    @property
    def num_bad(self) -> int:
        """Different rows that were bad."""
        return len(self._rows)

    @property
    def quarantine(self) -> dict[int, str]:
        """Rows that ended or stalled a worker, with their reasons: not to be opened again by a resumed run."""
        return {clip.row: clip.reason for clip in self.clips if clip.fatal}

    def add(self, batch: Batch) -> None:
        """Take note of the bad clips of a batch; DataError when they have become too many."""
        self.add_clips(batch.bad)

    def add_clips(self, clips: Iterable[BadClip]) -> None:
        new = [clip for clip in dict.fromkeys(clips) if clip not in self._seen]
        if not new:
            return
        if self._is_writer:
            self._append(new)
        for clip in new:
            self._seen.add(clip)
            self.clips.append(clip)
            if clip.row not in self._rows:
                self._rows.add(clip.row)
                _log.warning("%s; skipped (%d of %d clips, limit %g%%)", clip.reason, *self._share(), 100 * self.limit)
        self.check()

    def check(self) -> None:
        """DataError when the clips noted so far are too many."""
        num_bad, num_clips = self._share()
        if num_bad > self.limit * num_clips:
            first = {clip.row: clip.reason for clip in reversed(self.clips)}
            shown = [f"  {reason}" for _, reason in sorted(first.items())[:_NUM_SHOWN]]
            more = [f"  and {len(first) - _NUM_SHOWN} more"] if len(first) > _NUM_SHOWN else []
            raise DataError(
                f"{num_bad} of {num_clips} clips cannot be read, over the limit of {100 * self.limit:g}%; the list "
                f"is in {self.path}. Repair or remove them, or raise the limit:\n" + "\n".join(shown + more)
            )

    def start_anew(self, aside: Path) -> None:
        """Forget all of them, since rows mean other clips now; the list so far is kept as `aside`."""
        if self._is_writer and self.path.exists():
            os.replace(self.path, aside)
        self.clips.clear()
        self._seen.clear()
        self._rows.clear()

    def _share(self) -> tuple[int, int]:
        return self.num_bad, self.num_clips

    def _append(self, clips: list[BadClip]) -> None:
        lines = "".join(json.dumps(dataclasses.asdict(clip)) + "\n" for clip in clips)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())


def read_bad_clips(path: Path, *, repair: bool = False) -> list[BadClip]:
    """The clips of a list; `repair` also cuts off the half line that a killed run may leave."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        # A killed run can leave half a line; what it stood for is read again.
        text = text[: text.rfind("\n") + 1]
        if repair:
            path.write_text(text, encoding="utf-8")
    try:
        return [BadClip(**json.loads(line)) for line in text.splitlines()]
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: not a list of bad clips ({error}); move the file away") from error
