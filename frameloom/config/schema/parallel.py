"""The section of parallelism, and the mesh of processes that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from frameloom.config.schema.section import Count, Section


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
        description="dtype in which split weights are gathered (zero 2 and 3); bf16 halves what is sent",
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
    def num_ranks(self) -> int:
        return self.data * self.sequence

    def data_rank(self, rank: int) -> int:
        """Which share of the data a process takes; the axes are ordered as above, the last changes fastest."""
        return rank // self.sequence


def step_shares(section: ParallelSection, shape: MeshShape) -> int:
    """Shares of a step, each of train.accumulate micro-batches."""
    return section.data or shape.data
