"""Rules of parallelism with arithmetic, and the mesh of a number of processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from frameloom.config.loading.problems import Problem
from frameloom.config.schema.parallel import MeshShape, ParallelSection, step_shares
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError
from frameloom.models.registry import DENOISERS

# Text encoders whose layers can be split; the others are small.
LAYERED = ("t5", "mt5")


def check_parallel(recipe: Recipe) -> Iterator[Problem]:
    """Heads of the denoiser and of text encoders that processes split evenly."""
    if recipe.task != "denoiser":
        return
    if recipe.parallel.sequence > 1:
        yield from _check_heads(recipe)
    if recipe.parallel.encoders != "tensor":
        return
    names = [encoder.name for encoder in recipe.text.encoders]
    if not any(name in LAYERED for name in names):
        text = f"parallel.encoders is tensor, but text.encoders are {', '.join(names)}"
        advice = f"layers of {' and '.join(LAYERED)} are split: write each"
        yield Problem(("parallel", "encoders"), f"{text}; {advice}", (("text", "encoders"),))
    for index, encoder in enumerate(recipe.text.encoders):
        if encoder.name in LAYERED and encoder.path is not None:
            yield from _check_encoder(Path(encoder.path), index, recipe.parallel.tensor)


def _check_encoder(folder: Path, index: int, degree: int) -> Iterator[Problem]:
    """What an encoder's own config.json says, where it can be read; others are checked when they are built."""
    for place in (folder, *(folder / name for name in ("text_encoder", "text_encoder_2", "text_encoder_3"))):
        try:
            found = json.loads((place / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        heads, columns = (found.get(name) for name in ("num_heads", "d_ff")) if isinstance(found, dict) else (0, 0)
        if not isinstance(heads, int) or not isinstance(columns, int) or heads < 1 or columns < 1:
            continue
        if heads % degree or columns % degree:
            fitting = [few for few in range(1, heads + 1) if heads % few == 0 and columns % few == 0]
            text = f"parallel.tensor is {degree}, but text.encoders.{index} has {heads} attention heads and {columns}"
            advice = f"processes take equally many of both: write one of {', '.join(map(str, fitting))}"
            yield Problem(("parallel", "tensor"), f"{text} inner columns ({place}); {advice}", (("text", "encoders"),))
        return


def _check_heads(recipe: Recipe) -> Iterator[Problem]:
    """Processes that share a clip take equally many heads. A model folder says its own: that is checked when built."""
    model, degree = recipe.model, recipe.parallel.sequence
    family = DENOISERS.get(model.family)
    if family is None or (model.weights is not None and not model.weights.endswith(".safetensors")):
        return
    path, also = ("parallel", "sequence"), (("model", "family"), ("model", "size"))
    num_heads = family.heads_of(model.size, model.overrides)
    if next(iter(family.sizes.values())).heads is None:
        text = f"parallel.sequence is {degree}, but the tokens of {model.family} cannot be divided over processes"
        yield Problem(path, f"{text}; write 1", also)
    elif num_heads is not None and (num_heads < 1 or num_heads % degree):
        fitting = ", ".join(str(count) for count in range(1, num_heads + 1) if num_heads % count == 0)
        text = f"parallel.sequence is {degree}, but {model.family} {model.size} has {num_heads} attention heads"
        yield Problem(path, f"{text}, and processes take equally many; write one of {fitting}", also)


def check_world(recipe: Recipe, num_ranks: int) -> MeshShape:
    """The mesh of a recipe on so many processes; ConfigError when they cannot share it."""
    section, accumulate = recipe.parallel, recipe.train.accumulate
    shape = fit_mesh(section, num_ranks)
    num_microbatches = step_shares(section, shape) * accumulate
    if num_microbatches < shape.data:
        raise ConfigError(
            f"parallel.data {section.data} x train.accumulate {accumulate} = {num_microbatches} micro-batches a step, "
            f"but {shape.data} data-parallel processes; raise parallel.data to {-(-shape.data // accumulate)} or more "
            "(a larger batch), or start fewer processes"
        )
    return shape


def fit_mesh(section: ParallelSection, num_ranks: int) -> MeshShape:
    """The mesh of `num_ranks` processes; ConfigError with the arithmetic when they cannot be arranged so."""
    processes = f"{num_ranks} {'process' if num_ranks == 1 else 'processes'}"
    for key, size in (("sequence", section.sequence), ("tensor", section.tensor)):
        if num_ranks % size:
            below = num_ranks // size * size
            near = f"{below} or {below + size}" if below else f"{size}"
            text = f"parallel.{key} {size} does not divide {processes}; start {near} processes, or change it"
            raise ConfigError(text)
    data = num_ranks // section.sequence
    # What is left out follows, rounded down so that a remainder shows.
    if section.zero == 0:
        replicate, shard = section.replicate or data, section.shard or 1
    elif section.shard is None:
        replicate = section.replicate or 1
        shard = max(data // replicate, 1)
    else:
        replicate, shard = section.replicate or max(data // section.shard, 1), section.shard
    if replicate * shard != data:
        sequence = section.sequence
        shown = f"{replicate} x {shard} x {sequence} = {replicate * shard * sequence}"
        raise ConfigError(
            f"parallel.replicate x shard x sequence is {shown}, but there are {processes}; replicate x shard must be "
            f"{num_ranks} / {sequence} = {data}: leave one of them out to have it follow"
        )
    return MeshShape(replicate, shard, section.sequence)
