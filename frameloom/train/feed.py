"""What the loop reads: the manifest, its buckets, the plan of each epoch, and batches grouped into steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from frameloom.config.policy_checks import token_patch
from frameloom.config.schema import Recipe
from frameloom.core.errors import CheckpointError, DataError
from frameloom.core.log import get_logger
from frameloom.data.bad_clips import BadClipLog
from frameloom.data.batch import Batch, BatchReader, BatchRequest
from frameloom.data.buckets import BucketPolicy, assign, count_unused
from frameloom.data.caption_notes import CaptionNotes, note_captions
from frameloom.data.caption_templates import read_templates, retell
from frameloom.data.filters import Where
from frameloom.data.foreign_cache import RowTextReader
from frameloom.data.loader import iterate_batches, read_requests, request_at
from frameloom.data.manifest import Manifest, SourceSpec, rows_of_epoch
from frameloom.data.paired_reader import PairedReader
from frameloom.data.plan import BatchPlan, plan_epoch
from frameloom.data.policies.build import build_bucket_policy
from frameloom.data.policies.lengths import LengthRule
from frameloom.data.prefetch import prefetch_to_device
from frameloom.data.reader import CachedReader, ClipReader, ReadSettings, TextSource
from frameloom.data.transforms import parse_transforms
from frameloom.generate.parts import pick_device
from frameloom.models.registry import DENOISERS, VAES
from frameloom.train.class_images import class_rows, with_class_images
from frameloom.train.parallel.shares import Pick, Shares, Span, find_microbatch, iterate_spans

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


def build_policy(recipe: Recipe) -> BucketPolicy:
    """Buckets whose sizes fit the autoencoder, and the denoiser's patches where one is trained."""
    vae = VAES[recipe.vae.name]
    patch = token_patch(recipe) if recipe.task == "denoiser" else (1, 1, 1)
    rule = LengthRule(stride=vae.strides[0], causal=vae.causal, patch=patch[0])
    return build_bucket_policy(recipe.data, stride=vae.strides[1] * patch[1], rule=rule)


def read_manifest(recipe: Recipe, where: Where | None = None) -> Manifest:
    """The clips of `data.manifest` or of all `data.sources`, their captions with the notes of `text.note`.

    `where` stands in for `data.where`.
    """
    data = recipe.data
    if data.sources:
        specs = [
            SourceSpec(Path(item.path), Path(item.root) if item.root else None, item.where, item.weight, item.repeat)
            for item in data.sources
        ]
    else:
        specs = [SourceSpec(Path(data.manifest or ""), Path(data.root) if data.root else None)]
    manifest = _retell(recipe, Manifest.read_sources(specs, where=data.where if where is None else where))
    note = recipe.text.note
    if note is None or recipe.task != "denoiser":
        return manifest
    policy = build_policy(recipe)
    notes = CaptionNotes.for_policy(policy, fps=note.fps, motion=note.motion, fps_max=data.fps_max)
    return note_captions(manifest, notes)


def _retell(recipe: Recipe, manifest: Manifest) -> Manifest:
    """Other captions, where the recipe has prompts or templates for all pictures."""
    word = recipe.inversion
    if recipe.dreambooth is not None:
        return with_class_images(manifest, recipe.dreambooth)
    if word is None or word.templates == "captions":
        return manifest
    file = Path(word.template_file) if word.template_file else None
    return retell(manifest, read_templates(word.templates, file, word.placeholder))


def build_clip_reader(
    recipe: Recipe, manifest: Manifest, policy: BucketPolicy, text: TextSource | None = None
) -> ClipReader:
    return ClipReader(manifest, policy, seed=recipe.seed, settings=read_settings(recipe), text=text)


def read_settings(recipe: Recipe) -> ReadSettings:
    data = recipe.data
    return ReadSettings(
        frame_start=data.frame_start,
        flip_probability=data.flip,
        transforms=parse_transforms(data.transforms),
        decoder=data.decoder,
        use_image_num=data.use_image_num,
        use_img_from_vid=data.use_img_from_vid,
        caption_choice=data.caption_choice,
        control=data.control,
    )


