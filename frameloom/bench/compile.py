"""The step of `bench model` with compiled blocks (`train.compile`), against the other side as its scripts have it.

The note of a row tells what is left when the other side is compiled, too. Only transformers of about 30 million
parameters: a tiny model is compiled for longer than it trains, and the UNet is diffusers' own on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from frameloom.bench.harness import Effort, Row
from frameloom.bench.model import Case, list_batches, list_cases, measure_cases


def measure(effort: Effort) -> Iterator[Row]:
    yield from measure_cases("compile", list_compiled(is_quick=effort.is_quick), effort)


def list_compiled(*, is_quick: bool = False) -> Iterator[Case]:
    """On one clip and on four. A quick run traces the blocks of tiny models and generates no code."""
    for case in list_cases(is_quick=True) if is_quick else (*list_cases(), *list_batches()):
        if case.family != "sdxl" and (is_quick or case.is_large):
            yield replace(case, compiler="eager" if is_quick else "inductor")
