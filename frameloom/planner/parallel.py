"""What parallel training leaves on each device between steps, and what devices send to each other.

zero 0 and 1 add gradients up after the last backward pass, so all of that is waited for. zero 2 and 3 gather the next
block and send gradients off while others are computed: they hide behind the passes as long as these take. Tokens of a
clip are exchanged in the middle of an attention, which waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from frameloom.config.schema.parallel import MeshShape, step_shares
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError
from frameloom.distributed.sequence_parallel import Exchange
from frameloom.planner.devices import Device

# Of each weight that trains: AdamW keeps two numbers, the 8-bit one two bytes and a scale for each block of 256.
_OPTIMIZER_BYTES = {
    "adamw": 8.0,
    "adamw8bit": 2.03,
    "came": 4.1,
    "adafactor": 0.1,
    "lion": 4.0,
    "prodigy": 16.0,
    "muon": 4.5,
}


@dataclass(frozen=True)
class ModelSize:
    """Weights of the denoiser, those of them that train and those of its largest block; and bytes.

    `weight_bytes` are those of the model, `master_bytes` those of the fp32 copies of half-precision weights that train,
    `saved_bytes` those of the weights that a checkpoint holds; the others are of the frozen parts.
    """

    weights: int
    trained: int
    largest_block: int
    weight_bytes: float
    master_bytes: float
    saved_bytes: float
    vae_bytes: float
    text_bytes: float


@dataclass(frozen=True)
class Resident:
    """Bytes by kind on one device."""

    weights: float
    gradients: float
    optimizer: float
    ema: float
    vae: float
    text: float

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


def count_passes(recipe: Recipe, mesh: MeshShape) -> int:
    """Micro-batches that a device runs in a step."""
    return -(-step_shares(recipe.parallel, mesh) * recipe.train.accumulate // mesh.data)


def rest_on_device(recipe: Recipe, size: ModelSize, mesh: MeshShape, *, parks: bool = False) -> Resident:
    """What a device holds while a step runs, activations apart; encoders are not on it all the time if it `parks` them.

    zero 1 splits the optimizer's state and zero 2 the gradients too; zero 3 keeps a part of the weights and gathers
    two blocks at a time. From zero 2 on, devices that share a clip hold different parts, too.
    """
    if recipe.optim.name not in _OPTIMIZER_BYTES:
        raise ConfigError(f"optim.name: the planner does not know the state of '{recipe.optim.name}'")
    zero = recipe.parallel.zero
    parts = mesh.shard * (mesh.sequence if zero >= 2 else 1)
    weights, gradients = size.weight_bytes, 4.0 * size.trained
    optimizer = _OPTIMIZER_BYTES[recipe.optim.name] * size.trained
    ema = 4.0 * size.trained if recipe.train.ema is not None and not recipe.train.ema.on_cpu else 0.0
    if zero >= 1:
        optimizer /= parts
    if recipe.optim.offload:
        # It visits the device in parts while weights are moved, when activations are gone.
        optimizer = 0.0
    if zero >= 2 and parts > 1:
        gathered = weights if zero == 2 else 4.0 * min(2 * size.largest_block, size.weights)
        weights = weights / parts + gathered
        if count_passes(recipe, mesh) == 1:
            # Of several passes the last one sends them, and until then they are whole.
            gradients = gradients / parts + 4.0 * min(size.largest_block, size.trained)
        ema /= parts
    text_parts = {"shard": mesh.num_ranks, "tensor": recipe.parallel.tensor}.get(recipe.parallel.encoders, 1)
    vae, text = (0.0, 0.0) if parks else (size.vae_bytes, size.text_bytes / text_parts)
    return Resident(weights + size.master_bytes, gradients, optimizer, ema, vae, text)


def checkpoint_bytes(recipe: Recipe, size: ModelSize) -> float:
    """One checkpoint on disk: all weights (or adapters); of those that train the optimizer's state and the average."""
    ema = 4.0 if recipe.train.ema is not None else 0.0
    return size.saved_bytes + size.master_bytes + size.trained * (_OPTIMIZER_BYTES[recipe.optim.name] + ema)


@dataclass(frozen=True)
class SendPlan:
    """Of a micro-batch, in seconds: sending that may hide behind the passes, and sending that cannot."""

    hidden: float = 0.0
    exposed: float = 0.0

    def waited(self, compute_seconds: float) -> float:
        """What is left to wait for, behind passes that take so long."""
        return self.exposed + max(0.0, self.hidden - compute_seconds)


def plan_weights(recipe: Recipe, size: ModelSize, mesh: MeshShape, device: Device) -> SendPlan:
    """Weights and gradients. What is sent once a step is shared by its micro-batches."""
    zero, once = recipe.parallel.zero, 1 / count_passes(recipe, mesh)
    if mesh.num_ranks == 1:
        return SendPlan()
    gradients = 4.0 * size.trained
    if zero < 2:
        added_up = device.send_seconds(2 * _sent(gradients, mesh.num_ranks), members=mesh.num_ranks)
        handed_out = device.send_seconds(_sent(gradients, mesh.shard), members=mesh.shard, stride=mesh.sequence)
        return SendPlan(exposed=once * (added_up + (handed_out if zero == 1 else 0.0)))
    parts = mesh.shard * mesh.sequence
    number_bytes = 2.0 if recipe.parallel.gather == "bf16" else 4.0
    gathered = device.send_seconds(_sent(number_bytes * size.weights, parts), members=parts)
    scattered = device.send_seconds(_sent(gradients, parts), members=parts)
    copied = device.send_seconds(
        2 * _sent(gradients / parts, mesh.replicate), members=mesh.replicate, stride=parts if mesh.replicate > 1 else 1
    )
    # zero 3 gathers forward and backward, and blocks that are recomputed are there then; zero 2 keeps what it has.
    num_gathers = once if zero == 2 else 2.0
    return SendPlan(hidden=num_gathers * gathered + once * (scattered + copied))


def plan_tokens(
    exchanges: Iterable[Exchange], batch: int, degree: int, device: Device, *, number_bytes: int, recomputes: bool
) -> SendPlan:
    """Of the sequence group's exchanges: forward, backward, and forward again where blocks are recomputed."""
    sent = sum(one.sent_bytes(degree, batch=batch, number_bytes=number_bytes) for one in exchanges)
    return SendPlan(exposed=device.send_seconds((3 if recomputes else 2) * sent, members=degree))


def _sent(num_bytes: float, members: int) -> float:
    """By each member of a ring that gathers, or adds up and scatters, so many bytes."""
    return num_bytes * (members - 1) / members