def build_plan(recipe: Recipe, manifest: Manifest, policy: BucketPolicy) -> Callable[[int], BatchPlan]:
    """The plan of an epoch as a function; the last two are kept, because both sides of an epoch's end are asked for."""

    @lru_cache(maxsize=2)
    def plan(epoch: int) -> BatchPlan:
        assignment = assign(manifest, policy, recipe.seed, epoch)
        if epoch == 0:
            _warn_of_unused(manifest, policy, assignment)
        made = order_epoch(recipe, policy, assignment, epoch, shown_rows(recipe, manifest, epoch))
        if made.num_microbatches == 0:
            raise DataError(
                f"{manifest.source}: no clip fits a bucket in epoch {epoch} "
                f"({count_unused(manifest, policy, assignment)}); add smaller sizes or shorter lengths to data.buckets"
            )
        return made

    return plan


def shown_rows(recipe: Recipe, manifest: Manifest, epoch: int) -> NDArray[np.int64] | None:
    """The rows of an epoch where sources have weights or repeats; None where every row comes once."""
    if all(part.share.is_plain for part in manifest.parts):
        return None
    return rows_of_epoch(manifest, recipe.seed, epoch)


def order_epoch(
    recipe: Recipe,
    policy: BucketPolicy,
    assignment: NDArray[np.int32],
    epoch: int,
    shown: NDArray[np.int64] | None = None,
) -> BatchPlan:
    """The plan of an epoch from the bucket of each row; the number of ranks has no part in it."""
    return plan_epoch(
        assignment,
        policy.batch_sizes,
        clip_costs(recipe, policy),
        seed=recipe.seed,
        epoch=epoch,
        accumulate=recipe.train.accumulate,
        alike=recipe.data.alike,
        drop_last=recipe.data.drop_last,
        shown=shown,
    )


def clip_costs(recipe: Recipe, policy: BucketPolicy) -> NDArray[np.float64]:
    """What one clip of each bucket costs: tokens for a denoiser, pixels for an autoencoder.

    With a token budget whose `attention` is known, tokens are counted as often as they take longer in a long clip.
    """
    if recipe.task != "denoiser":
        return policy.costs
    vae, patch = VAES[recipe.vae.name], token_patch(recipe)
    latent_frames = [max(1, (bucket.frames - vae.causal) // vae.strides[0] + vae.causal) for bucket in policy.buckets]
    areas = [bucket.height * bucket.width for bucket in policy.buckets]
    cell = vae.strides[1] * vae.strides[2] * patch[0] * patch[1] * patch[2]
    tokens = np.array(latent_frames, dtype=np.float64) * areas / cell
    budget = recipe.data.token_budget if recipe.data.policy == "token_budget" else None
    return tokens if budget is None or budget.attention is None else tokens * (1 + tokens / budget.attention)


def _warn_of_unused(manifest: Manifest, policy: BucketPolicy, assignment: NDArray[np.int32]) -> None:
    unused = {reason: count for reason, count in count_unused(manifest, policy, assignment).items() if count}
    if unused:
        _log.warning("%d of %d clips fit no bucket: %s", sum(unused.values()), len(manifest), unused)


def build_feed(recipe: Recipe, *, bad_clips: Path, shares: Shares | None = None, is_first: bool = True) -> Feed:
    """`shares` is the part of this process; of several, the first one writes the list of bad clips."""
    from frameloom.train.caching import open_caches

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


def _validation_source(recipe: Recipe, policy: BucketPolicy) -> Callable[[], list[Batch]]:
    """The same few held-out batches each time, read once and kept."""
    section = recipe.validation
    if section is None or not section.batches:
        return list
    # At once: told at the first validation, a mistake would cost the steps before it.
    try:
        manifest = read_manifest(recipe, where=section.where)
        plan = build_plan(recipe, manifest, policy)(0)
    except DataError as error:
        raise DataError(f"validation.where: {error}") from error

    @lru_cache(maxsize=1)
    def read() -> tuple[Batch, ...]:
        return tuple(islice(iterate_batches(plan, build_clip_reader(recipe, manifest, policy)), section.batches))

    return lambda: list(read())
