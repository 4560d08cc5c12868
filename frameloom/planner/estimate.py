"""The plan of a recipe on a number of devices: memory and time of every bucket and of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from frameloom.builders.data import build_plan, build_policy, read_manifest
from frameloom.builders.vae import encode_policy
from frameloom.config.rules.parallel import check_world
from frameloom.config.schema.parallel import MeshShape, step_shares
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import DataError
from frameloom.data.buckets.policy import Bucket
from frameloom.models.precision import DTYPES
from frameloom.models.vaes.base import VideoVAE
from frameloom.planner.communication import SendPlan, plan_tokens, plan_weights
from frameloom.planner.costs import Shape, StepCost, count_cells, measure_costs
from frameloom.planner.devices import BOX, Device
from frameloom.planner.encoders import (
    CaptionCost,
    EncodePlan,
    PixelEncoder,
    join_plans,
    measure_encoder,
    plan_captions,
)
from frameloom.planner.forked_task import ForkedTask, can_fork
from frameloom.planner.memory import ModelSize, Resident, checkpoint_bytes, count_passes, rest_on_device
from frameloom.planner.models import (
    MetaDenoiser,
    build_meta_denoiser,
    build_meta_vae,
    list_caption_costs,
    list_precisions,
    list_uncounted,
    measure_size,
)

Floats = NDArray[np.float64]
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
    # Some encoders take seconds to import.
    with ForkedTask(lambda: _measure_encoders(recipe, denoiser), is_apart=can_fork()) as encoders:
        costs = _measure_passes(recipe, denoiser)
        size, pixels, captions = encoders.result()
        return Measured(denoiser, size, costs, pixels, captions)


def _measure_encoders(
    recipe: Recipe, denoiser: MetaDenoiser
) -> tuple[ModelSize, PixelEncoder | None, Sequence[CaptionCost]]:
    vae = build_meta_vae(recipe)
    size = measure_size(recipe, denoiser, vae)
    pixels = _measure_pixels(recipe, denoiser, vae, build_policy(recipe).buckets)
    return size, pixels, list_caption_costs(recipe, denoiser.family.text_join)


def measure_recomputed(recipe: Recipe, before: Measured) -> Measured:
    """For a recipe that has all blocks recomputed now, and nothing else changed."""
    denoiser = build_meta_denoiser(recipe)
    return replace(before, denoiser=denoiser, costs=_measure_passes(recipe, denoiser, with_alone=False))


def _measure_passes(recipe: Recipe, denoiser: MetaDenoiser, *, with_alone: bool = True) -> dict[Shape, StepCost]:
    return measure_costs(
        denoiser.family,
        denoiser.model,
        [denoiser.latent_shape(bucket) for bucket in build_policy(recipe).buckets],
        latent_channels=denoiser.latent_channels,
        text=denoiser.text,
        bf16=recipe.train.precision != "fp32",
        with_alone=with_alone,
    )


def _measure_pixels(
    recipe: Recipe, denoiser: MetaDenoiser, vae: VideoVAE, buckets: Iterable[Bucket]
) -> PixelEncoder | None:
    if recipe.data.cache.latents is not None:
        return None
    return measure_encoder(
        vae,
        [pixel_shape(bucket) for bucket in buckets],
        policy=encode_policy(recipe.vae),
        times=1 if denoiser.family.beside(denoiser.config) == "none" else 2,
    )


def plan_run(
    recipe: Recipe, device: Device, num_devices: int, *, with_data: bool = True, measured: Measured | None = None
) -> RunPlan:
    """The plan of a recipe as it stands; `measured` saves the measuring where only sharding or batches have changed."""
    found = measured or measure_recipe(recipe)
    device, mesh, size = device.limit(recipe.train.max_device_memory), check_world(recipe, num_devices), found.size
    resident = rest_on_device(recipe, size, mesh, recipe.parallel.zero, parks=_parks(recipe, device))
    planner = _BucketPlanner(recipe, found, resident, device, mesh)
    buckets = [planner.plan(bucket) for bucket in build_policy(recipe).buckets]
    epoch = _plan_epoch(recipe, found.denoiser, buckets, mesh) if with_data else None
    return RunPlan(
        device=device,
        mesh=mesh,
        zero=recipe.parallel.zero,
        size=size,
        resident=resident,
        buckets=buckets,
        checkpoint=checkpoint_bytes(recipe, size),
        epoch=epoch,
        precisions=list_precisions(recipe),
        uncounted=list_uncounted(recipe),
    )


def _parks(recipe: Recipe, device: Device) -> bool:
    """Whether encoders are on the device only while they run; a new word learns through them, so they stay."""
    return recipe.train.park_encoders and device.name != "cpu" and recipe.inversion is None


def pixel_shape(bucket: Bucket) -> Shape:
    return bucket.frames, bucket.height, bucket.width


@dataclass(frozen=True)
class _BucketPlanner:
    """What is the same for all buckets of a plan."""

    recipe: Recipe
    measured: Measured
    resident: Resident
    device: Device
    mesh: MeshShape

    @property
    def is_half(self) -> bool:
        return self.recipe.train.precision != "fp32"

    def plan(self, bucket: Bucket) -> BucketPlan:
        denoiser, batch = self.measured.denoiser, bucket.batch_size
        shape = denoiser.latent_shape(bucket)
        cost, encode = self.measured.costs[shape], self.encode(bucket, batch)
        seconds = self.denoise_seconds(cost, batch)
        weights, tokens = self.send_weights, self.send_tokens(shape, batch)
        return BucketPlan(
            bucket=bucket,
            tokens=denoiser.family.num_tokens(denoiser.config, shape),
            activations=max(cost.activation_bytes(batch / self.mesh.sequence), encode.peak_bytes),
            total=self.total(bucket, cost, batch),
            flops=batch * cost.flops,
            encode_flops=encode.flops,
            denoise_seconds=seconds,
            encode_seconds=encode.seconds,
            wait_seconds=weights.waited(seconds) + tokens.exposed,
            send_seconds=weights.hidden + weights.exposed + tokens.exposed,
            largest_batch=_largest_batch(lambda count: self.total(bucket, cost, count), self.device.memory),
            is_measured=cost.is_measured,
        )

    def denoise_seconds(self, cost: StepCost, batch: int) -> float:
        # Processes of a sequence group have a part of each clip's tokens.
        clips = batch / self.mesh.sequence
        return self.device.seconds(clips * cost.flops, cost.fixed_moved + clips * cost.moved_bytes, bf16=self.is_half)

    def total(self, bucket: Bucket, cost: StepCost, batch: int) -> float:
        """Bytes at the worst moment: while the encoders run, or in a pass of the denoiser."""
        gradients = self.resident.gradients
        encoding = self.encode(bucket, batch).peak_bytes + (gradients if self.keeps_gradients else 0.0)
        return self.resident.total - gradients + max(self.transient(cost, batch / self.mesh.sequence), encoding)

    def transient(self, cost: StepCost, clips: float) -> float:
        """Bytes of a pass beside the weights, with all gradients."""
        gradients = self.resident.gradients
        if not self.measured.size.master_bytes:
            return cost.transient_bytes(clips, gradients, keeps_gradients=self.keeps_gradients)
        # Those of the pass are in half precision; they are added to those of the fp32 copies when it is over.
        own = cost.transient_bytes(clips, gradients / 2)
        return gradients + own if self.keeps_gradients else max(gradients, own)

    @property
    def keeps_gradients(self) -> bool:
        return count_passes(self.recipe, self.mesh) > 1

    def encode(self, bucket: Bucket, batch: int) -> EncodePlan:
        """Processes of a sequence group all encode the whole clips."""
        pixels, parks = self.measured.pixels, _parks(self.recipe, self.device)
        latents = EncodePlan()
        if pixels is not None:
            num_cells = count_cells(self.measured.denoiser.latent_shape(bucket))
            latents = pixels.plan(batch, pixel_shape(bucket), num_cells, self.device)
            if parks:
                latents = replace(latents, peak_bytes=latents.peak_bytes + self.measured.size.vae_bytes)
        num_captions = batch * self.captions_for
        captions = plan_captions(self.measured.captions, num_captions, self.device, visiting=parks)
        return join_plans(latents, captions)

    @property
    def captions_for(self) -> int:
        """For how many micro-batches a device encodes captions: those of its box, where it does so for all."""
        if self.recipe.parallel.encoders != "once":
            return 1
        return max(1, min(BOX, self.mesh.num_ranks) // self.mesh.sequence)

    @cached_property
    def send_weights(self) -> SendPlan:
        return plan_weights(self.recipe, self.measured.size, self.mesh, self.device)

    def send_tokens(self, shape: Shape, batch: int) -> SendPlan:
        denoiser, degree = self.measured.denoiser, self.mesh.sequence
        if degree == 1:
            return SendPlan()
        exchanges = denoiser.family.exchanges(denoiser.config, shape, denoiser.text.tokens, degree)
        number_bytes, recomputes = 2 if self.is_half else 4, bool(self.recipe.train.recompute)
        return plan_tokens(exchanges, batch, degree, self.device, number_bytes=number_bytes, recomputes=recomputes)


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
    by_rank, num_fillers = _deal(work, step_shares(recipe.parallel, mesh) * recipe.train.accumulate, mesh.data)
    slowest, mean = by_rank.max(axis=1), by_rank.mean(axis=1)
    cells = np.array([count_cells(denoiser.latent_shape(item.bucket)) for item in buckets]) * denoiser.latent_channels
    stored = 2 if recipe.data.cache.store == "moments" else 1
    return EpochPlan(
        clips=plan.num_samples,
        steps=len(by_rank),
        seconds=float(slowest.sum()),
        imbalance=float((slowest / mean).mean()),
        padding=num_fillers / (len(work) + num_fillers),
        cache_bytes=float((cells[plan.buckets] * sizes).sum() * stored * DTYPES[recipe.data.cache.precision].itemsize),
    )


def _deal(work: Floats, per_step: int, num_ranks: int) -> tuple[Floats, int]:
    """Work of each device in each step, [steps, devices], and how many turns have none.

    As the trainer deals micro-batches: the next `per_step` are a step, in rounds over the devices.
    """
    steps = np.pad(work, (0, -len(work) % per_step)).reshape(-1, per_step)
    rounds = np.pad(steps, ((0, 0), (0, -per_step % num_ranks))).reshape(len(steps), -1, num_ranks)
    whole, rest = divmod(len(work), per_step)
    return rounds.sum(axis=1), whole * (-per_step % num_ranks) + -rest % num_ranks
