"""What the loop reads: the manifest, its buckets, the plan of each epoch, and batches grouped into steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from frameloom.config.facts import FAMILIES, VAES
from frameloom.config.schema import Recipe
from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.core.log import get_logger
from frameloom.data.bad_clips import BadClipLog
from frameloom.data.batch import Batch, BatchReader
from frameloom.data.buckets import assign, count_unused
from frameloom.data.grid import GridConfig, parse_grid
from frameloom.data.loader import iterate_batches, iterate_epochs
from frameloom.data.manifest import Manifest
from frameloom.data.plan import BatchPlan, plan_epoch
from frameloom.data.reader import CachedReader, ClipReader, ReadSettings, TextSource

_log = get_logger(__name__)

Position = tuple[int, int]
"""(epoch, samples of it that were used): where a run goes on, whatever its workers or its accumulation split."""


@dataclass
class Feed:
    manifest: Manifest
    grid: GridConfig
    plan: Callable[[int], BatchPlan]
    reader: BatchReader
    bad_clips: BadClipLog
    workers: int
    timeout_s: float
    validation: Callable[[], list[Batch]]
    measuring: Callable[[], list[Batch]]

    def steps(self, epoch: int, position: int, accumulate: int) -> Iterator[tuple[list[Batch], Position]]:
        """Endless steps of `accumulate` micro-batches (fewer at an epoch's end), each with the position after it."""
        microbatch = self._microbatch_at(epoch, position)
        waiting: list[Batch] = []
        for plan, batch in iterate_epochs(
            self.plan, self.reader, epoch=epoch, position=microbatch, workers=self.workers, timeout_s=self.timeout_s
        ):
            self.bad_clips.add(batch)
            waiting.append(batch)
            is_end = batch.index + 1 == plan.num_microbatches
            if len(waiting) == accumulate or is_end:
                after = (plan.epoch + 1, 0) if is_end else (plan.epoch, int(plan.starts[batch.index + 1]))
                yield waiting, after
                waiting = []

    def validation_batches(self) -> list[Batch]:
        return self.validation()

    def first_batches(self) -> list[Batch]:
        """A few batches of pixels for measuring a trained model."""
        return self.measuring()

    def _microbatch_at(self, epoch: int, position: int) -> int:
        plan = self.plan(epoch)
        found = int(plan.starts.searchsorted(position))
        if found >= len(plan.starts) or plan.starts[found] != position:
            raise CheckpointError(
                f"sample {position} of epoch {epoch} is in the middle of a batch of this recipe; the batch sizes "
                "changed since the checkpoint: restore data.buckets and train.accumulate, "
                "or start a new run with --name"
            )
        return found


def build_grid(recipe: Recipe) -> GridConfig:
    """Buckets whose sizes fit the autoencoder, and the denoiser's patches where one is trained."""
    stride = VAES[recipe.vae.name].strides[1]
    if recipe.task == "denoiser":
        stride *= FAMILIES[recipe.model.family].patch[1]
    return parse_grid(recipe.data.buckets, stride=stride, fps_max=recipe.data.fps_max)


def read_manifest(recipe: Recipe) -> Manifest:
    root = Path(recipe.data.root) if recipe.data.root else None
    return Manifest.read(Path(recipe.data.manifest), root=root, where=recipe.data.where)


def build_clip_reader(
    recipe: Recipe, manifest: Manifest, grid: GridConfig, text: TextSource | None = None
) -> ClipReader:
    return ClipReader(manifest, grid, seed=recipe.seed, settings=read_settings(recipe), text=text)


def read_settings(recipe: Recipe) -> ReadSettings:
    return ReadSettings(frame_start=recipe.data.frame_start, flip_probability=recipe.data.flip)


def build_plan(recipe: Recipe, manifest: Manifest, grid: GridConfig) -> Callable[[int], BatchPlan]:
    """The plan of an epoch as a function; the last two are kept, because both sides of an epoch's end are asked for."""

    @lru_cache(maxsize=2)
    def plan(epoch: int) -> BatchPlan:
        assignment = assign(manifest, grid, recipe.seed, epoch)
        if epoch == 0:
            _warn_of_unused(manifest, grid, assignment)
        made = plan_epoch(
            assignment,
            grid.batch_sizes,
            grid.costs,
            seed=recipe.seed,
            epoch=epoch,
            alike=recipe.train.accumulate,
            drop_last=recipe.data.drop_last,
        )
        if made.num_microbatches == 0:
            raise DataError(
                f"{recipe.data.manifest}: no clip fits a bucket in epoch {epoch} "
                f"({count_unused(manifest, grid, assignment)}); add smaller sizes or shorter lengths to data.buckets"
            )
        return made

    return plan


def _warn_of_unused(manifest: Manifest, grid: GridConfig, assignment: NDArray[np.int32]) -> None:
    unused = {reason: count for reason, count in count_unused(manifest, grid, assignment).items() if count}
    if unused:
        _log.warning("%d of %d clips fit no bucket: %s", sum(unused.values()), len(manifest), unused)


def build_feed(recipe: Recipe, *, bad_clips: Path) -> Feed:
    from frameloom.train.caching import open_latent_cache, open_text_cache

    grid = build_grid(recipe)
    manifest = read_manifest(recipe)
    text = open_text_cache(recipe, manifest) if recipe.data.cache.text else None
    clips = build_clip_reader(recipe, manifest, grid, text)
    plan = build_plan(recipe, manifest, grid)
    reader: BatchReader = clips
    if recipe.data.cache.latents:
        latents = open_latent_cache(recipe, manifest, grid)
        reader = CachedReader(manifest, grid, latents, seed=recipe.seed, text=text)

    def measure() -> list[Batch]:
        return list(islice(iterate_batches(plan(0), clips), 8))

    return Feed(
        manifest=manifest,
        grid=grid,
        plan=plan,
        reader=reader,
        bad_clips=BadClipLog(bad_clips, num_clips=len(manifest), limit=recipe.data.bad_limit),
        # A cached batch is a lookup: a process hop would cost more than it.
        workers=0 if recipe.data.cache.latents else recipe.data.workers,
        timeout_s=recipe.data.timeout_s,
        validation=_validation_source(recipe, grid),
        measuring=measure,
    )


def _validation_source(recipe: Recipe, grid: GridConfig) -> Callable[[], list[Batch]]:
    """The same few held-out batches each time, read once and kept."""
    section = recipe.validation
    if section is None:
        return list

    @lru_cache(maxsize=1)
    def read() -> tuple[Batch, ...]:
        root = Path(recipe.data.root) if recipe.data.root else None
        manifest = Manifest.read(Path(recipe.data.manifest), root=root, where=section.where)
        if len(manifest) == 0:
            raise ConfigError(f"validation.where {dict(section.where)} keeps no row of {recipe.data.manifest}")
        plan = build_plan(recipe, manifest, grid)(0)
        return tuple(islice(iterate_batches(plan, build_clip_reader(recipe, manifest, grid)), section.batches))

    return lambda: list(read())
