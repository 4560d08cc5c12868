"""Recompute blocks in the backward pass, or compile them, each as one graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.fx.experimental import _config as shape_settings
from torch.utils.checkpoint import checkpoint

from frameloom.config.schema.training import RecomputeSection, memory_bytes
from frameloom.core.errors import ConfigError
from frameloom.core.spelling import refuse_unknown
from frameloom.training.memory.activation_offload import HostBuffer

_WHERE = "train.recompute"


def recompute_blocks(blocks: Iterable[nn.Module], *, offload: bool = False, buffer: HostBuffer | None = None) -> None:
    """Make each block forget its inner activations; results stay equal to the bit, because no block has a random state:
    dropout draws from keys among a block's inputs.

    With `offload` what a block is given waits in host memory for the backward pass: as much as there is, or, with a
    `buffer`, what fits there.
    """
    run = _run
    if buffer is not None:
        run = partial(_run_buffered, buffer=buffer)
    elif offload:
        run = partial(_run_offloaded, pin_memory=torch.cuda.is_available())
    for block in blocks:
        block.forward = partial(run, block.forward)


def _run(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


def _run_offloaded(forward: Callable[..., Any], *args: Any, pin_memory: bool, **options: Any) -> Any:
    # Only the block's inputs are saved under this: inside, the checkpoint has hooks of its own.
    with save_on_cpu(pin_memory=pin_memory):
        return _run(forward, *args, **options)


def _run_buffered(forward: Callable[..., Any], *args: Any, buffer: HostBuffer, **options: Any) -> Any:
    with buffer.keeping(args):
        return _run(forward, *args, **options)


def group_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, list[nn.Module]]:
    """Blocks by kind, which is the name of the list they stand in, each kind in the order given."""
    names = {id(module): name for name, module in model.named_modules()}
    kinds: dict[str, list[nn.Module]] = {}
    for block in blocks:
        parts = [part for part in names[id(block)].split(".") if not part.isdecimal()]
        kinds.setdefault(parts[-1], []).append(block)
    return kinds


def choose_blocks(kinds: Mapping[str, list[nn.Module]], settings: RecomputeSection) -> list[nn.Module]:
    """The first blocks of each kind, as many as the settings say, or each k-th of them.

    The last ones are left out, not the first: their activations are used up before any block is recomputed.
    """
    for kind in settings.blocks:
        refuse_unknown(kind, kinds, what=f"{_WHERE}.blocks")
    chosen = []
    for kind, blocks in kinds.items():
        limit = min(settings.blocks.get(kind, len(blocks)), len(blocks) - settings.skip)
        chosen += blocks[: max(0, limit) : settings.every]
    if not chosen:
        found = ", ".join(f"{len(blocks)} {kind}" for kind, blocks in kinds.items())
        raise ConfigError(
            f"{_WHERE}: skip {settings.skip} and blocks {settings.blocks} leave nothing to recompute of {found}; lower "
            f"skip, raise a number of blocks, or set {_WHERE}: false"
        )
    return chosen


def apply_recompute(
    model: nn.Module, blocks: Iterable[nn.Module], settings: RecomputeSection | bool, device: torch.device
) -> None:
    """Recompute what a recipe's `train.recompute` asks for."""
    if not settings:
        return
    if settings is True:
        settings = RecomputeSection()
    if settings.offload and device.type == "cpu":
        raise ConfigError(
            f"{_WHERE}.offload is true, but the run computes on the CPU, whose memory is the host's; set it to false, "
            "or choose a GPU with train.device"
        )
    chosen = choose_blocks(group_blocks(model, blocks), settings)
    buffer = None
    if settings.offload and settings.buffer is not None:
        buffer = HostBuffer(memory_bytes(settings.buffer), pin_memory=torch.cuda.is_available())
    recompute_blocks(chosen, offload=settings.offload, buffer=buffer)


# Blocks of one kind share their graphs; each precision or pattern of a kind costs one. Beyond this many a run stops
# rather than crawl.
MAX_GRAPHS = 128
# torch's own settings: the widest vectors it may use, and where it keeps compiled code.
_WIDEST, _KEPT_CODE = "ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_CACHE_DIR"


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


def apply_compile(blocks: Iterable[nn.Module], settings: bool | str, device: torch.device) -> None:
    """Compile what a recipe's `train.compile` asks for; ConfigError when there is no working compiler."""
    if not settings:
        return
    backend = "inductor" if settings is True else str(settings)
    check_compiler(backend, device)
    compile_blocks(blocks, backend=backend)


def check_compiler(backend: str, device: torch.device) -> None:
    """Compile a line of arithmetic, so that a missing compiler is told before clips are read."""
    part_kept_code()
    try:
        torch.compile(_calculate, fullgraph=True, backend=backend)(torch.zeros(2, device=device))
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


def _calculate(x: Tensor) -> Tensor:
    return x.sin() + 1
