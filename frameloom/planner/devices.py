"""Speeds and memory of devices: accelerators from their data sheets, this machine by measurement.

Rates are dense products of matrices; a training step reaches `EFFICIENCY` of them and `BANDWIDTH_SHARE` of the memory's
speed. Both are what well-tuned transformer training is known to reach, not promises: `--calibrate` measures them here.

Between devices: `link` is what one sends to others of its box of eight at a time, `network` what a whole box sends out,
each in one direction; large messages reach `LINK_SHARE` of it. NVLink 4 has 450 GB/s and eight ports of 400 Gb/s (H100,
H200), NVLink 3 has 300 GB/s and eight of 200 Gb/s (A100), HCCS seven links of 28 GB/s and eight of 200 Gb/s (910B),
PCIe 4.0 x16 has 32 GB/s and such a box one port of 100 Gb/s (4090); processes on one host have a fifth of its memory's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from frameloom.core.random import stream
from frameloom.core.spelling import refuse_unknown
from frameloom.core.units import format_bytes, parse_bytes

EFFICIENCY = 0.45
BANDWIDTH_SHARE = 0.7
LINK_SHARE = 0.7
BOX = 8
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """`half_rate` and `full_rate` in operations per second (bf16; fp32, or TF32 where there is such a thing).

    `memory` is what a run may take; where that is not all, `whole_memory` is what there is.
    """

    name: str
    half_rate: float
    full_rate: float
    bandwidth: float
    memory: float
    link: float
    network: float
    efficiency: float = EFFICIENCY
    bandwidth_share: float = BANDWIDTH_SHARE
    whole_memory: float | None = None

    def rate(self, *, bf16: bool) -> float:
        return self.half_rate if bf16 else self.full_rate

    def seconds(self, flops: float, moved_bytes: float, *, bf16: bool) -> float:
        """Products at the machine's rate, everything else at its memory's speed."""
        return flops / (self.rate(bf16=bf16) * self.efficiency) + moved_bytes / (self.bandwidth * self.bandwidth_share)

    def limit(self, most: float | str | None) -> Device:
        """The device for a run that takes at most a share or an amount of a GPU (train.max_device_memory).

        On the host a run has no such limit. A device that is limited already is limited anew.
        """
        if most is None or self.name == "cpu":
            return self
        whole = self.whole_memory or self.memory
        amount = parse_bytes(most, where="train.max_device_memory") if isinstance(most, str) else most * whole
        memory = min(amount, whole)
        return replace(self, memory=memory, whole_memory=whole)

    def format_memory(self) -> str:
        """As memory is sold: 80 GB, 60 MB."""
        shown = format_bytes(self.memory)
        return shown if self.whole_memory is None else f"{shown} of {format_bytes(self.whole_memory)}"

    def send_seconds(self, sent_bytes: float, *, members: int, stride: int = 1) -> float:
        """For what each of `members` devices sends around a ring; they are `stride` devices apart.

        A ring over several boxes leaves each of them once, so neighbours share its ports; groups with a stride leave
        it beside each other, and share them, too.
        """
        seconds = sent_bytes / self.link
        if members * stride > BOX:
            seconds = max(seconds, sent_bytes * min(stride, BOX) / self.network)
        return seconds / LINK_SHARE


DEVICES = {
    device.name: device
    for device in (
        Device("h100", 989 * _TERA, 494 * _TERA, 3350 * _GIGA, 80 * _GIGA, 450 * _GIGA, 400 * _GIGA),
        Device("h200", 989 * _TERA, 494 * _TERA, 4800 * _GIGA, 141 * _GIGA, 450 * _GIGA, 400 * _GIGA),
        Device("a100", 312 * _TERA, 156 * _TERA, 2039 * _GIGA, 80 * _GIGA, 300 * _GIGA, 200 * _GIGA),
        Device("4090", 165 * _TERA, 82 * _TERA, 1008 * _GIGA, 24 * _GIGA, 32 * _GIGA, 12.5 * _GIGA),
        Device("910b", 320 * _TERA, 80 * _TERA, 1600 * _GIGA, 64 * _GIGA, 196 * _GIGA, 200 * _GIGA),
        Device("cpu", 0.1 * _TERA, 0.1 * _TERA, 20 * _GIGA, 16 * _GIGA, 4 * _GIGA, 1.25 * _GIGA),
    )
}


def choose_device(name: str, memory: str | None) -> Device:
    refuse_unknown(name, DEVICES, what="--device")
    device = DEVICES[name]
    return device if memory is None else replace(device, memory=parse_bytes(memory, where="--memory"))


def calibrate(device: Device, *, seconds: float = 1.0) -> Device:
    """The same device with the rates of this machine: of a large product, and of a sum over much memory."""
    target = torch.device("cuda" if torch.cuda.is_available() and device.name != "cpu" else "cpu")
    side = 8192 if target.type == "cuda" else 1024
    generator = stream(0, "calibrate", device=target.type)
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.randn(side, side, generator=generator, device=target).to(dtype)
        rates[dtype] = 2 * side**3 * _rate(lambda left=left: left @ left, seconds, target)
    many = torch.zeros(2**24 if target.type == "cpu" else 2**28, device=target)
    bandwidth = 2 * many.nbytes * _rate(lambda: many.add_(1.0), seconds, target)
    # What was measured is what is reached: nothing is to be taken off for large layers.
    return replace(
        device,
        half_rate=rates[torch.bfloat16],
        full_rate=rates[torch.float32],
        bandwidth=bandwidth,
        efficiency=0.8,
        bandwidth_share=0.8,
    )


def _rate(run: object, seconds: float, target: torch.device) -> float:
    """How often per second `run` can be called."""
    assert callable(run)
    run()
    count, started = 0, time.perf_counter()
    while True:
        run()
        if target.type == "cuda":
            torch.cuda.synchronize(target)
        count += 1
        elapsed = time.perf_counter() - started
        if elapsed > seconds:
            return count / elapsed
