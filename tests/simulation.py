"""A cluster of thousands of processes in one: the real plan, shares, agreement, checkpoints and resume, no model.

Every step deals the micro-batches of the plan to all processes and counts their votes. Processes fail, saves are cut
off or damaged, the number of processes changes, and now and then one process has another view of the step. What is
checked: all processes take the same number of rounds, no sample is used twice or lost in an epoch, and a differing view
is found in the very step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from frameloom.checkpoint.reader import Checkpoint, find_latest, step_folder
from frameloom.checkpoint.writer import apply_retention
from frameloom.core.random import numpy_stream
from frameloom.data.order.plan import BatchPlan, plan_epoch
from frameloom.data.order.rank_assignment import PlannedStep, RankAssignment, find_microbatch, plan_steps
from frameloom.training.agreement import StepFingerprint, check_words, pack_words
from tests.checkpoint.saving import save_checkpoint


@dataclass(frozen=True)
class Scenario:
    """What happens to the cluster; shares are of steps, drawn from `seed`."""

    sizes: tuple[int, ...] = (4096, 4088, 512)
    """numbers of processes; each failure takes the next"""
    num_rows: int = 2_000_000
    num_steps: int = 2000
    save_every: int = 50
    failures: float = 0.01
    damaged_saves: float = 0.05
    dissents: float = 0.005
    accumulate: int = 1
    seed: int = 0


@dataclass
class Report:
    """What was seen; `problems` is empty if all went well."""

    num_steps: int = 0
    num_repeated: int = 0
    num_failures: int = 0
    num_damaged: int = 0
    num_dissents: int = 0
    num_found: int = 0
    num_epochs: int = 0
    seconds: float = 0.0
    longest_step_s: float = 0.0
    num_plans: int = 0
    plan_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def seconds_per_10k(self) -> float:
        """Of shares and agreement: what a process does beside each step, and the count of all votes."""
        return 10_000 * self.seconds / max(self.num_steps, 1)


# Buckets of images and clips, their batch sizes and costs as a token budget makes them.
_BATCHES = np.array([32, 12, 6, 3, 1], dtype=np.int64)
_COSTS = np.array([1.0, 2.7, 5.3, 10.7, 32.0])
_SHARES = (0.4, 0.25, 0.2, 0.1, 0.05)


def make_plans(scenario: Scenario, report: Report) -> Callable[[int], BatchPlan]:
    """Plans of made-up rows; the time that they take goes into `report`."""
    draws = numpy_stream(scenario.seed, "cluster rows").random(scenario.num_rows)
    assignment = np.searchsorted(np.cumsum(_SHARES)[:-1], draws).astype(np.int32)

    @lru_cache(maxsize=2)
    def plan(epoch: int) -> BatchPlan:
        started = time.perf_counter()
        made = plan_epoch(assignment, _BATCHES, _COSTS, seed=scenario.seed, epoch=epoch, accumulate=scenario.accumulate)
        report.num_plans += 1
        report.plan_seconds += time.perf_counter() - started
        return made

    return plan


class Cluster:
    """The state that all processes share, and the checkpoints on disk."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.report = Report()
        self.plans = make_plans(scenario, self.report)
        self.step = self.epoch = self.position = 0
        self.starts = 0
        self.used: dict[int, list[tuple[int, int]]] = {}
        self._luck = numpy_stream(scenario.seed, "cluster luck")

    @property
    def num_ranks(self) -> int:
        return self.scenario.sizes[self.starts % len(self.scenario.sizes)]

    def run(self) -> Report:
        """Until the last step, through all failures."""
        self.save()
        while self.step < self.scenario.num_steps and not self.report.problems:
            self.run_until_failure()
            if self.step < self.scenario.num_steps:
                self.resume()
        return self.report

    def run_until_failure(self) -> None:
        steps = self.planned_steps(RankAssignment(num_ranks=self.num_ranks, num_shares=self.num_ranks))
        while self.step < self.scenario.num_steps:
            planned = next(steps)
            started = time.perf_counter()
            fingerprint = StepFingerprint.of(self.step + 1, planned, "recipe")
            self.deal(planned)
            is_agreed = self.vote(fingerprint)
            self.note_time(time.perf_counter() - started)
            if not is_agreed or self._luck.random() < self.scenario.failures:
                self.report.num_failures += is_agreed
                return
            self.finish(planned)

    def planned_steps(self, assignment: RankAssignment) -> Iterator[PlannedStep]:
        microbatch = find_microbatch(self.plans(self.epoch), self.position)
        if microbatch is None:
            raise AssertionError(f"sample {self.position} of epoch {self.epoch} is inside a micro-batch")
        accumulate = self.scenario.accumulate
        return plan_steps(self.plans, assignment, epoch=self.epoch, microbatch=microbatch, accumulate=accumulate)

    def deal(self, planned: PlannedStep) -> None:
        """Every micro-batch of the step is run once, in as many rounds by all."""
        indices, fillers = planned.deal()
        run = np.sort(indices[~fillers])
        if indices.shape[1] != self.num_ranks or not np.array_equal(run, np.arange(planned.first, planned.end)):
            self.report.problems.append(f"step {self.step + 1}: micro-batches are run twice or not at all")

    def vote(self, fingerprint: StepFingerprint) -> bool:
        """Count the votes of all; now and then one has another view, which must be found."""
        words, odd = fingerprint.words(), None
        if self._luck.random() < self.scenario.dissents:
            odd = self._dissent(fingerprint).words()
            self.report.num_dissents += 1
        ballot = np.array(pack_words(words, words))
        total = ballot * (self.num_ranks - (odd is not None))
        if odd is not None:
            total += np.array(pack_words(odd, words))
        is_agreed = all(check_words(total.tolist(), self.num_ranks))
        if is_agreed != (odd is None):
            self.report.problems.append(f"step {fingerprint.step}: the vote says {is_agreed}, a dissent is {odd}")
        self.report.num_found += not is_agreed
        return is_agreed

    def _dissent(self, fingerprint: StepFingerprint) -> StepFingerprint:
        """A process that is a step behind, has other samples, another bucket or another recipe."""
        rows: NDArray[np.int64] = fingerprint.rows.copy()
        rows[int(self._luck.integers(len(rows)))] += 1
        views = (
            replace(fingerprint, step=fingerprint.step - 1),
            replace(fingerprint, rows=rows),
            replace(fingerprint, buckets=fingerprint.buckets[::-1] + 1),
            replace(fingerprint, recipe="other"),
        )
        return views[int(self._luck.integers(len(views)))]

    def finish(self, planned: PlannedStep) -> None:
        begin, end = int(planned.plan.starts[planned.first]), int(planned.plan.starts[planned.end])
        self.used.setdefault(planned.epoch, []).append((begin, end))
        self.step += 1
        self.epoch, self.position = planned.position
        if self.epoch != planned.epoch:
            self.close_epoch(planned)
        if self.step % self.scenario.save_every == 0:
            self.save()

    def close_epoch(self, planned: PlannedStep) -> None:
        """The samples that were used, without those that a failure took back, are all of the epoch, each once."""
        pieces = np.array(self.used[planned.epoch])
        tiled = pieces[0, 0] == 0 and pieces[-1, 1] == planned.plan.num_samples
        if not tiled or (pieces[1:, 0] != pieces[:-1, 1]).any():
            self.report.problems.append(f"epoch {planned.epoch}: samples are used twice or lost")
        rows = np.sort(planned.plan.order)
        if (rows[1:] == rows[:-1]).any() or len(rows) != planned.plan.num_samples:
            self.report.problems.append(f"epoch {planned.epoch}: a row comes twice in the plan")
        self.report.num_epochs += 1

    def save(self) -> None:
        """As a run saves; some saves are damaged by what happens to the disk later."""
        state = {"epoch": self.epoch, "position": self.position}
        save_checkpoint(self.folder, Checkpoint(self.step, {"model": {"weight": torch.tensor([self.step])}}, state))
        apply_retention(self.folder, 3)
        if self.step and self._luck.random() < self.scenario.damaged_saves:
            file = step_folder(self.folder, self.step) / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-1])
            self.report.num_damaged += 1

    def resume(self) -> None:
        """Another number of processes goes on from what the first one finds on disk."""
        found = find_latest(self.folder, set_aside=True)
        assert found is not None
        self.report.num_repeated += self.step - found.step
        self.step, self.epoch, self.position = found.step, found.state["epoch"], found.state["position"]
        self.starts += 1
        for epoch in [epoch for epoch in self.used if epoch > self.epoch]:
            del self.used[epoch]
        kept = self.used.get(self.epoch, [])
        self.used[self.epoch] = [piece for piece in kept if piece[1] <= self.position]

    def note_time(self, seconds: float) -> None:
        self.report.num_steps += 1
        self.report.seconds += seconds
        self.report.longest_step_s = max(self.report.longest_step_s, seconds)


def simulate(scenario: Scenario, folder: Path) -> Report:
    """Run a scenario with its checkpoints in `folder`, which is empty."""
    return Cluster(scenario, folder).run()
