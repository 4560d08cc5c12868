"""Communication time: what devices spend on sending weights, gradients and tokens to each other.

zero 0 and 1 add gradients up after the last backward pass, so all of that is waited for. zero 2 and 3 gather the next
block and send gradients off while others are computed: they hide behind the passes as long as these take. Tokens of a
clip are exchanged in the middle of an attention, which waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from frameloom.config.schema.parallel import MeshShape
from frameloom.config.schema.recipe import Recipe
from frameloom.distributed.sequence_parallel import Exchange
from frameloom.planner.devices import Device
from frameloom.planner.memory import ModelSize, count_passes


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
