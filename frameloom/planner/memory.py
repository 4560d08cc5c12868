"""Bytes that stay on a device between steps: weights, gradients, optimizer state, EMA, frozen encoders; checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from frameloom.config.schema.parallel import MeshShape, step_shares
from frameloom.config.schema.recipe import Recipe
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


def rest_on_device(recipe: Recipe, size: ModelSize, mesh: MeshShape, zero: int, *, parks: bool = False) -> Resident:
    """What a device holds while a step runs, activations apart; encoders are not on it all the time if it `parks` them.

    zero 1 splits the optimizer's state and zero 2 the gradients too; zero 3 keeps a part of the weights and gathers
    two blocks at a time. From zero 2 on, devices that share a clip hold different parts, too.
    """
    if recipe.optim.name not in _OPTIMIZER_BYTES:
        raise ConfigError(f"optim.name: the planner does not know the state of '{recipe.optim.name}'")
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
