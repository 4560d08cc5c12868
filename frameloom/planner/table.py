"""Printing of a plan: a table for a terminal, and JSON."""

from __future__ import annotations

from functools import partial
from typing import Any

from frameloom.core.units import format_bytes, format_duration
from frameloom.planner.devices import BOX, LINK_SHARE
from frameloom.planner.estimate import BucketPlan, EpochPlan, RunPlan

_gib = partial(format_bytes, binary=True)


def format_plan(plan: RunPlan, *, every_shape: bool = False) -> list[str]:
    """Lines for a terminal; of the shapes of a resolution and a length the most expensive stands for all."""
    device, mesh, longest = plan.device, plan.mesh, max(plan.buckets, key=lambda one: one.seconds)
    worst: dict[tuple[str, int], BucketPlan] = {}
    for item in sorted(plan.buckets, key=lambda one: -one.total):
        worst.setdefault((item.bucket.resolution, item.bucket.frames), item)
    weights, trained = (
        f"{number / 1e6:,.1f}M" if number >= 10**6 else f"{number:,}"
        for number in (plan.size.weights, plan.size.trained)
    )
    # The rates that were used, that of the denoiser first.
    rates = " and ".join(
        f"{device.rate(bf16=precision != 'fp32') / 1e12:,.4g} TFLOP/s ({precision})" for precision in plan.precisions
    )
    lines = [
        f"{weights} weights, {trained} of them train; {mesh.num_ranks} x {device.name} with "
        f"{device.format_memory()}: replicate {mesh.replicate}, shard {mesh.shard}, sequence {mesh.sequence}, "
        f"zero {plan.zero}",
        "on each device before a batch: "
        + ", ".join(f"{name} {_gib(value)}" for name, value in vars(plan.resident).items() if value),
        "",
        f"{'bucket':<22}{'tokens':>9}{'batch':>7}{'activations':>13}{'total':>11}{'fits':>6}{'largest':>9}"
        f"{'PFLOP':>9}{'seconds':>9}{'encode':>8}{'wait':>8}",
        *(_row(item, device.memory) for item in plan.buckets if every_shape or item in worst.values()),
        "",
        f"the longest step, {longest.bucket.name}: {longest.seconds:.3g} s; denoiser {longest.denoise_seconds:.3g}, "
        f"encoders {longest.encode_seconds:.3g}, waiting {longest.wait_seconds:.3g} (sending takes "
        f"{longest.send_seconds:.3g})",
        *([] if plan.epoch is None else [_format_epoch(plan.epoch)]),
        f"a checkpoint is {_gib(plan.checkpoint)}",
        f"times: {device.efficiency:.0%} of {rates} for products, {device.bandwidth_share:.0%} of "
        f"{device.bandwidth / 1e9:,.4g} GB/s for the rest; reading is not in them",
    ]
    if plan.uncounted:
        lines.append(f"not counted: {', '.join(plan.uncounted)}")
    if mesh.num_ranks > 1:
        network = f", {device.network / 1e9:,.4g} GB/s out of a box of {BOX}" if mesh.num_ranks > BOX else ""
        lines.append(f"sending: {LINK_SHARE:.0%} of {device.link / 1e9:,.4g} GB/s{network}")
    return lines


def _row(item: BucketPlan, memory: float) -> str:
    fits = "yes" if item.total <= memory else "NO"
    mark = "" if item.is_measured else "~"
    return (
        f"{item.bucket.name:<22}{item.tokens:>9,}{item.bucket.batch_size:>7}{mark + _gib(item.activations):>13}"
        f"{_gib(item.total):>11}{fits:>6}{item.largest_batch:>9}"
        f"{(item.flops + item.encode_flops) / 1e15:>9.3g}{item.seconds:>9.3g}{item.encode_seconds:>8.2g}"
        f"{item.wait_seconds:>8.2g}"
    )


def _format_epoch(epoch: EpochPlan) -> str:
    return (
        f"an epoch: {epoch.clips:,} clips, {epoch.steps:,} steps, {format_duration(epoch.seconds)}; the slowest device "
        f"has {epoch.imbalance:.2f} times the mean work of a step, {epoch.padding:.1%} of all turns only fill up a "
        f"step; latents cached: {_gib(epoch.cache_bytes)}"
    )


def plan_json(plan: RunPlan) -> dict[str, Any]:
    return {
        "device": vars(plan.device),
        "mesh": {**vars(plan.mesh), "zero": plan.zero},
        "model": vars(plan.size),
        "resident_bytes": vars(plan.resident),
        "buckets": [
            {
                "name": item.bucket.name,
                "batch": item.bucket.batch_size,
                **{name: value for name, value in vars(item).items() if name != "bucket"},
                "seconds": item.seconds,
                "fits": item.total <= plan.device.memory,
            }
            for item in plan.buckets
        ],
        "checkpoint_bytes": plan.checkpoint,
        "not_counted": list(plan.uncounted),
        "epoch": None if plan.epoch is None else vars(plan.epoch),
    }
