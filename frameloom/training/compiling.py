"""Compiling a model's blocks with `torch.compile`, each as one graph.

The code that inductor keeps on disk is kept apart for each limit on vectors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as shape_settings

from frameloom.core.errors import ConfigError

# Blocks of one kind share their graphs; each precision or pattern of a kind costs one. Beyond this many a run stops
# rather than crawl.
MAX_GRAPHS = 128
# torch's own settings: the widest vectors it may use, and where it keeps compiled code.
_WIDEST, _KEPT_CODE = "ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_CACHE_DIR"


def apply_compile(blocks: Iterable[nn.Module], settings: bool | str, device: torch.device) -> None:
    """Compile what a recipe's `train.compile` asks for; ConfigError when there is no working compiler."""
    if not settings:
        return
    backend = "inductor" if settings is True else str(settings)
    check_compiler(backend, device)
    compile_blocks(blocks, backend=backend)


def compile_blocks(blocks: Iterable[nn.Module], *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Replace each block's forward by a compiled one. A block that does not fit one graph is an error when it runs.

    Graphs are for any number of samples and tokens, but those for one sample: left to itself, the compiler would take
    the first lengths for fixed ones, and equal ones for the same, so that the code of a bucket would depend on those
    that came before it, and a resumed run would compile other code. Comes before recompute, which then runs the
    compiled block twice.
    """
    part_kept_code()
    shape_settings.use_duck_shape = False
    options: dict[str, Any] = {"recompile_limit": MAX_GRAPHS, "dynamic": True}
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=backend, **options)


def check_compiler(backend: str, device: torch.device) -> None:
    """Compile a line of arithmetic, so that a missing compiler is an error before clips are read."""
    part_kept_code()
    try:
        torch.compile(lambda x: x.sin() + 1, fullgraph=True, backend=backend)(torch.zeros(2, device=device))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"train.compile: '{backend}' cannot compile for {device.type} here ({reason}); install a C++ compiler "
            "(CXX names it) and, for a GPU, Triton, or set train.compile: false"
        ) from error


def part_kept_code() -> None:
    """A folder of its own for code that was compiled under a limit on vectors.

    Names in torch's folder do not tell such code apart: run under another limit it gives wrong numbers or ends the
    process.
    """
    if (limit := os.environ.get(_WIDEST)) and _KEPT_CODE not in os.environ:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        os.environ[_KEPT_CODE] = f"{default_cache_dir()}_{limit}"
