"""Loading of state dicts, with one message that lists missing, unexpected and mis-shaped keys."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from frameloom.core.errors import CheckpointError

# Of data-parallel training, and of the MindSpore port's loss network.
_WRAPPERS = ("module.", "_backbone.")


def check_fit(expected: Mapping[str, Tensor], given: Mapping[str, Tensor], *, where: str) -> None:
    """CheckpointError unless `given` has exactly the keys and shapes of `expected`."""
    shapes = [
        f"{key} is {_size(given[key])}, the model has {_size(expected[key])}"
        for key in sorted(expected.keys() & given.keys())
        if given[key].shape != expected[key].shape
    ]
    problems = {
        "missing": sorted(expected.keys() - given.keys()),
        "unexpected": sorted(given.keys() - expected.keys()),
        "of another shape": shapes,
    }
    parts = [f"{len(names)} {problem} ({shorten(names)})" for problem, names in problems.items() if names]
    if parts:
        raise CheckpointError(
            f"{where} does not fit the model: {'; '.join(parts)}; choose the size and the settings that the weights "
            "were made with"
        )


def load_fitting(model: nn.Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Fill `model` after `check_fit`; one without storage, from the meta device, takes the tensors themselves."""
    expected = model.state_dict()
    given = dict(tensors)  # once: a lazy mapping reads its file at every look
    check_fit(expected, given, where=where)
    model.load_state_dict(given, assign=any(tensor.is_meta for tensor in expected.values()))


def strip_wrappers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keys without the prefixes that trainers put before all of them."""
    state = dict(tensors)
    while prefix := next((prefix for prefix in _WRAPPERS if state and all(k.startswith(prefix) for k in state)), ""):
        state = {key.removeprefix(prefix): tensor for key, tensor in state.items()}
    return state


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a single number"


def shorten(names: list[str], *, shown: int = 8) -> str:
    """The first few of a list, and how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
