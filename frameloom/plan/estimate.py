"""A recipe's costs on a number of devices: memory and time of every bucket, and of the whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from frameloom.config.parallel import MeshShape, fit_mesh
from frameloom.config.schema import Recipe
from frameloom.data.buckets import Bucket, BucketPolicy
from frameloom.plan.costs import Shape, StepCost, measure_costs
from frameloom.plan.devices import Device
from frameloom.plan.memory import ModelSize, Resident, checkpoint_bytes, rest_on_device
from frameloom.plan.parts import MetaParts, build_meta_parts
from frameloom.train.feed import build_plan, build_policy, read_manifest

_MOST_CLIPS = 2**20
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class BucketPlan:
    """A micro-batch of one bucket on one device; `largest_batch` 0 means that not even one clip fits."""

    bucket: Bucket
    tokens: int
    activations: float
    total: float
    flops: float
    seconds: float
    largest_batch: int
    is_measured: bool


@dataclass(frozen=True)
class EpochPlan:
    """What follows from the clips; `imbalance` is the slowest rank's work over the mean, averaged over steps."""

    clips: int
    steps: int
    seconds: float
    imbalance: float
    cache_bytes: float


@dataclass(frozen=True)
class RunPlan:
    device: Device
    mesh: MeshShape
    zero: int
    size: ModelSize
    resident: Resident
    buckets: list[BucketPlan]
    checkpoint: float
    epoch: EpochPlan | None

    @property
    def breaking(self) -> list[BucketPlan]:
        """Buckets that do not fit, the worst first."""
        over = [item for item in self.buckets if item.total > self.device.memory]
        return sorted(over, key=lambda item: -item.total)


@dataclass(frozen=True)
class Measured:
    """The models of a recipe in shapes, its buckets, and what a clip of each costs; sharding has no part in it."""

    parts: MetaParts
    policy: BucketPolicy
    shapes: Mapping[Bucket, Shape]
    costs: Mapping[Shape, StepCost]


def measure_recipe(recipe: Recipe) -> Measured:
    parts, policy = build_meta_parts(recipe), build_policy(recipe)
    shapes = {bucket: latent_shape(parts, bucket) for bucket in policy.buckets}
    costs = measure_costs(
        parts.family,
        parts.model,
        shapes.values(),
        latent_channels=parts.vae.latent_channels,
        text=parts.text,
        bf16=recipe.train.precision != "fp32",
    )
    return Measured(parts, policy, shapes, costs)


def plan_run(
    recipe: Recipe, device: Device, num_devices: int, *, with_data: bool = True, measured: Measured | None = None
) -> RunPlan:
    """The plan of a recipe as it stands; `measured` saves the measuring where only sharding or batches have changed."""
    found = measured or measure_recipe(recipe)
    mesh, zero = fit_mesh(recipe.parallel, num_devices), recipe.parallel.zero
    size = found.parts.size
    resident = rest_on_device(recipe, size, mesh, zero)
    buckets = [
        _plan_bucket(recipe, found.parts, bucket, shape, found.costs[shape], resident, device, mesh)
        # Their batch sizes are those of this recipe.
        for bucket, shape in zip(build_policy(recipe).buckets, found.shapes.values(), strict=True)
    ]
    epoch = _plan_epoch(recipe, found, buckets, mesh) if with_data else None
    return RunPlan(device, mesh, zero, size, resident, buckets, checkpoint_bytes(recipe, size), epoch)


def latent_shape(parts: MetaParts, bucket: Bucket) -> Shape:
    _, height, width = parts.vae.strides
    return parts.vae.latent_frames(bucket.frames), bucket.height // height, bucket.width // width


def _plan_bucket(
    recipe: Recipe,
    parts: MetaParts,
    bucket: Bucket,
    shape: Shape,
    cost: StepCost,
    resident: Resident,
    device: Device,
    mesh: MeshShape,
) -> BucketPlan:
    # Processes of a sequence group have a part of each clip's tokens.
    share = 1 / mesh.sequence
    batch, bf16 = bucket.batch_size, recipe.train.precision != "fp32"
    keeps = recipe.train.accumulate > 1
    resting = resident.total - resident.gradients
    transient = partial(cost.transient_bytes, gradients=resident.gradients, keeps_gradients=keeps)
    return BucketPlan(
        bucket=bucket,
        tokens=parts.family.num_tokens(parts.config, shape),
        activations=cost.activation_bytes(batch * share),
        total=resting + transient(batch * share),
        flops=batch * cost.flops,
        seconds=device.seconds(
            batch * cost.flops * share, cost.fixed_moved + batch * cost.moved_bytes * share, bf16=bf16
        ),
        largest_batch=_largest_batch(lambda count: resting + transient(count * share), device.memory),
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


def _plan_epoch(recipe: Recipe, measured: Measured, buckets: list[BucketPlan], mesh: MeshShape) -> EpochPlan:
    plan = build_plan(recipe, read_manifest(recipe), build_policy(recipe))(0)
    seconds = np.array([item.seconds for item in buckets])
    batch_sizes = np.array([item.bucket.batch_size for item in buckets])
    sizes = np.diff(plan.starts)
    # A last, smaller micro-batch costs its part.
    work = seconds[plan.buckets] * sizes / batch_sizes[plan.buckets]
    per_step = mesh.data * recipe.train.accumulate
    padded = np.pad(work, (0, -len(work) % per_step)).reshape(-1, recipe.train.accumulate, mesh.data).sum(axis=1)
    slowest, mean = padded.max(axis=1), padded.mean(axis=1)
    cells = np.array([np.prod(shape) for shape in measured.shapes.values()]) * measured.parts.vae.latent_channels
    stored = 2 if recipe.data.cache.store == "moments" else 1
    return EpochPlan(
        clips=plan.num_samples,
        steps=len(padded),
        seconds=float(slowest.sum()),
        imbalance=float((slowest / mean).mean()),
        cache_bytes=float((cells[plan.buckets] * sizes).sum() * stored * _BYTES[recipe.data.cache.precision]),
    )
