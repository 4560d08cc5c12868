"""Printing of a plan: a table for a terminal, and JSON."""

from __future__ import annotations

from functools import partial
from typing import Any

from frameloom.core.units import format_bytes, format_duration
from frameloom.planner.devices import BOX, LINK_SHARE, Device
from frameloom.planner.estimate import BucketPlan, RunPlan

_gib = partial(format_bytes, binary=True)


def describe_plan(plan: RunPlan, *, every_shape: bool = False) -> list[str]:
    """Lines for a terminal; of the shapes of a resolution and a length the most expensive stands for all."""
    device, mesh = plan.device, plan.mesh
    lines = [
        f"{_count(plan.size.weights)} weights, {_count(plan.size.trained)} of them train; {mesh.num_ranks} x "
        f"{device.name} with {device.describe_memory()}: replicate {mesh.replicate}, shard {mesh.shard}, "
        f"sequence {mesh.sequence}, zero {plan.zero}",
        "on each device before a batch: "
        + ", ".join(f"{name} {_gib(value)}" for name, value in vars(plan.resident).items() if value),
        "",
        f"{'bucket':<22}{'tokens':>9}{'batch':>7}{'activations':>13}{'total':>11}{'fits':>6}{'largest':>9}"
        f"{'PFLOP':>9}{'seconds':>9}{'encode':>8}{'wait':>8}",
    ]
    lines += [_row(item, plan.device.memory) for item in (plan.buckets if every_shape else _worst(plan.buckets))]
    lines += ["", _shares(plan.buckets), *_epoch(plan), f"a checkpoint is {_gib(plan.checkpoint)}"]
    lines.append(
        f"times: {device.efficiency:.0%} of {_rates(plan)} for products, {device.bandwidth_share:.0%} of "
        f"{device.bandwidth / 1e9:,.4g} GB/s for the rest; reading is not in them"
    )
    if plan.uncounted:
        lines.append(f"not counted: {', '.join(plan.uncounted)}")
    if mesh.num_ranks > 1:
        lines.append(_links(device, mesh.num_ranks))
    return lines


def _worst(buckets: list[BucketPlan]) -> list[BucketPlan]:
    worst: dict[tuple[str, int], BucketPlan] = {}
    for item in buckets:
        cell = item.bucket.resolution, item.bucket.frames
        worst[cell] = max(worst.get(cell, item), item, key=lambda one: one.total)
    return list(worst.values())


def _row(item: BucketPlan, memory: float) -> str:
    fits = "yes" if item.total <= memory else "NO"
    mark = "" if item.is_measured else "~"
    return (
        f"{item.bucket.name:<22}{item.tokens:>9,}{item.bucket.batch_size:>7}{mark + _gib(item.activations):>13}"
        f"{_gib(item.total):>11}{fits:>6}{item.largest_batch:>9}"
        f"{(item.flops + item.encode_flops) / 1e15:>9.3g}{item.seconds:>9.3g}{item.encode_seconds:>8.2g}"
        f"{item.wait_seconds:>8.2g}"
    )


def _shares(buckets: list[BucketPlan]) -> str:
    """What a step spends its time on, in the bucket where it takes longest."""
    item = max(buckets, key=lambda one: one.seconds)
    return (
        f"the longest step, {item.bucket.name}: {item.seconds:.3g} s; denoiser {item.denoise_seconds:.3g}, encoders "
        f"{item.encode_seconds:.3g}, waiting {item.wait_seconds:.3g} (sending takes {item.send_seconds:.3g})"
    )


def _rates(plan: RunPlan) -> str:
    """Those that were used, that of the denoiser first."""
    return " and ".join(
        f"{plan.device.rate(bf16=precision != 'fp32') / 1e12:,.4g} TFLOP/s ({precision})"
        for precision in plan.precisions
    )


def _links(device: Device, num_ranks: int) -> str:
    network = f", {device.network / 1e9:,.4g} GB/s out of a box of {BOX}" if num_ranks > BOX else ""
    return f"sending: {LINK_SHARE:.0%} of {device.link / 1e9:,.4g} GB/s{network}"


def _epoch(plan: RunPlan) -> list[str]:
    if plan.epoch is None:
        return []
    epoch = plan.epoch
    return [
        f"an epoch: {epoch.clips:,} clips, {epoch.steps:,} steps, {format_duration(epoch.seconds)}; the slowest device "
        f"has {epoch.imbalance:.2f} times the mean work of a step, {epoch.padding:.1%} of all turns only fill up a "
        f"step; latents cached: {_gib(epoch.cache_bytes)}"
    ]


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


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f}M" if number >= 10**6 else f"{number:,}"
