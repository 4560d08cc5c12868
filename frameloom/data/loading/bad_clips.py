"""Unreadable clips: the list of them in a run, and the limit that ends it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

from frameloom.core.errors import DataError
from frameloom.core.logging import get_logger
from frameloom.data.loading.batch import BadClip

_log = get_logger(__name__)
_NUM_SHOWN = 10


class BadClipLog:
    """Counts bad clips, appends them to a JSON-lines file, and raises when more than `limit` of all clips are bad.

    The share is of different rows among `num_clips`, so it does not depend on where the bad ones happen to come. A
    resumed run appends to the same file: a sample that is read again is not listed twice.
    """

    def __init__(self, path: Path, *, num_clips: int, limit: float, is_writer: bool = True) -> None:
        """Of several processes that note the same clips, one is the writer."""
        self.path, self.num_clips, self.limit, self._is_writer = path, num_clips, limit, is_writer
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

    def add(self, clips: Iterable[BadClip]) -> None:
        """DataError when they have become too many."""
        new = [clip for clip in dict.fromkeys(clips) if clip not in self._seen]
        if not new:
            return
        if self._is_writer:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(dataclasses.asdict(clip)) + "\n" for clip in new)
                file.flush()
                os.fsync(file.fileno())
        self._seen.update(new)
        self.clips += new
        for clip in new:
            if clip.row not in self._rows:
                self._rows.add(clip.row)
                shares = self.num_bad, self.num_clips, 100 * self.limit
                _log.warning("%s; skipped (%d of %d clips, limit %g%%)", clip.reason, *shares)
        if self.num_bad > self.limit * self.num_clips:
            first = {clip.row: clip.reason for clip in reversed(self.clips)}
            shown = [f"  {reason}" for _, reason in sorted(first.items())[:_NUM_SHOWN]]
            more = [f"  and {len(first) - _NUM_SHOWN} more"] if len(first) > _NUM_SHOWN else []
            raise DataError(
                f"{self.num_bad} of {self.num_clips} clips cannot be read, over the limit of {100 * self.limit:g}%; "
                f"the list is in {self.path}. Repair or remove them, or raise the limit:\n" + "\n".join(shown + more)
            )

    def start_anew(self, aside: Path) -> None:
        """Forget all of them, since rows mean other clips now; the list so far is kept as `aside`."""
        if self._is_writer and self.path.exists():
            os.replace(self.path, aside)
        self.clips.clear()
        self._seen.clear()
        self._rows.clear()


def read_bad_clips(path: Path, *, repair: bool = False) -> list[BadClip]:
    """The clips of a list, up to a half line that is being written, or that a killed run left; `repair` cuts it off."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    if repair and whole != text:
        path.write_text(whole, encoding="utf-8")
    found = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            found.append(BadClip(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}: not a list of bad clips, line {number} ({error}); move the file away") from error
    return found
