"""How the repeated blocks of a model are run: recomputed, compiled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from frameloom.config.section import Count, Section, Words
from frameloom.config.train_settings import Amount

Compile = Annotated[
    bool | Literal["inductor", "aot_eager", "eager"],
    Words("true, false, or the name of a compiler: inductor, aot_eager or eager"),
]


class RecomputeSection(Section):
    skip: Annotated[int, Field(ge=0)] = Field(
        default=0, description="the last blocks of each kind that keep their activations (num_no_recompute)"
    )
    blocks: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default={},
        description="how many blocks of a kind, from the first on, as in {double_blocks: 8}; other kinds: all",
        examples=[{"double_blocks": 8}],
    )
    every: Count = Field(default=1, description="of these blocks only each k-th, the first among them")
    offload: bool = Field(default=False, description="what blocks are given waits in host memory; needs a GPU")
    buffer: Amount | None = Field(
        default=None,
        description="the most pinned host memory for that; null: no limit (grad_ckpt_buffer_size, in two-byte numbers)",
        examples=["25GB"],
    )
