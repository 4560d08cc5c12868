"""The batches of a run, grouped into steps and read from the files or the caches of a recipe; steps of an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from frameloom.builders.data import build_plan, build_policy, class_rows, read_manifest, shown_rows
from frameloom.config.rules.check import check_rules
from frameloom.config.schema.recipe import Recipe
from frameloom.core.device import pick_device
from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.core.logging import get_logger
from frameloom.data.buckets.policy import BucketPolicy, assign
from frameloom.data.loading.bad_clips import BadClipLog
from frameloom.data.loading.batch import Batch, BatchRequest
from frameloom.data.loading.loader import iterate_batches, read_requests, request_at
from frameloom.data.loading.prefetch import prefetch_to_device
from frameloom.data.loading.reader import BatchReader, Stores
from frameloom.data.manifest.manifest import Manifest
from frameloom.data.order.plan import BatchPlan
from frameloom.data.order.rank_assignment import PlannedStep, RankAssignment, find_microbatch, plan_steps
from frameloom.models.registry import DENOISERS
from frameloom.training.caching import open_caches

_log = get_logger(__name__)

Position = tuple[int, int]
"""(epoch, samples of it that were used): where a run resumes, with any number of workers and any accumulation."""


class StepBatches(NamedTuple):
    """The micro-batches that this rank runs in a step, and the step as all ranks take it together."""

    batches: list[Batch]
    planned: PlannedStep


@dataclass(frozen=True)
class Feed:
    manifest: Manifest
    policy: BucketPolicy
    plan: Callable[[int], BatchPlan]
    reader: BatchReader
    bad_clips: BadClipLog
    workers: int
    device: torch.device
    assignment: RankAssignment
    validation_batches: Callable[[], list[Batch]]
    first_batches: Callable[[], list[Batch]]
    """a few batches of pixels for measuring a trained model"""

    def steps(self, epoch: int, position: int, accumulate: int) -> Iterator[StepBatches]:
        """Endless steps of `accumulate` micro-batches (fewer at an epoch's end).

        With several ranks, or `parallel.data`, a step has a multiple of them, of which this rank runs its share.
        """
        first = find_microbatch(self.plan(epoch), position)
        if first is None:
            raise CheckpointError(
                f"sample {position} of epoch {epoch} is in the middle of a batch of this recipe; the batch sizes "
                "changed since the checkpoint: restore data.buckets and train.accumulate, "
                "or start a new run with --name"
            )
        names = [bucket.name for bucket in self.policy.buckets]
        start = {"epoch": epoch, "microbatch": first, "accumulate": accumulate}
        # Requests run ahead of the batches by what the workers prefetch.
        requested: deque[tuple[PlannedStep, list[tuple[int, bool]]]] = deque()

        def requests() -> Iterator[BatchRequest]:
            for planned in plan_steps(self.plan, self.assignment, names=names, **start):
                requested.append((planned, planned.of_rank()))
                for index, _ in requested[-1][1]:
                    yield request_at(planned.plan, index)

        source = read_requests(
            requests(),
            self.reader,
            workers=self.workers,
            quarantine=self.bad_clips.quarantine,
        )
        batches: list[Batch] = []
        # Where there is no copy to hide, a thread would only take time from the step.
        for batch in prefetch_to_device(source, self.device) if self.device.type == "cuda" else source:
            planned, own = requested[0]
            is_filler = own[len(batches)][1]
            batches.append(replace(batch, is_filler=True, bad=[]) if is_filler else batch)
            if self.assignment.num_ranks == 1:
                self.bad_clips.add(batch.bad)
            if len(batches) == len(own):
                requested.popleft()
                yield StepBatches(batches, planned)
                batches = []


def build_feed(
    recipe: Recipe, bad_clips: Path, assignment: RankAssignment | None = None, is_first: bool = True
) -> Feed:
    """`assignment` is the part of this rank; of several, the first one writes the list of bad clips."""
    policy = build_policy(recipe)
    assignment = assignment or RankAssignment()
    if _needs_rounds_of_one_kind(recipe):
        kinds = np.array([bucket.frames > 1 for bucket in policy.buckets], dtype=np.int64)
        assignment = replace(assignment, kind_of_bucket=kinds)
    manifest = read_manifest(recipe)
    stores = open_caches(recipe, manifest, policy)
    plan = build_plan(recipe, manifest, policy)
    pictures = class_rows(manifest) if recipe.dreambooth is not None else None
    reader = BatchReader(
        manifest,
        policy,
        recipe.data,
        recipe.seed,
        stores,
        class_rows=pictures if pictures is not None and len(pictures) else None,
        crops_of_latents=stores.latents is not None and "sizes" in DENOISERS[recipe.model.family].supported_conditions,
    )
    pixels = BatchReader(manifest, policy, recipe.data, recipe.seed, Stores(text=stores.text))
    return Feed(
        manifest=manifest,
        policy=policy,
        plan=plan,
        reader=reader,
        bad_clips=BadClipLog(bad_clips, num_clips=len(manifest), limit=recipe.data.bad_limit, is_writer=is_first),
        # A cached batch is a lookup: a process hop would cost more than it.
        workers=recipe.data.workers if stores.latents is None else 0,
        device=pick_device(recipe.train.device),
        assignment=assignment,
        validation_batches=_validation_source(recipe, policy),
        first_batches=lambda: list(islice(iterate_batches(plan(0), pixels), 8)),
    )


def _needs_rounds_of_one_kind(recipe: Recipe) -> bool:
    """Whether ranks that wait for each other within a pass would do different things for images and for videos."""
    is_model = recipe.task == "denoiser" and recipe.inversion is None
    skips = is_model and DENOISERS[recipe.model.family].images_skip_temporal_blocks
    return (recipe.parallel.zero >= 2 and skips) or (
        recipe.parallel.encoders != "each" and recipe.data.use_image_num > 0
    )


def resolve_num_steps(recipe: Recipe, manifest: Manifest, policy: BucketPolicy, *, num_ranks: int = 1) -> Recipe:
    """The recipe with its length in steps; ConfigError when that is too short for its schedule or its profile."""
    if recipe.train.epochs is None:
        return recipe
    steps = sum(count_steps(recipe, manifest, policy, epoch, num_ranks) for epoch in range(recipe.train.epochs))
    settled = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps, "epochs": None})})
    if problems := [problem.text for problem in check_rules(settled)]:
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
    # Now, since an error at the first validation would cost the steps before it.
    try:
        manifest = read_manifest(recipe, where=section.where)
        plan = build_plan(recipe, manifest, policy)(0)
    except DataError as error:
        raise DataError(f"validation.where: {error}") from error

    @lru_cache(maxsize=1)
    def read() -> tuple[Batch, ...]:
        reader = BatchReader(manifest, policy, recipe.data, recipe.seed)
        return tuple(islice(iterate_batches(plan, reader), section.batches))

    return lambda: list(read())
