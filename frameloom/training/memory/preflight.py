"""Preflight before the first step: the largest micro-batch of each bucket runs once, forward and backward.

A bucket that does not fit in memory is halved in the first minute. The run is unchanged: gradients are dropped before
an optimizer sees them, draws are keyed, and the order of the data is a function. The optimizer's state is in memory
already. One clip of a bucket is read and stands for its whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from frameloom.core.logging import get_logger
from frameloom.core.units import format_bytes
from frameloom.data.loading.batch import Batch
from frameloom.data.loading.loader import read_requests, request_at
from frameloom.data.order.plan import BatchPlan
from frameloom.training.feed import Feed
from frameloom.training.loop import Trainer
from frameloom.training.memory.oom_split import cut_batch, take_rows
from frameloom.training.step import Stepper

_log = get_logger(__name__)
_NUM_TRIES = 100


def run_preflight(trainer: Trainer) -> None:
    """Try every bucket of the trainer's epoch, the most expensive ones first, if its recipe asks for it; all ranks do
    the same."""
    settings, stepper, feed = trainer.recipe.train, trainer.stepper, trainer.feed
    if not (feed.device.type == "cuda" if settings.preflight == "auto" else settings.preflight):
        return
    plan, assignment = feed.plan(trainer.epoch), feed.assignment
    sizes = np.diff(plan.starts)
    # The first of the largest micro-batches of each bucket.
    order = np.lexsort((-sizes, plan.buckets))
    buckets, firsts = np.unique(plan.buckets[order], return_index=True)
    largest = dict(zip(buckets.tolist(), order[firsts].tolist(), strict=True))
    adds_up = settings.accumulate * assignment.num_shares > assignment.num_ranks
    with torch.random.fork_rng(devices=[feed.device] if feed.device.type == "cuda" else []):
        for batch in _read_clips(feed, plan, largest):
            # A file may be missing on one machine only; all ranks skip the bucket then.
            if not all(stepper.parallel.context.all_gather(batch.size > 0)):
                _log.warning("preflight: no clip of bucket %s can be read, so it is left out", batch.bucket.name)
                continue
            whole = take_rows(batch, np.zeros(sizes[largest[batch.bucket.index]], dtype=np.int64))
            # With a number for which an autoencoder does not take the clips for images.
            whole = max((replace(whole, index=number) for number in range(_NUM_TRIES)), key=trainer.task.count_tokens)
            _try_bucket(stepper, whole, adds_up=adds_up)


def _read_clips(feed: Feed, plan: BatchPlan, chosen: Mapping[int, int]) -> Iterator[Batch]:
    """One clip of the chosen micro-batch of each bucket; those of most pixels come first."""
    sizes, requests = np.diff(plan.starts), []
    pixels = {bucket: feed.policy.buckets[bucket].num_pixels * int(sizes[chosen[bucket]]) for bucket in chosen}
    for bucket in sorted(chosen, key=lambda bucket: (-pixels[bucket], bucket)):
        whole = request_at(plan, chosen[bucket])
        fallback_rows = None if whole.fallback_rows is None else whole.fallback_rows[:1]
        rows, indices = whole.rows[:1], whole.sample_indices[:1]
        requests.append(replace(whole, rows=rows, sample_indices=indices, fallback_rows=fallback_rows))
    return read_requests(
        iter(requests),
        feed.reader,
        workers=min(feed.workers, 1),
        quarantine=feed.bad_clips.quarantine,
    )


def _try_bucket(stepper: Stepper, batch: Batch, *, adds_up: bool) -> None:
    """Halve until it fits. Where a step has several passes, the second one runs beside the gradients of the first."""
    limits, name, context = stepper.limits, batch.bucket.name, stepper.parallel.context
    device = stepper.parallel.device
    is_cuda = device.type == "cuda"
    while True:
        pieces = cut_batch(batch, limits.count_pieces(name, batch.size))
        if adds_up and len(pieces) == 1:
            pieces = pieces * 2
        if is_cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        events = context.all_gather(stepper.try_out(pieces[:2]))
        if is_cuda:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        found = [event for event in events if event is not None]
        if not found:
            peaks = context.all_gather(torch.cuda.max_memory_allocated(device) if is_cuda else None)
            most = max((peak for peak in peaks if peak is not None), default=None)
            at_once = f", {pieces[0].size} at once" if pieces[0].size < batch.size else ""
            peak = "" if most is None else f", at most {format_bytes(most)} of memory"
            _log.info("preflight: bucket %s, batch %d%s: %.2f s%s", name, batch.size, at_once, seconds, peak)
            return
        limits.halve(found, step=0)
