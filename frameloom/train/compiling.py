"""Compile the repeated blocks of a model, each as one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from frameloom.core.errors import ConfigError

# Blocks of one kind share their graphs; each new shape, precision or pattern of a kind costs one. Beyond this many a
# run stops rather than crawl.
MAX_GRAPHS = 128


def compile_blocks(blocks: Iterable[nn.Module], *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Replace each block's forward by a compiled one. A block that does not fit one graph is an error when it runs.

    Comes before recompute, which then runs the compiled block twice.
    """
    options: dict[str, Any] = {"recompile_limit": MAX_GRAPHS}
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=backend, **options)


def apply_compile(blocks: Iterable[nn.Module], settings: bool | str, device: torch.device) -> None:
    """Compile what a recipe's `train.compile` asks for; ConfigError when there is no working compiler."""
    if not settings:
        return
    backend = "inductor" if settings is True else str(settings)
    check_compiler(backend, device)
    compile_blocks(blocks, backend=backend)


def check_compiler(backend: str, device: torch.device) -> None:
    """Compile a line of arithmetic, so that a missing compiler is told before clips are read."""
    try:
        torch.compile(_calculate, fullgraph=True, backend=backend)(torch.zeros(2, device=device))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"train.compile: '{backend}' cannot compile for {device.type} here ({reason}); install a C++ compiler "
            "(CXX names it) and, for a GPU, Triton, or set train.compile: false"
        ) from error


def _calculate(x: Tensor) -> Tensor:
    return x.sin() + 1
