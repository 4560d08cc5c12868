"""The batches of a run, grouped into steps and read from the files or the caches of a recipe; steps of an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from frameloom.builders.data import build_clip_reader, build_plan, build_policy, class_rows, read_manifest, shown_rows
from frameloom.config.rules.training import check_optim, check_train
from frameloom.config.schema.recipe import Recipe
from frameloom.core.device import pick_device
from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.core.logging import get_logger
from frameloom.data.buckets.policy import BucketPolicy, assign
from frameloom.data.cache.external import RowTextReader
from frameloom.data.loading.bad_clips import BadClipLog
from frameloom.data.loading.batch import Batch, BatchReader, BatchRequest
from frameloom.data.loading.companions import PairedReader
from frameloom.data.loading.loader import iterate_batches, read_requests, request_at
from frameloom.data.loading.prefetch import prefetch_to_device
from frameloom.data.loading.reader import CachedReader
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.order.plan import BatchPlan
from frameloom.data.order.rank_assignment import Pick, Shares, Span, find_microbatch, iterate_spans
from frameloom.models.registry import DENOISERS
from frameloom.training.caching import open_caches

_log = get_logger(__name__)

Position = tuple[int, int]
"""(epoch, samples of it that were used): where a run goes on, whatever its workers or its accumulation split."""


@dataclass
class Feed:
    manifest: Manifest
    policy: BucketPolicy
    plan: Callable[[int], BatchPlan]
    reader: BatchReader
    bad_clips: BadClipLog
    workers: int
    timeout_s: float
    device: torch.device
    validation: Callable[[], list[Batch]]
    measuring: Callable[[], list[Batch]]
    shares: Shares = field(default_factory=Shares)
    span: Span | None = None
    """what all processes take in the step that `steps` gave last"""

    def steps(self, epoch: int, position: int, accumulate: int) -> Iterator[tuple[list[Batch], Position]]:
        """Endless steps of `accumulate` micro-batches (fewer at an epoch's end), each with the position after it.

        With several processes, or `parallel.data`, a step has a multiple of them, of which this process gets its share.
        """
        asked: deque[tuple[Span, list[Pick]]] = deque()
        source = read_requests(
            self._requests(epoch, position, accumulate, asked),
            self.reader,
            workers=self.workers,
            timeout_s=self.timeout_s,
            quarantine=self.bad_clips.quarantine,
        )
        waiting: list[Batch] = []
        # Where there is no copy to hide, a thread would only take time from the step.
        for batch in prefetch_to_device(source, self.device) if self.device.type == "cuda" else source:
            span, picks = asked[0]
            is_filler = picks[len(waiting)].is_filler
            waiting.append(replace(batch, is_filler=True, bad=[]) if is_filler else batch)
            if self.shares.num_ranks == 1:
                self.bad_clips.add(batch)
            if len(waiting) == len(picks):
                asked.popleft()
                self.span = span
                yield waiting, span.after
                waiting = []

    def _requests(
        self, epoch: int, position: int, accumulate: int, asked: deque[tuple[Span, list[Pick]]]
    ) -> Iterator[BatchRequest]:
        """What this process reads, without end; each step is put down in `asked` before its first request."""
        per_step = accumulate * self.shares.num_shares
        first = self._microbatch_at(epoch, position)
        names = [bucket.name for bucket in self.policy.buckets]
        for span in iterate_spans(self.plan, epoch=epoch, microbatch=first, per_step=per_step, names=names):
            picks = self.shares.pick(span)
            asked.append((span, picks))
            for pick in picks:
                yield request_at(span.plan, pick.index)

    def validation_batches(self) -> list[Batch]:
        return self.validation()

    def first_batches(self) -> list[Batch]:
        """A few batches of pixels for measuring a trained model."""
        return self.measuring()

    def _microbatch_at(self, epoch: int, position: int) -> int:
        found = find_microbatch(self.plan(epoch), position)
        if found is None:
            raise CheckpointError(
                f"sample {position} of epoch {epoch} is in the middle of a batch of this recipe; the batch sizes "
                "changed since the checkpoint: restore data.buckets and train.accumulate, "
                "or start a new run with --name"
            )
        return found


def build_feed(recipe: Recipe, *, bad_clips: Path, shares: Shares | None = None, is_first: bool = True) -> Feed:
    """`shares` is the part of this process; of several, the first one writes the list of bad clips."""
    policy = build_policy(recipe)
    manifest = read_manifest(recipe)
    caches = open_caches(recipe, manifest, policy)
    clips = build_clip_reader(recipe, manifest, policy, caches.text)
    plan = build_plan(recipe, manifest, policy)
    reader: BatchReader = clips
    if caches.latents is not None:
        reader = CachedReader(
            manifest,
            policy,
            caches.latents,
            seed=recipe.seed,
            text=caches.text,
            transforms=clips.settings.transforms if "sizes" in DENOISERS[recipe.model.family].conditions else None,
            caption_choice=recipe.data.caption_choice,
        )
    if caches.row_text is not None:
        reader = RowTextReader(reader, caches.row_text)
    if recipe.dreambooth is not None and len(rows := class_rows(manifest)):
        reader = PairedReader(clips, rows, seed=recipe.seed)

    def measure() -> list[Batch]:
        return list(islice(iterate_batches(plan(0), clips), 8))

    return Feed(
        manifest=manifest,
        policy=policy,
        plan=plan,
        reader=reader,
        bad_clips=BadClipLog(bad_clips, num_clips=len(manifest), limit=recipe.data.bad_limit, is_writer=is_first),
        # A cached batch is a lookup: a process hop would cost more than it.
        workers=recipe.data.workers if caches.latents is None else 0,
        timeout_s=recipe.data.timeout_s,
        device=pick_device(recipe.train.device),
        validation=_validation_source(recipe, policy),
        measuring=measure,
        shares=shares or Shares(),
    )


def settle_length(recipe: Recipe, manifest: Manifest, policy: BucketPolicy, *, num_ranks: int = 1) -> Recipe:
    """The recipe with its length in steps; ConfigError when that is too short for its schedule or its profile."""
    if recipe.train.epochs is None:
        return recipe
    steps = sum(count_steps(recipe, manifest, policy, epoch, num_ranks) for epoch in range(recipe.train.epochs))
    settled = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps, "epochs": None})})
    if problems := [problem.text for rule in (check_optim, check_train) for problem in rule(settled)]:
        raise ConfigError([f"train.epochs {recipe.train.epochs} are {steps} steps: {text}" for text in problems])
    _log.info("%d epochs are %d steps", recipe.train.epochs, steps)
    return settled


def count_steps(recipe: Recipe, manifest: Manifest, policy: BucketPolicy, epoch: int, num_ranks: int = 1) -> int:
    """Steps of one epoch, as its plan has them, without the cost of putting it in order."""
    assignment = assign(manifest, policy, recipe.seed, epoch)
    shown = shown_rows(recipe, manifest, epoch)
    chosen = assignment if shown is None else assignment[shown]
    counts = np.bincount(chosen[chosen >= 0], minlength=len(policy.buckets))
    per_step, sizes = recipe.train.accumulate * num_ranks, policy.batch_sizes
    if recipe.data.drop_last:
        # The plan leaves out what fills no unit of `accumulate`; ranks share the rest.
        units = int((counts // sizes).sum()) // recipe.train.accumulate
        return -(-units // num_ranks)
    return -(-int((-(-counts // sizes)).sum()) // per_step)


def _validation_source(recipe: Recipe, policy: BucketPolicy) -> Callable[[], list[Batch]]:
    """The same few held-out batches each time, read once and kept."""
    section = recipe.validation
    if section is None or not section.batches:
        return list
    # At once: a mistake that shows at the first validation would cost the steps before it.
    try:
        manifest = read_manifest(recipe, where=section.where)
        plan = build_plan(recipe, manifest, policy)(0)
    except DataError as error:
        raise DataError(f"validation.where: {error}") from error

    @lru_cache(maxsize=1)
    def read() -> tuple[Batch, ...]:
        return tuple(islice(iterate_batches(plan, build_clip_reader(recipe, manifest, policy)), section.batches))

    return lambda: list(read())
