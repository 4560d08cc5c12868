"""How several processes share a run, and the arithmetic of their number. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from frameloom.config.schema.section import Count, Section
from frameloom.core.errors import ConfigError


class ParallelSection(Section):
    zero: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="what is split over processes: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights",
    )
    data: Count | None = Field(
        default=None,
        description="shares of a step, each of train.accumulate micro-batches; null: one for each process",
    )
    replicate: Count | None = Field(
        default=None, description="groups that each hold the whole state (zero 1 to 3); null: what is left over, or 1"
    )
    shard: Count | None = Field(
        default=None, description="processes that split the state between them; null: all, or what is left over"
    )
    sequence: Count = Field(default=1, description="processes that split the tokens of one clip")
    tensor: Count = Field(
        default=1,
        description="processes that split each layer of the text encoders (encoders: tensor); no denoiser is split so",
    )
    gather: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="number format in which split weights are gathered (zero 2 and 3); bf16 halves what is sent",
    )
    encoders: Literal["each", "once", "shard", "tensor"] = Field(
        default="each",
        description="text encoders in each process, one per machine (once), in parts (shard), split layers (tensor)",
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=1800, description="a process that waits longer for another one gives up"
    )


@dataclass(frozen=True)
class MeshShape:
    """Processes along each axis; their product is the number of processes."""

    replicate: int = 1
    shard: int = 1
    sequence: int = 1

    @property
    def data(self) -> int:
        """Different shares of a step: processes that differ only in `sequence` see the same clips."""
        return self.replicate * self.shard

    @property
    def mates(self) -> int:
        """Processes that see the same clips."""
        return self.sequence

    @property
    def num_ranks(self) -> int:
        return self.data * self.mates

    def data_rank(self, rank: int) -> int:
        """Which share of the data a process takes; the axes are ordered as above, the last changes fastest."""
        return rank // self.mates


def fit_mesh(section: ParallelSection, num_ranks: int) -> MeshShape:
    """The mesh of `num_ranks` processes; ConfigError with the arithmetic when they cannot be arranged so."""
    for key, size in (("sequence", section.sequence), ("tensor", section.tensor)):
        if num_ranks % size:
            raise ConfigError(
                f"parallel.{key} {size} does not divide {num_ranks} {_processes(num_ranks)}; start "
                f"{_multiples(num_ranks, size)} processes, or change it"
            )
    mates = section.sequence
    data = num_ranks // mates
    replicate, shard = _split_data(section, data)
    if replicate * shard != data:
        shown = f"{replicate} x {shard} x {mates} = {replicate * shard * mates}"
        raise ConfigError(
            f"parallel.replicate x shard x sequence is {shown}, but there are {num_ranks} "
            f"{_processes(num_ranks)}; replicate x shard must be {num_ranks} / {mates} = {data}: leave one of them out "
            "to have it follow"
        )
    return MeshShape(replicate, shard, mates)


def _split_data(section: ParallelSection, data: int) -> tuple[int, int]:
    """(replicate, shard) as written; what is left out follows, rounded down so that a remainder shows."""
    if section.zero == 0:
        return section.replicate or data, section.shard or 1
    if section.shard is None:
        replicate = section.replicate or 1
        return replicate, max(data // replicate, 1)
    return section.replicate or max(data // section.shard, 1), section.shard


def step_shares(section: ParallelSection, shape: MeshShape) -> int:
    """Shares of a step, each of train.accumulate micro-batches."""
    return section.data or shape.data


def check_step(section: ParallelSection, shape: MeshShape, accumulate: int) -> None:
    """ConfigError when a step has too few micro-batches for every data-parallel process to get one."""
    num_microbatches = step_shares(section, shape) * accumulate
    if num_microbatches < shape.data:
        raise ConfigError(
            f"parallel.data {section.data} x train.accumulate {accumulate} = {num_microbatches} micro-batches a step, "
            f"but {shape.data} data-parallel processes; raise parallel.data to {-(-shape.data // accumulate)} or more "
            "(a larger batch), or start fewer processes"
        )


def _processes(count: int) -> str:
    return "process" if count == 1 else "processes"


def _multiples(count: int, unit: int) -> str:
    below = count // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
