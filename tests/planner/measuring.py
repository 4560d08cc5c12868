"""What really happens on the CPU: bytes by the allocator's own record, operations by torch's counter."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from frameloom.core.device import without_collector


def record_peak(run: Callable[[], object]) -> int:
    """Bytes that `run` allocates at the worst moment."""
    # Nothing older may be freed while the record runs: it would be taken from this pass.
    gc.collect()
    with without_collector(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    live = peak = 0
    for event in sorted(_memory_events(profiler), key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _memory_events(profiler: Any) -> list[Any]:
    return [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]


def count_flops(run: Callable[[], object]) -> int:
    """By torch's own formulas, also for the kernels of the CPU that it has no entry for."""
    aten = torch.ops.aten
    entries = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
            *shapes[:4]
        ),
        torch.ops.frameloom.linear: lambda rows, weight, *_, **__: 2 * math.prod(rows) * weight[0],
    }
    with FlopCounterMode(display=False, custom_mapping=entries) as counter:
        run()
    return counter.get_total_flops()
