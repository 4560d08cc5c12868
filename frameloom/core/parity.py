"""What a golden case holds and what a runner says of it; shared by the model shelves and the parity command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ParityCase:
    """One golden file. The prefixes `weights.`, `in.` and `out.` are removed, weights are float32.

    `path` is the file itself, for cases that name another one beside it: the weights of a shared autoencoder, clips.
    """

    name: str
    config: dict[str, Any]
    weights: dict[str, Tensor]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    path: Path | None = None

    @property
    def kind(self) -> str:
        """The file's name without its folder and ending."""
        return self.name.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class ParityOutput:
    """One compared tensor. `ours` is None when it was not compared; `note` then says why.

    `deviation` names the entry of the list of deviations that says why it was not compared, or why `expected` is not
    the published result but what it should have been.
    """

    name: str
    ours: Tensor | None
    expected: Tensor
    tolerance: float
    note: str = ""
    deviation: str = ""


class ParityRunner(Protocol):
    """Knows one kind of case; a module with these two functions is a runner."""

    def matches(self, case: ParityCase) -> bool: ...

    def run(self, case: ParityCase) -> list[ParityOutput]: ...


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def pair_outputs(
    case: ParityCase,
    ours: Mapping[str, Tensor],
    tolerance: float | Callable[[str, Tensor], float],
    deviations: Mapping[str, str] | None = None,
) -> list[ParityOutput]:
    """Every output of the file beside ours of the same name; one that we lack is not compared.

    `tolerance` is a number, or a function of the name and the published tensor; `deviations` names the entry of the
    list of deviations for outputs that we do not make.
    """
    results = []
    for name, expected in case.outputs.items():
        allowed = tolerance(name, expected) if callable(tolerance) else tolerance
        note = "" if name in ours else "the runner of this kind of case makes no such output"
        entry = (deviations or {}).get(name, "")
        results.append(ParityOutput(name, ours.get(name), expected, allowed, note, entry))
    return results


def relative_to_largest(share: float) -> Callable[[str, Tensor], float]:
    """A tolerance of `share` times the largest number of the published tensor; 0 for a tensor of zeros."""

    def allow(name: str, expected: Tensor) -> float:
        return share * float(expected.double().abs().max()) if expected.numel() else 0.0

    return allow


def compare_numbers(name: str, ours: Any, expected: Any, tolerance: float = 0.0) -> ParityOutput:
    """Lists of numbers, nested alike; lengths that differ show up as another shape."""
    import torch

    return ParityOutput(name, _to_tensor(torch, ours), _to_tensor(torch, expected), tolerance)


def compare_facts(name: str, ours: Any, expected: Any) -> ParityOutput:
    """Texts, ragged lists and other values that are equal or not: the error is the number of places that differ."""
    import torch

    num_different = torch.tensor(float(_count_different(ours, expected)))
    return ParityOutput(name, num_different, torch.zeros(()), 0.0)


def _to_tensor(torch: Any, values: Any) -> Tensor:
    if hasattr(values, "detach"):
        return values.detach().to(torch.float64)  # type: ignore[no-any-return]
    return torch.as_tensor(values, dtype=torch.float64)  # type: ignore[no-any-return]


def _count_different(ours: Any, expected: Any) -> int:
    if isinstance(ours, Mapping) and isinstance(expected, Mapping):
        keys = ours.keys() | expected.keys()
        return sum(_count_different(ours.get(key, _ABSENT), expected.get(key, _ABSENT)) for key in keys)
    if isinstance(ours, (list, tuple)) and isinstance(expected, (list, tuple)):
        pairs = zip(ours, expected, strict=False)
        return sum(_count_different(*pair) for pair in pairs) + abs(len(ours) - len(expected))
    return int(bool(ours != expected))


_ABSENT = object()
