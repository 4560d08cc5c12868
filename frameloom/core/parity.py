"""What a golden case holds and what a runner says of it; shared by the model shelves and the parity command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ParityCase:
    """One golden file. The prefixes `weights.`, `in.` and `out.` are removed, weights are float32."""

    name: str
    config: dict[str, Any]
    weights: dict[str, Tensor]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@dataclass(frozen=True)
class ParityOutput:
    """One compared tensor. `ours` is None when it was not compared; `note` then says why."""

    name: str
    ours: Tensor | None
    expected: Tensor
    tolerance: float
    note: str = ""


class ParityRunner(Protocol):
    """Knows one kind of case; a module with these two functions is a runner."""

    def matches(self, case: ParityCase) -> bool: ...

    def run(self, case: ParityCase) -> list[ParityOutput]: ...
