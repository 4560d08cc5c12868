"""Profiling some steps of a run: a trace for chrome://tracing or Perfetto, and a table of what took the time.

A recording begins before the batch of its first step is read and ends after its last step, so waiting for data shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from frameloom.config.schema.training import ProfileSection
from frameloom.core.files import atomic_file
from frameloom.core.logging import get_logger

_log = get_logger(__name__)


@dataclass
class StepProfiler:
    """Call `note(step)` before the first step and after every step, with the number of the last step taken.

    Without a section nothing is ever recorded.
    """

    section: ProfileSection | None = None
    folder: Path = Path("profile")
    on_gpu: bool = False
    _running: profile | None = None

    def note(self, step: int) -> None:
        section = self.section
        if section is None:
            return
        last = section.start + section.steps - 1
        if self._running is None and step == section.start - 1:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
            self._running = profile(activities=activities, profile_memory=section.memory, acc_events=True)
            self._running.start()
        elif self._running is not None and step == last:
            running, self._running = self._running, None
            running.stop()
            path = self.folder / f"steps-{section.start:08d}-{last:08d}.json"
            with atomic_file(path) as partial:
                running.export_chrome_trace(str(partial))
            lines = "\n".join(summarize(running, self.on_gpu))
            _log.info("%s: open it in chrome://tracing or ui.perfetto.dev\n%s", path, lines)

    def close(self) -> None:
        """End a recording that a stop has cut short; nothing is written of it."""
        if self._running is not None:
            self._running.stop()
            self._running = None


def summarize(recorded: profile, on_gpu: bool, num_rows: int = 12) -> list[str]:
    """The operations that took most time themselves, on the device: time, share, calls, and memory they kept."""
    suffix = "device" if on_gpu else "cpu"
    rows = [
        (getattr(event, f"self_{suffix}_time_total"), getattr(event, f"self_{suffix}_memory_usage"), event)
        for event in recorded.key_averages()
    ]
    rows.sort(key=lambda row: -row[0])
    total_us = sum(row[0] for row in rows) or 1.0
    lines = [f"{'operation':40} {'own ms':>10} {'share':>7} {'calls':>8} {'own MB':>9}"]
    for time_us, memory, event in rows[:num_rows]:
        share = time_us / total_us
        lines.append(f"{event.key[:40]:40} {time_us / 1e3:10.2f} {share:7.1%} {event.count:8,} {memory / 2**20:9.1f}")
    return lines
