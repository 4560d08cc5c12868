"""Bytes that rest on a device between steps, by what they are for, under a recipe's sharding."""

from __future__ import annotations

from dataclasses import dataclass

from frameloom.config.parallel import MeshShape
from frameloom.config.schema import Recipe
from frameloom.core.errors import ConfigError

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
    """Weights of the denoiser, those of them that train, those of its largest block, and those of the frozen parts."""

    weights: int
    trained: int
    largest_block: int
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


def rest_on_device(recipe: Recipe, size: ModelSize, mesh: MeshShape, zero: int) -> Resident:
    """What a device holds while a step runs, activations apart.

    zero 1 splits the optimizer's state and zero 2 the gradients too; zero 3 keeps a part of the weights and gathers
    two blocks at a time. From zero 2 on, devices that share a clip hold different parts, too.
    """
    if recipe.optim.name not in _OPTIMIZER_BYTES:
        raise ConfigError(f"optim.name: the planner does not know the state of '{recipe.optim.name}'")
    parts = mesh.shard * (mesh.sequence if zero >= 2 else 1)
    frozen = 4.0 * (size.weights - size.trained)
    weights, gradients = 4.0 * size.trained, 4.0 * size.trained
    optimizer = _OPTIMIZER_BYTES[recipe.optim.name] * size.trained
    ema = 4.0 * size.trained if recipe.train.ema is not None and not recipe.train.ema.on_cpu else 0.0
    if zero >= 1:
        optimizer /= parts
    if recipe.optim.offload:
        # It visits the device in parts while weights are moved, when activations are gone.
        optimizer = 0.0
    if zero >= 2:
        gathered = weights if zero == 2 else 4.0 * min(2 * size.largest_block, size.trained)
        weights = weights / parts + (gathered if parts > 1 else 0.0)
        gradients = gradients / parts + (4.0 * size.largest_block if parts > 1 else 0.0)
        ema /= parts
    if zero == 3:
        frozen /= parts
    text_parts = {"shard": mesh.num_ranks, "tensor": recipe.parallel.tensor}.get(recipe.parallel.encoders, 1)
    return Resident(weights + frozen, gradients, optimizer, ema, size.vae_bytes, size.text_bytes / text_parts)


def checkpoint_bytes(recipe: Recipe, size: ModelSize) -> float:
    """One checkpoint on disk: weights (or adapters), the optimizer's state and the average."""
    ema = 4.0 if recipe.train.ema is not None else 0.0
    return size.trained * (4.0 + _OPTIMIZER_BYTES[recipe.optim.name] + ema)
