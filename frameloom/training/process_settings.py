"""Settings of the training process: a limit on device memory, deterministic kernels, scheduled garbage collection."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from frameloom.config.schema.training import TrainSection
from frameloom.core.errors import ConfigError
from frameloom.core.logging import get_logger
from frameloom.core.units import format_bytes, parse_bytes

_log = get_logger(__name__)
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def device_settings(settings: TrainSection, device: torch.device) -> Iterator[None]:
    """Inside the block the process has what `settings` ask for; to be entered before anything runs on the device."""
    if settings.max_device_memory is not None:
        limit_memory(settings.max_device_memory, device)
    if not settings.deterministic:
        yield
        return
    # cuBLAS reads this when it is first used; without it, deterministic products are refused.
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    before = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def limit_memory(limit: float | str, device: torch.device) -> None:
    """Let this process take at most `limit` of the device: a share, or an amount as 30GB."""
    if device.type != "cuda":
        _log.warning("train.max_device_memory is %s, which has no effect on the %s", limit, device.type.upper())
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(memory_share(limit, total), device)


def memory_share(limit: float | str, total_bytes: int) -> float:
    """`limit` as a share of the device's memory; ConfigError when the device has less."""
    if not isinstance(limit, str):
        return limit
    share = parse_bytes(limit, where="train.max_device_memory") / total_bytes
    if share > 1:
        raise ConfigError(
            f"train.max_device_memory is {limit}, but the device has {format_bytes(total_bytes)}; write that or less"
        )
    return share


@contextmanager
def scheduled_garbage(every: int | None) -> Iterator[Callable[[int], bool]]:
    """Inside, cycles are collected only by the function that it gives: call it after each step; it returns whether it
    collected. Objects that exist at the start (modules, the model) are not looked at until the end.

    Left alone, Python's collector stops a process for a moment whenever enough objects have been made, each process at
    another time, and all others wait for it at the next collective. On a schedule all stop together, after the same
    step. `every` None leaves the collector alone.
    """
    if every is None:
        yield lambda step: False
        return
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()

    def collect(step: int) -> bool:
        if step % every:
            return False
        gc.collect()
        return True

    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
