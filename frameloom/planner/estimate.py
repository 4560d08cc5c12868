"""The plan of a recipe on a number of devices: memory and time of every bucket and of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from frameloom.builders.data import build_plan, build_policy, read_manifest
from frameloom.builders.vae import encode_policy
from frameloom.config.rules.parallel import check_world
from frameloom.config.schema.parallel import MeshShape, step_shares
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import DataError
from frameloom.data.buckets.policy import Bucket
from frameloom.models.precision import DTYPES
from frameloom.models.registry import VAES
from frameloom.planner.costs import MetaDenoiser, Shape, StepCost, count_cells, measure_costs
from frameloom.planner.devices import BOX, Device
from frameloom.planner.encoders import (
    CaptionCost,
    EncodePlan,
    PixelEncoder,
    measure_encoder,
    plan_captions,
)
from frameloom.planner.forked_task import forked_task
from frameloom.planner.models import (
    build_meta_denoiser,
    build_meta_vae,
    list_caption_costs,
    list_precisions,
    list_uncounted,
    measure_size,
)
from frameloom.planner.parallel import (
    ModelSize,
    Resident,
    SendPlan,
    checkpoint_bytes,
    count_passes,
    plan_tokens,
    plan_weights,
    rest_on_device,
)

_MOST_CLIPS = 2**20


@dataclass(frozen=True)
class BucketPlan:
    """A micro-batch of one bucket on one device; `largest_batch` 0 means that not even one clip fits.

    `activations` are those of the denoiser or of the frozen encoders, with their weights where these are parked,
    whichever are more. Seconds are what the denoiser takes, what the encoders take before it, and what is waited for
    other devices.
    """

    bucket: Bucket
    tokens: int
    activations: float
    total: float
    flops: float
    encode_flops: float
    denoise_seconds: float
    encode_seconds: float
    wait_seconds: float
    send_seconds: float
    largest_batch: int
    is_measured: bool

    @property
    def seconds(self) -> float:
        return self.denoise_seconds + self.encode_seconds + self.wait_seconds


@dataclass(frozen=True)
class EpochPlan:
    """What follows from the clips; `imbalance` is the slowest rank's work over the mean, averaged over steps.

    Clips of a micro-batch have one shape, so none is padded; `padding` is the share of all turns of all devices that
    only fill up a step.
    """

    clips: int
    steps: int
    seconds: float
    imbalance: float
    padding: float
    cache_bytes: float


@dataclass(frozen=True)
class RunPlan:
    """`precisions` are those of the products that take time; `uncounted` are keys of the recipe that are left out."""

    device: Device
    mesh: MeshShape
    zero: int
    size: ModelSize
    resident: Resident
    buckets: list[BucketPlan]
    checkpoint: float
    epoch: EpochPlan | None
    precisions: Sequence[str]
    uncounted: Sequence[str]

    @property
    def breaking(self) -> list[BucketPlan]:
        """Buckets that do not fit, the worst first."""
        over = [item for item in self.buckets if item.total > self.device.memory]
        return sorted(over, key=lambda item: -item.total)


@dataclass(frozen=True)
class Measured:
    """The models of a recipe in shapes, and what clips of its buckets cost; sharding has no part in it.

    `pixels` is None and `captions` are empty where a cache stands in for the encoders.
    """

    denoiser: MetaDenoiser
    size: ModelSize
    costs: Mapping[Shape, StepCost]
    pixels: PixelEncoder | None
    captions: Sequence[CaptionCost]


def measure_recipe(recipe: Recipe) -> Measured:
    denoiser = build_meta_denoiser(recipe)
    shapes = [(bucket.frames, bucket.height, bucket.width) for bucket in build_policy(recipe).buckets]

    def measure_encoders() -> tuple[ModelSize, PixelEncoder | None, Sequence[CaptionCost]]:
        vae, pixels = build_meta_vae(recipe), None
        size = measure_size(recipe, denoiser, vae)
        if recipe.data.cache.latents is None:
            pixels = measure_encoder(
                vae,
                shapes,
                policy=encode_policy(recipe.vae),
                times=1 if denoiser.config.condition == "none" else 2,
            )
        return size, pixels, list_caption_costs(recipe, denoiser.family.text_join)

    # Some encoders take seconds to import.
    with forked_task(measure_encoders) as wait_for_encoders:
        costs = _measure_passes(recipe, denoiser)
        size, pixels, captions = wait_for_encoders()
    return Measured(denoiser, size, costs, pixels, captions)


def measure_recomputed(recipe: Recipe, before: Measured) -> Measured:
    """For a recipe that has all blocks recomputed now, and nothing else changed."""
    denoiser = build_meta_denoiser(recipe)
    return replace(before, denoiser=denoiser, costs=_measure_passes(recipe, denoiser, with_alone=False))


def _measure_passes(recipe: Recipe, denoiser: MetaDenoiser, *, with_alone: bool = True) -> dict[Shape, StepCost]:
    shapes = [_latent_shape(recipe, bucket) for bucket in build_policy(recipe).buckets]
    return measure_costs(denoiser, shapes, bf16=recipe.train.precision != "fp32", with_alone=with_alone)


def _latent_shape(recipe: Recipe, bucket: Bucket) -> Shape:
    return VAES[recipe.vae.name].latent_shape(bucket.frames, bucket.height, bucket.width)


def plan_run(
    recipe: Recipe, device: Device, num_devices: int, *, with_data: bool = True, measured: Measured | None = None
) -> RunPlan:
    """The plan of a recipe as it stands; `measured` saves the measuring where only sharding or batches have changed."""
    found = measured or measure_recipe(recipe)
    device, mesh = device.limit(recipe.train.max_device_memory), check_world(recipe, num_devices)
    # A new word learns through the text encoders, so they stay on the device.
    parks = recipe.train.encoder_offload and device.name != "cpu" and recipe.inversion is None
    resident = rest_on_device(recipe, found.size, mesh, parks=parks)
    buckets = [
        _plan_bucket(recipe, found, resident, device, mesh, bucket, parks=parks)
        for bucket in build_policy(recipe).buckets
    ]
    return RunPlan(
        device=device,
        mesh=mesh,
        zero=recipe.parallel.zero,
        size=found.size,
        resident=resident,
        buckets=buckets,
        checkpoint=checkpoint_bytes(recipe, found.size),
        epoch=_plan_epoch(recipe, found.denoiser, buckets, mesh) if with_data else None,
        precisions=list_precisions(recipe),
        uncounted=list_uncounted(recipe),
    )


def _plan_bucket(
    recipe: Recipe,
    measured: Measured,
    resident: Resident,
    device: Device,
    mesh: MeshShape,
    bucket: Bucket,
    *,
    parks: bool,
) -> BucketPlan:
    """Ranks of a sequence group have a part of each clip's tokens, but all of them encode the whole clips."""
    denoiser, batch, gradients = measured.denoiser, bucket.batch_size, resident.gradients
    shape = _latent_shape(recipe, bucket)
    cost = measured.costs[shape]
    is_half, keeps_gradients = recipe.train.precision != "fp32", count_passes(recipe, mesh) > 1
    # With `once` a device encodes the captions of its whole box.
    captions_for = max(1, min(BOX, mesh.num_ranks) // mesh.sequence) if recipe.parallel.encoders == "once" else 1

    def encode(clips: int) -> EncodePlan:
        latents = EncodePlan()
        if measured.pixels is not None:
            pixels = (bucket.frames, bucket.height, bucket.width)
            latents = measured.pixels.plan(clips, pixels, count_cells(shape), device)
            if parks:
                latents = replace(latents, peak_bytes=latents.peak_bytes + measured.size.vae_bytes)
        return latents.followed_by(plan_captions(measured.captions, clips * captions_for, device, visiting=parks))

    def total(clips: int) -> float:
        """Bytes at the worst moment: while the encoders run, or in a pass of the denoiser."""
        part = clips / mesh.sequence
        if measured.size.master_bytes:
            # Gradients of the pass are in half precision; they are added to those of the fp32 copies when it is over.
            own = cost.transient_bytes(part, gradients / 2)
            passing = gradients + own if keeps_gradients else max(gradients, own)
        else:
            passing = cost.transient_bytes(part, gradients, keeps_gradients=keeps_gradients)
        encoding = encode(clips).peak_bytes + (gradients if keeps_gradients else 0.0)
        return resident.total - gradients + max(passing, encoding)

    part, encoded = batch / mesh.sequence, encode(batch)
    seconds = device.seconds(part * cost.flops, cost.fixed_moved + part * cost.moved_bytes, bf16=is_half)
    weights, tokens = plan_weights(recipe, measured.size, mesh, device), SendPlan()
    if mesh.sequence > 1:
        exchanges = denoiser.family.model.exchanges(denoiser.config, shape, denoiser.text.tokens, mesh.sequence)
        tokens = plan_tokens(
            *(exchanges, batch, mesh.sequence, device),
            number_bytes=2 if is_half else 4,
            recomputes=bool(recipe.train.recompute),
        )
    return BucketPlan(
        bucket=bucket,
        tokens=denoiser.config.num_tokens(shape),
        activations=max(cost.activation_bytes(part), encoded.peak_bytes),
        total=total(batch),
        flops=batch * cost.flops,
        encode_flops=encoded.flops,
        denoise_seconds=seconds,
        encode_seconds=encoded.seconds,
        wait_seconds=weights.waited(seconds) + tokens.exposed,
        send_seconds=weights.hidden + weights.exposed + tokens.exposed,
        largest_batch=_largest_batch(total, device.memory),
        is_measured=cost.is_measured,
    )


def _largest_batch(total: Callable[[int], float], memory: float) -> int:
    """The largest number of clips whose total fits; totals do not fall as clips are added."""
    if total(1) > memory:
        return 0
    low, high = 1, 2
    while total(high) <= memory and high < _MOST_CLIPS:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= memory else (low, middle)
    return low


def refuse_missing_manifest(recipe: Recipe) -> None:
    """DataError before the passes, which take longer than a look for the file."""
    manifest = recipe.data.manifest
    if manifest and not recipe.data.sources and not Path(manifest).exists():
        raise DataError(
            f"{manifest}: no such file; make it (docs/getting-started.md shows how), or add --no-data to plan "
            "without steps and time of an epoch"
        )


def _plan_epoch(recipe: Recipe, denoiser: MetaDenoiser, buckets: list[BucketPlan], mesh: MeshShape) -> EpochPlan:
    plan = build_plan(recipe, read_manifest(recipe), build_policy(recipe))(0)
    seconds = np.array([item.seconds for item in buckets])
    batch_sizes = np.array([item.bucket.batch_size for item in buckets])
    sizes = np.diff(plan.starts)
    # A last, smaller micro-batch costs its part.
    work = seconds[plan.buckets] * sizes / batch_sizes[plan.buckets]
    # As the trainer deals micro-batches: the next `per_step` are a step, in rounds over the devices.
    per_step, num_ranks = step_shares(recipe.parallel, mesh) * recipe.train.accumulate, mesh.data
    steps = np.pad(work, (0, -len(work) % per_step)).reshape(-1, per_step)
    rounds = np.pad(steps, ((0, 0), (0, -per_step % num_ranks))).reshape(len(steps), -1, num_ranks)
    by_rank = rounds.sum(axis=1)
    whole, rest = divmod(len(work), per_step)
    num_fillers = whole * (-per_step % num_ranks) + -rest % num_ranks
    slowest, mean = by_rank.max(axis=1), by_rank.mean(axis=1)
    cells = np.array([count_cells(_latent_shape(recipe, item.bucket)) for item in buckets]) * denoiser.latent_channels
    stored = 2 if recipe.data.cache.store == "moments" else 1
    return EpochPlan(
        clips=plan.num_samples,
        steps=len(by_rank),
        seconds=float(slowest.sum()),
        imbalance=float((slowest / mean).mean()),
        padding=num_fillers / (len(work) + num_fillers),
        cache_bytes=float((cells[plan.buckets] * sizes).sum() * stored * DTYPES[recipe.data.cache.precision].itemsize),
    )
